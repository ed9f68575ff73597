"""One answer in the making: its tokens, their text as it becomes certain, and why it ended. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from engine.core.types import Logprobs
from engine.text.text_stream import Delta, TextOptions, TextStream
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest


class OpenAnswer:
    """Grows with `push` until `finish_reason` is set: by the engine, or by a stop string, of which it knows nothing."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest):
        self.token_ids: list[int] = []  # without the stop id; at the end, those of the text
        self.logprobs: list[Logprobs | None] = []  # of each of them
        self.num_generated = 0  # with the stop id
        self.stop_token: tuple[int, Logprobs | None] | None = None  # that one
        self.text = ""  # as far as it is certain
        self.ends: list[int] = []  # of each token whose text is certain: the characters of the text up to there
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # that ended it
        self._stream = TextStream(tokenizer, _text_options(request))

    @property
    def num_visible(self) -> int:
        """Of token_ids, those whose text is certain."""
        return len(self.ends)

    @property
    def mean_logprob(self) -> float:
        """Of all its tokens, where they are known."""
        stop_token = [self.stop_token[1]] if self.stop_token else []
        known = [each.chosen for each in (*self.logprobs, *stop_token) if each]
        return sum(known) / max(len(known), 1)

    def text_len(self, num_tokens: int) -> int:
        """Characters of the first tokens, as far as they are visible."""
        return self.ends[min(num_tokens, len(self.ends)) - 1] if num_tokens and self.ends else 0

    def push(self, tokens: Sequence[tuple[int, Logprobs | None]], finish_reason: str | None) -> None:
        """What the engine has made: `finish_reason` is of the last token, which with "stop" is the stop id."""
        self.num_generated += len(tokens)
        if finish_reason == "stop":
            *tokens, self.stop_token = tokens  # it is not part of the answer
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

    def _show(self, delta: Delta) -> None:
        self.text += delta.text
        self.ends += delta.ends
        self.stop_string = delta.stopped


class Answering(Protocol):
    @property
    def answer(self) -> OpenAnswer: ...


A = TypeVar("A", bound=Answering)


def best(all_of_them: Sequence[A], n: int) -> list[A]:
    """The `n` that are likeliest by the token, the best first; as they come where no more than these were made."""
    if len(all_of_them) <= n:
        return list(all_of_them)
    return sorted(all_of_them, key=lambda each: -each.answer.mean_logprob)[:n]


def _text_options(request: GenerationRequest) -> TextOptions:
    return TextOptions(
        is_continuation=request.is_continuation,
        stop=request.stop_sequences,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
    )
