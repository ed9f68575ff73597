"""The form that an answer must have: what a request asks for, after what the model thinks first. Knows when there is a
thought, not what a form is made of (engine/text/forms.py)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.settings.config import Config
from engine.text.forms import bounded_thought, free_answer, free_thought, written
from engine.text.tokenizer import Tokenizer
from engine.wire import THOUGHT_BEGIN, THOUGHT_END, GenerationRequest

MAX_CLOSING_TOKENS = 8  # that a prompt may close a thought with


@dataclass(frozen=True)
class Forms:
    """Of all answers of a server."""

    any_whitespace: bool = True  # in JSON that an answer must be
    is_thinking_apart: bool = False  # the form of an answer begins after what the model thinks
    thinks_at_once: bool = False  # which it does without saying so

    @classmethod
    def of_server(cls, config: Config) -> Forms:
        return cls(
            any_whitespace=not config.guided_decoding_disable_any_whitespace,
            is_thinking_apart=config.thought != "never",
            thinks_at_once=config.thought == "does",
        )

    def of(
        self, request: GenerationRequest, prompt_ids: list[int], stop_ids: tuple[int, ...], tokenizer: Tokenizer
    ) -> tuple[str, ...]:
        """With the field that asks for it; nothing: it is free. Raises InvalidRequest."""
        form, budget = request.form, request.reasoning_max_tokens
        if budget and not self.is_thinking_apart:
            text = "The `{field}` needs a server that knows its model's thoughts, by REASONING_PARSER"
            raise InvalidRequest(text, field="reasoning_max_tokens", value=budget)
        end = self._end_of(prompt_ids, tokenizer)
        will_think = self._will_think(request, end) and (form is None or form.kind != "token_ids")
        if form is None and not (will_think and budget):
            return ()
        field = form.field if form else "reasoning_max_tokens"
        if not tokenizer.eos_token_ids or not stop_ids:
            text = "The `{field}` needs an end-of-sequence token, which the model lacks or `{ignore_eos}` forbids"
            raise InvalidRequest(text, field=field)
        thought = free_thought(THOUGHT_END) if will_think else ""
        if will_think and budget:
            not_within = (_mark(THOUGHT_END, tokenizer), *stop_ids)
            thought = bounded_thought(budget, THOUGHT_END, not_within)
        if form is None:
            if self.thinks_at_once or end.endswith(THOUGHT_BEGIN):
                return field, free_answer(thought, None)
            return field, free_answer(thought, (THOUGHT_BEGIN, _mark(THOUGHT_BEGIN, tokenizer)))
        if form.kind == "regex" and (len(form.value) - len(form.value.rstrip("\\"))) % 2:
            raise InvalidRequest("The `{field}` ends with a backslash that escapes nothing", field=field)
        is_compact = request.guided_decoding_disable_any_whitespace
        any_whitespace = self.any_whitespace if is_compact is None else not is_compact
        try:
            return field, written(form, any_whitespace, thought)
        except InvalidRequest as error:
            raise error.blaming(field) from None

    def _end_of(self, prompt_ids: list[int], tokenizer: Tokenizer) -> str:
        """Where it matters."""
        if not self.is_thinking_apart:
            return ""
        return tokenizer.decode(prompt_ids[-MAX_CLOSING_TOKENS:], skip_special_tokens=False).rstrip()

    def _will_think(self, request: GenerationRequest, prompt_end: str) -> bool:
        """Before it answers. The end of the prompt says whether the chat template leaves that out."""
        if not self.is_thinking_apart or request.is_continuation:
            return False
        return not prompt_end.endswith(THOUGHT_END)


def _mark(text: str, tokenizer: Tokenizer) -> int:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1 or token_ids[0] in tokenizer.special_ids:
        sentence = "The `{field}` needs a model to which {value} is one token, and not a special one"
        raise InvalidRequest(sentence, field="reasoning_max_tokens", value=text)
    return token_ids[0]
