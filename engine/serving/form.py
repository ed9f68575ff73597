"""The form that an answer must have: what a request asks for, after what the model thinks first. Knows when there is a
thought, not what a form is made of (engine/text/forms.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.settings.config import Config
from engine.text.forms import Thought, bounded_thought, free_answer, free_thought, written
from engine.text.tokenizer import Tokenizer
from engine.wire import THOUGHT_BEGIN, THOUGHT_END, GenerationRequest

MAX_CLOSING_TOKENS = 8  # that a prompt may close a thought with


@dataclass(frozen=True)
class Forms:
    """Of all answers of a server."""

    any_whitespace: bool = True  # in JSON that an answer must be
    thought: str = "never"  # that an answer begins with, see `Config.thought`: its form begins after that

    @classmethod
    def of_server(cls, config: Config) -> Forms:
        return cls(
            any_whitespace=not config.guided_decoding_disable_any_whitespace,
            thought=config.thought,
        )

    def of(
        self, request: GenerationRequest, thought: str | None, stop_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        """With the field that asks for it; nothing: it is free. Of an answer with that `thought_of` it. Raises
        InvalidRequest."""
        form, budget = request.form, request.reasoning_max_tokens
        if budget and self.thought == "never":
            text = "The `{field}` needs a server that knows its model's thoughts, by REASONING_PARSER"
            raise InvalidRequest(text, field="reasoning_max_tokens", value=budget)
        will_think = thought in ("may", "does") and (form is None or form.kind != "token_ids")
        if form is None and not (will_think and budget):
            return ()
        field = form.field if form else "reasoning_max_tokens"
        needs_end = form is None or form.kind != "token_ids"
        if needs_end and not (tokenizer.eos_token_ids and stop_ids):
            text = "The `{field}` needs an end-of-sequence token, which the model lacks or `{ignore_eos}` forbids"
            raise InvalidRequest(text, field=field)
        rule = free_thought(THOUGHT_END) if will_think else ""
        if will_think and budget:
            not_within = (_mark(THOUGHT_END, tokenizer), *stop_ids)
            rule = bounded_thought(budget, THOUGHT_END, not_within)
        if form is None:
            begin = None if thought == "does" else (THOUGHT_BEGIN, _mark(THOUGHT_BEGIN, tokenizer))
            return field, free_answer(rule, begin)
        is_compact = request.guided_decoding_disable_any_whitespace
        any_whitespace = self.any_whitespace if is_compact is None else not is_compact
        before = Thought(rule, _begin(tokenizer) if thought == "may" else "") if rule else None
        return field, written(form, any_whitespace, before)

    def thought_of(self, request: GenerationRequest, prompt_ids: list[int], tokenizer: Tokenizer) -> str | None:
        """Whether an answer to this prompt begins with one, in the words of `Config.thought`; None: nobody tells it
        apart. The end of the prompt knows best: of a model that thinks always the chat template opens a thought,
        whatever its client wishes, and one that leaves it out closes it. Elsewhere a wish for none is believed."""
        if self.thought == "never":
            return None
        end = tokenizer.decode(prompt_ids[-MAX_CLOSING_TOKENS:], skip_special_tokens=False).rstrip()
        if request.is_continuation or end.endswith(THOUGHT_END):
            return "never"
        if end.endswith(THOUGHT_BEGIN):
            return "does"
        if (request.chat_template_kwargs or {}).get("enable_thinking") is False:
            return "never"
        return self.thought


def _begin(tokenizer: Tokenizer) -> str:
    """Return what opens a thought, in Lark: its token, so that no part of its text begins an answer, or its text."""
    token_ids = tokenizer.encode(THOUGHT_BEGIN, add_special_tokens=False)
    return f"<[{token_ids[0]}]>" if len(token_ids) == 1 else json.dumps(THOUGHT_BEGIN)


def _mark(text: str, tokenizer: Tokenizer) -> int:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1 or token_ids[0] in tokenizer.special_ids:
        sentence = "The `{field}` needs a model to which {value} is one token, and not a special one"
        raise InvalidRequest(sentence, field="reasoning_max_tokens", value=text)
    return token_ids[0]
