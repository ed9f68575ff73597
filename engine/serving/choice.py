"""One of the n choices of a request: its output, and how much of it was sent to the client. Independent of threads and
sockets, which its reply owns."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine import wire
from engine.core.types import Logprobs, PromptOutputs
from engine.errors import InvalidRequest
from engine.serving.completion_output import CompletionOutput
from engine.serving.input_processor import Prompt
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest


class Choice:
    """Choice `index` of a request: owns its output, its unprocessed tokens and the number of tokens sent."""

    def __init__(self, index: int, request: GenerationRequest, prompt: Prompt, tokenizer: Tokenizer):
        self.index = index
        self.sampling = prompt.sampling_of(index)
        self.answer = CompletionOutput(tokenizer, request)
        self.num_sent = 0  # visible tokens that were sent with their text
        self.is_over = False  # its last response is sent
        self.first_token_at = self.last_token_at = 0.0  # arrival times, seconds since the epoch; 0: none
        # Received from the engine and not yet processed by a sender thread
        self.pending: list[tuple[int, Logprobs | None]] = []
        self.finish_reason: str | None = None
        self._request = request
        self.prompt_outputs: PromptOutputs | None = None  # set by the engine before the first token
        self._prompt_ids, self._pooled, self._reasoning = prompt.token_ids, prompt.pooled, prompt.reasoning
        self._num_image_tokens = sum(span.length for span in prompt.spans)
        self._tokenizer = tokenizer

    @property
    def is_open(self) -> bool:
        return self.answer.finish_reason is None

    @property
    def has_unsent_tokens(self) -> bool:
        return self.answer.num_visible > self.num_sent

    @property
    def known_token_ids(self) -> list[int]:
        """Return the token ids received from the engine."""
        return self.answer.token_ids + [token_id for token_id, _ in self.pending]

    @property
    def _returns_logprobs(self) -> bool:
        """Return whether the client asked for log-probabilities. With `best_of` they are computed in any case."""
        return self.sampling.num_logprobs >= 0 and (self._request.logprobs >= 0 or not self._request.is_chosen)

    def has_logprobs_after(self, num_sent: int) -> bool:
        """Return whether the log-probabilities of the tokens from there on are known. Of tokens that another process
        has generated (`restore`) they are not.
        """
        return not self._returns_logprobs or None not in self.answer.logprobs[num_sent:]

    def resume(self, num_sent: int) -> None:
        """Continue for a client that has `num_sent` tokens already: the next response begins after them."""
        self.num_sent, self.is_over = num_sent, False

    def restore(self, token_ids: Sequence[int]) -> None:
        """Restore the tokens of an answer that another process has begun."""
        is_all = 0 < len(token_ids) == self.sampling.max_new_tokens
        self.answer.push([(token_id, None) for token_id in token_ids], "length" if is_all else None)

    def next_delta(self, seconds: float, times: dict[str, str] | None, is_end: bool) -> wire.Delta:
        """Return the tokens and text that were not sent yet, `seconds` after the request was accepted. A finished
        choice returns a Final, with the whole answer. Raises InvalidRequest if it has fewer tokens than the client
        claims to have."""
        answer = self.answer
        if answer.finish_reason and self.num_sent > answer.num_visible:
            text = "The `{field}` is {value}, the answer ended after {limit} tokens"
            raise InvalidRequest(text, field="resume_from", value=self.num_sent, limit=answer.num_visible)
        unsent = slice(self.num_sent, answer.num_visible)
        # Whole tokens, so that what a client has follows from their number. The rest comes with the last of them.
        text_end = answer.text_len(answer.num_visible) if self.is_open else len(answer.text)
        num_tokens = answer.num_visible if self.is_open else answer.num_generated  # the latter has the stop id
        fields: dict[str, Any] = {
            "req_id": self._request.req_id,
            "index": self.index,
            "token": answer.text[answer.text_len(self.num_sent) : text_end],
            "token_ids": answer.token_ids[unsent],
            "send_idx": self.num_sent,
            "usage": wire.Usage(
                len(self._prompt_ids),
                num_tokens,
                self.prompt_outputs and self.prompt_outputs.num_cached,
                self._num_image_tokens,
            ),
            "infer_seed": self.sampling.seed,
            "inference_time_cost": seconds,
            "return_all_tokens": self._request.return_all_tokens,
            "logprobs": self._logprobs(unsent) if self._returns_logprobs else None,
            "times": times,
            "prompt_details": None if self.num_sent else self._prompt_details(),
            "reasoning": None if self.num_sent else self._reasoning,
            "max_dec_len": None if self.num_sent else self._reduced_len(),
            "text_idx": answer.text_len(self.num_sent),
        }
        if answer.finish_reason is None:
            return wire.Delta(**fields)
        return wire.Final(
            **fields,
            finish_reason=answer.finish_reason,
            stop_reason=self._stop_id() if answer.stop_string is None else answer.stop_string,
            tokens_all=answer.text,
            tokens_all_ids=answer.token_ids,
            is_end=is_end,
            stop_token=self._stop_token(),
            embedding=self._embedding(),
        )

    def delta_from(self, begin: int = 0) -> wire.Delta:
        """Return the answer from token `begin` on, independent of what has been sent."""
        num_sent, self.num_sent = self.num_sent, begin
        try:
            return self.next_delta(0.0, None, is_end=not self.is_open)
        finally:
            self.num_sent = num_sent

    def mark_sent(self) -> None:
        """Record that `next_delta` has been sent."""
        self.num_sent, self.is_over = self.answer.num_visible, not self.is_open

    def _reduced_len(self) -> int | None:
        """Return the reduced max_dec_len if the client asked for more than fits and allowed the reduction."""
        request, longest = self._request, self.sampling.max_new_tokens
        is_reduced = request.cut_max_dec_len and not request.pooling and (request.max_dec_len or 0) > longest
        return longest if is_reduced else None

    def _prompt_details(self) -> wire.PromptDetails | None:
        request, ids, logprobs = self._request, self._prompt_ids, None
        if self.prompt_outputs and self.sampling.num_prompt_logprobs >= 0:
            scored = zip(ids[1:], self.prompt_outputs.prompt_logprobs, strict=True)
            logprobs = (self._named(ids[0], None), *(self._logprob(*each) for each in scored))
        if not request.return_token_ids:
            return None if logprobs is None else wire.PromptDetails(logprobs=logprobs)
        return wire.PromptDetails(ids, self._tokenizer.decode(ids), logprobs)

    def _stop_id(self) -> int | None:
        """Return the id that ended the answer if only the request makes it end answers, as in vLLM."""
        token_id = self.answer.stop_token[0] if self.answer.stop_token else None
        own = () if self._request.ignore_eos else self._tokenizer.eos_token_ids
        return token_id if token_id in self._request.eos_token_ids and token_id not in own else None

    def _stop_token(self) -> wire.TokenLogprob | None:
        is_asked_for = self._request.return_token_ids or self._returns_logprobs
        return self._logprob(*self.answer.stop_token) if is_asked_for and self.answer.stop_token else None

    def _embedding(self) -> str | None:
        if not self.prompt_outputs or not self.sampling.pooling:
            return None
        return base64.b64encode(self._pooled(self.prompt_outputs.pooled)).decode()

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
        known = None if logprob is None else wire.finite_logprob(logprob)
        return wire.TokenLogprob(token_id, text, tuple(data), known, top)


class RequestState(NamedTuple):
    """State of one request: what was asked, its prompt, and its choices with their output so far."""

    request: GenerationRequest
    prompt: Prompt
    choices: list[Choice]
    owner: str = ""
    storing: wire.StoreOptions | None = None  # None: the response is not stored

    @classmethod
    def create(cls, request: GenerationRequest, prompt: Prompt, tokenizer: Tokenizer) -> RequestState:
        """Return the state of a request that has no tokens of this process yet. Tokens that the client has sent with
        it (`answer_ids`) are restored."""
        choices = [Choice(index, request, prompt, tokenizer) for index in range(prompt.n)]
        if not request.is_chosen:  # else all candidates are generated again
            for choice, token_ids in zip(choices, request.answer_ids, strict=False):
                choice.restore(token_ids)
        return cls(request, prompt, choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.known_token_ids) for each in self.choices)

    @property
    def num_scores(self) -> int:
        return sum(len(each.prompt_outputs.prompt_logprobs) for each in self.choices if each.prompt_outputs)

    def without_images(self) -> RequestState:
        """Return the state without the pixels of images, and without their files unless the response is stored."""
        spans = tuple(span.without_content() for span in self.prompt.spans)
        request = self.request if self.storing else replace(self.request, images=())
        return self._replace(request=request, prompt=replace(self.prompt, spans=spans))

    def with_images_of(self, prompt: Prompt) -> RequestState | None:
        """Return the state with the pixels of the same prompt, or None if its images are others now."""
        hashes = [[span.content_hash for span in each.spans] for each in (self.prompt, prompt)]
        is_same = hashes[0] == hashes[1] and self.prompt.token_ids == prompt.token_ids
        return self._replace(prompt=replace(self.prompt, spans=prompt.spans)) if is_same else None

    def is_same(self, again: GenerationRequest) -> bool:
        """Return True if `again` repeats this request; it may contain the seed that the client was sent."""
        # The messages have digests of the images.
        known: dict[str, Any] = {"resume_from": None, "answer_ids": (), "infer_seed": None, "traceparent": None}
        known["images"] = ()
        is_same = replace(self.request, **known) == replace(again, **known)
        return is_same and again.infer_seed in (self.request.infer_seed, self.prompt.sampling.seed)

    def has_logprobs_after(self, resume_from: Sequence[int]) -> bool:
        """Return `Choice.has_logprobs_after` for all choices, of which each has its own number of sent tokens."""
        return all(choice.has_logprobs_after(begin) for choice, begin in zip(self.choices, resume_from, strict=False))

    def resume(self, again: GenerationRequest) -> None:
        """Continue each choice after the tokens that the client of `again` has."""
        for choice, num_sent in zip(
            self.choices, again.resume_from or (), strict=False
        ):  # there may be more candidates than choices
            choice.resume(num_sent)
