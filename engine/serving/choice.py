"""One of the answers to a request on its way to the client: what of it has come, and what is new since the response
before. No threads, no sockets: its reply has both."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine import wire
from engine.core.types import Logprobs, OfPrompt
from engine.serving.answer import OpenAnswer
from engine.serving.prompt import Prompt
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest


class Choice:
    """Of `prompt` it is the answer `index`."""

    def __init__(self, index: int, request: GenerationRequest, prompt: Prompt, tokenizer: Tokenizer):
        self.index = index
        self.sampling = prompt.sampling_of(index)
        self.answer = OpenAnswer(tokenizer, request)
        self.num_sent = 0  # of its visible tokens, with their text
        self.is_over = False  # its last response is sent
        self.first_token = self.last_token = 0.0  # when they came
        # What the sender has not taken yet
        self.gathered: list[tuple[int, Logprobs | None]] = []
        self.finish_reason: str | None = None
        self._request = request
        self.of_prompt: OfPrompt | None = None  # what the engine has said of it
        self._prompt_ids, self._pooled, self._thought = prompt.token_ids, prompt.pooled, prompt.thought
        self._tokenizer = tokenizer

    @property
    def is_open(self) -> bool:
        return self.answer.finish_reason is None

    @property
    def has_news(self) -> bool:
        return self.answer.num_visible > self.num_sent

    @property
    def known_ids(self) -> list[int]:
        """All that the engine has said."""
        return self.answer.token_ids + [token_id for token_id, _ in self.gathered]

    @property
    def _tells_logprobs(self) -> bool:
        """Of an answer that may be chosen they are known, whether somebody has asked or not."""
        return self.sampling.num_logprobs >= 0 and (self._request.logprobs >= 0 or not self._request.is_chosen)

    def go_on(self, num_sent: int) -> None:
        """For a client that has so many of its tokens: the next response begins after them."""
        self.num_sent, self.is_over = num_sent, False

    def begin_with(self, token_ids: Sequence[int]) -> None:
        """What is known of an answer that was begun elsewhere."""
        is_all = 0 < len(token_ids) == self.sampling.max_new_tokens
        self.answer.push([(token_id, None) for token_id in token_ids], "length" if is_all else None)

    def news(self, seconds: float, times: dict[str, str] | None, is_end: bool) -> wire.Delta:
        """What was not sent yet, `seconds` after the request was accepted; of a finished answer its last, with all of
        it."""
        answer = self.answer
        unsent = slice(self.num_sent, answer.num_visible)
        # Whole tokens, so that what a client has follows from their number. The rest comes with the last of them.
        text_end = answer.text_len(answer.num_visible) if self.is_open else len(answer.text)
        num_tokens = answer.num_visible if self.is_open else answer.num_generated  # the latter has the stop id
        gained: dict[str, Any] = {
            "req_id": self._request.req_id,
            "index": self.index,
            "token": answer.text[answer.text_len(self.num_sent) : text_end],
            "token_ids": answer.token_ids[unsent],
            "send_idx": self.num_sent,
            "usage": wire.Usage(len(self._prompt_ids), num_tokens, self.of_prompt and self.of_prompt.num_cached),
            "infer_seed": self.sampling.seed,
            "inference_time_cost": seconds,
            "return_all_tokens": self._request.return_all_tokens,
            "logprobs": self._logprobs(unsent) if self._tells_logprobs else None,
            "times": times,
            "of_prompt": None if self.num_sent else self._told_of_prompt(),
            "thought": None if self.num_sent else self._thought,
            "max_dec_len": None if self.num_sent else self._reduced_len(),
        }
        if answer.finish_reason is None:
            return wire.Delta(**gained)
        return wire.Final(
            **gained,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_string,
            tokens_all=answer.text,
            tokens_all_ids=answer.token_ids,
            is_end=is_end,
            stop_token=self._stop_token(),
            embedding=self._embedding(),
        )

    def so_far(self, begin: int = 0) -> wire.Delta:
        """Return the answer from this token on, whatever of it has been sent."""
        num_sent, self.num_sent = self.num_sent, begin
        try:
            return self.news(0.0, None, is_end=not self.is_open)
        finally:
            self.num_sent = num_sent

    def is_told(self) -> None:
        """The news have been sent."""
        self.num_sent, self.is_over = self.answer.num_visible, not self.is_open

    def _reduced_len(self) -> int | None:
        """Return the longest answer that there is room for if the client asked for more and let that be reduced."""
        request, longest = self._request, self.sampling.max_new_tokens
        is_reduced = request.cut_max_dec_len and not request.pooling and (request.max_dec_len or 0) > longest
        return longest if is_reduced else None

    def _told_of_prompt(self) -> wire.OfPrompt | None:
        request, ids, logprobs = self._request, self._prompt_ids, None
        if self.of_prompt and self.sampling.num_prompt_logprobs >= 0:
            scored = zip(ids[1:], self.of_prompt.scores, strict=True)
            logprobs = (self._named(ids[0], None), *(self._logprob(*each) for each in scored))
        if not request.return_token_ids:
            return None if logprobs is None else wire.OfPrompt(logprobs=logprobs)
        return wire.OfPrompt(ids, self._tokenizer.decode(ids), logprobs)

    def _stop_token(self) -> wire.TokenLogprob | None:
        is_asked_for = self._request.return_token_ids or self._tells_logprobs
        return self._logprob(*self.answer.stop_token) if is_asked_for and self.answer.stop_token else None

    def _embedding(self) -> str | None:
        if not self.of_prompt or not self.sampling.pooling:
            return None
        return base64.b64encode(self._pooled(self.of_prompt.hidden)).decode()

    def _logprobs(self, unsent: slice) -> tuple[wire.TokenLogprob, ...]:
        pairs = zip(self.answer.token_ids[unsent], self.answer.logprobs[unsent], strict=True)
        return tuple(self._logprob(token_id, logprobs) for token_id, logprobs in pairs)

    def _logprob(self, token_id: int, logprobs: Logprobs | None) -> wire.TokenLogprob:
        if logprobs is None:
            return wire.TokenLogprob(token_id)
        top = tuple([self._named(each, logprob) for each, logprob in logprobs.top])
        return self._named(token_id, logprobs.chosen, top)

    def _named(
        self, token_id: int, logprob: float | None, top: tuple[wire.TokenLogprob, ...] = ()
    ) -> wire.TokenLogprob:
        text, data = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        known = None if logprob is None else wire.likely(logprob)
        return wire.TokenLogprob(token_id, text, tuple(data), known, top)


class Asked(NamedTuple):
    """A request and its answers so far."""

    request: GenerationRequest
    prompt: Prompt
    choices: list[Choice]
    owner: str = ""
    storing: wire.Storing | None = None  # None: its response is not stored

    @classmethod
    def now(cls, request: GenerationRequest, prompt: Prompt, tokenizer: Tokenizer) -> Asked:
        choices = [Choice(index, request, prompt, tokenizer) for index in range(prompt.n)]
        if not request.is_chosen:  # else they are made again
            for choice, token_ids in zip(choices, request.answer_ids, strict=False):
                choice.begin_with(token_ids)
        return cls(request, prompt, choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.known_ids) for each in self.choices)

    @property
    def num_scores(self) -> int:
        return sum(len(each.of_prompt.scores) for each in self.choices if each.of_prompt)

    def is_same(self, again: GenerationRequest) -> bool:
        """Whether it is this request once more, from a client that may have been told the seed."""
        known: dict[str, Any] = {"resume_from": None, "answer_ids": (), "infer_seed": None, "traceparent": None}
        is_same = replace(self.request, **known) == replace(again, **known)
        return is_same and again.infer_seed in (self.request.infer_seed, self.prompt.sampling.seed)

    def go_on(self, again: GenerationRequest) -> None:
        """After what the client of `again` has."""
        for choice, num_sent in zip(self.choices, again.resume_from or (), strict=False):  # of which some may be chosen
            choice.go_on(num_sent)
