"""Structured output of a request: selects the grammar that constrains its answer, after the model's reasoning. It
decides whether an answer begins with reasoning; engine/text/grammars.py writes the grammars."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.settings.config import Config
from engine.text.grammars import (
    ReasoningPrefix,
    limited_reasoning,
    unconstrained_answer,
    unlimited_reasoning,
    write_grammar,
)
from engine.text.tokenizer import Tokenizer
from engine.wire import REASONING_BEGIN, REASONING_END, GenerationRequest

MAX_CLOSING_TOKENS = 8  # last tokens of a prompt in which an opened or closed reasoning block is searched


@dataclass(frozen=True)
class GrammarBuilder:
    """Builds the grammars of all requests of a server. `reasoning` is the server's `Config.reasoning`: whether answers
    begin with reasoning, which the grammar must allow."""

    any_whitespace: bool = True  # in JSON answers
    reasoning: str = "never"

    @classmethod
    def of_server(cls, config: Config) -> GrammarBuilder:
        return cls(
            any_whitespace=not config.guided_decoding_disable_any_whitespace,
            reasoning=config.reasoning,
        )

    def build(
        self, request: GenerationRequest, reasoning: str | None, stop_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        """Return the field that asks for structured output and its grammar; empty if the answer is unconstrained.
        `reasoning` is what `reasoning_of` returned for the request. Raises InvalidRequest."""
        output, budget = request.structured_output, request.reasoning_max_tokens
        if budget and self.reasoning == "never":
            text = "The `{field}` needs a server that knows its model's thoughts, by REASONING_PARSER"
            raise InvalidRequest(text, field="reasoning_max_tokens", value=budget)
        may_end = output is None or output.kind != "token_ids"
        has_reasoning = reasoning in ("may", "does") and may_end
        if output is None and not (has_reasoning and budget):
            return ()
        field = output.field if output else "reasoning_max_tokens"
        if may_end and not (tokenizer.eos_token_ids and stop_ids):
            text = "The `{field}` needs an end-of-sequence token, which the model lacks or `{ignore_eos}` forbids"
            raise InvalidRequest(text, field=field)
        rule = unlimited_reasoning(REASONING_END) if has_reasoning else ""
        if has_reasoning and budget:
            excluded_ids = (_marker_id(REASONING_END, tokenizer), *stop_ids)
            rule = limited_reasoning(budget, REASONING_END, excluded_ids)
        if output is None:
            begin = None if reasoning == "does" else (REASONING_BEGIN, _marker_id(REASONING_BEGIN, tokenizer))
            return field, unconstrained_answer(rule, begin)
        is_compact = request.guided_decoding_disable_any_whitespace
        any_whitespace = self.any_whitespace if is_compact is None else not is_compact
        prefix = ReasoningPrefix(rule, _begin(tokenizer) if reasoning == "may" else "") if rule else None
        return field, write_grammar(output, any_whitespace, prefix)

    def reasoning_of(self, request: GenerationRequest, prompt_ids: list[int], tokenizer: Tokenizer) -> str | None:
        """Return whether an answer to this prompt begins with reasoning, as a value of `Config.reasoning`; None if the
        server does not separate reasoning.

        The end of the prompt takes precedence: the chat template of a model that always reasons opens the reasoning
        block, whatever the client asks for, and a template that skips reasoning closes it. Otherwise
        `enable_thinking` of the client decides."""
        if self.reasoning == "never":
            return None
        end = tokenizer.decode(prompt_ids[-MAX_CLOSING_TOKENS:], skip_special_tokens=False).rstrip()
        if request.is_continuation or end.endswith(REASONING_END):
            return "never"
        if end.endswith(REASONING_BEGIN):
            return "does"
        if (request.chat_template_kwargs or {}).get("enable_thinking") is False:
            return "never"
        return self.reasoning


def _begin(tokenizer: Tokenizer) -> str:
    """Return the Lark expression that opens the reasoning block: its token if it is a single one, so that an answer
    cannot begin with a part of its text, else its text."""
    token_ids = tokenizer.encode(REASONING_BEGIN, add_special_tokens=False)
    return f"<[{token_ids[0]}]>" if len(token_ids) == 1 else json.dumps(REASONING_BEGIN)


def _marker_id(text: str, tokenizer: Tokenizer) -> int:
    """Return the token id of a reasoning marker. Raises InvalidRequest if it is not a single, ordinary token."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1 or token_ids[0] in tokenizer.special_ids:
        sentence = "The `{field}` needs a model to which {value} is one token, and not a special one"
        raise InvalidRequest(sentence, field="reasoning_max_tokens", value=text)
    return token_ids[0]
