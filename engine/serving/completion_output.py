"""Output of one completion while it is generated: its tokens, their detokenized text and its finish reason. Independent
of sockets and threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from engine.core.types import Logprobs
from engine.text.text_stream import TextDelta, TextOptions, TextStream
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest


class CompletionOutput:
    """Tokens and text of one completion. `push` extends it until `finish_reason` is set, by the engine or by a stop
    string, which the engine does not know."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest):
        self.token_ids: list[int] = []  # without the stop token; after the end, only tokens of the visible text
        self.logprobs: list[Logprobs | None] = []  # one entry per token of token_ids
        self.num_generated = 0  # includes the stop token
        self.stop_token: tuple[int, Logprobs | None] | None = None
        self.text = ""  # excludes incomplete characters and possible beginnings of stop strings
        self.ends: list[int] = []  # for each visible token: length of the text up to its end, in characters
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the stop string that ended the text
        self._stream = TextStream(tokenizer, _text_options(request))

    @property
    def num_visible(self) -> int:
        """Return the number of leading tokens of `token_ids` whose text is final."""
        return len(self.ends)

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability of the tokens whose log-probability is known; 0 if there is none."""
        stop_token = [self.stop_token[1]] if self.stop_token else []
        known = [each.chosen for each in (*self.logprobs, *stop_token) if each]
        return sum(known) / max(len(known), 1)

    def text_len(self, num_tokens: int) -> int:
        """Return the number of characters of the first `num_tokens` tokens, as far as they are visible. Those of all
        tokens of a finished answer include an incomplete character at its end."""
        if self.finish_reason and num_tokens >= self.num_visible:
            return len(self.text)
        return self.ends[min(num_tokens, len(self.ends)) - 1] if num_tokens and self.ends else 0

    def push(self, tokens: Sequence[tuple[int, Logprobs | None]], finish_reason: str | None) -> None:
        """Append tokens from the engine. `finish_reason` belongs to the last one, which is the stop token if the
        reason is "stop"."""
        self.num_generated += len(tokens)
        if finish_reason == "stop":
            *tokens, self.stop_token = tokens  # the stop token is not part of the text
        self.token_ids += [token_id for token_id, _ in tokens]
        self.logprobs += [logprobs for _, logprobs in tokens]
        self._show(self._stream.push(token_id for token_id, _ in tokens))
        if finish_reason and self.stop_string is None:
            self._show(self._stream.finish())
        self.finish_reason = finish_reason if self.stop_string is None else "stop"
        if self.stop_string is not None:
            self.stop_token = None
            del self.token_ids[self.num_visible :], self.logprobs[self.num_visible :]
            self.num_generated = self.num_visible

    def _show(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.ends += delta.ends
        self.stop_string = delta.stop_string


class HasCompletion(Protocol):
    """Anything that owns a CompletionOutput: a Choice of the server, or an open request of `LLM`."""

    @property
    def answer(self) -> CompletionOutput: ...


T = TypeVar("T", bound=HasCompletion)


def select_best(candidates: Sequence[T], n: int) -> list[T]:
    """Return the `n` candidates with the highest mean log-probability, best first; all of them in their order if there
    are no more than `n`."""
    if len(candidates) <= n:
        return list(candidates)
    return sorted(candidates, key=lambda each: -each.answer.mean_logprob)[:n]


def _text_options(request: GenerationRequest) -> TextOptions:
    return TextOptions(
        is_continuation=request.is_continuation,
        stop=request.stop_sequences,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
    )
