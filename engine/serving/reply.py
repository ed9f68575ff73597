"""One request's way back: gathers its tokens, turns them into responses, ends exactly once."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine import wire
from engine.core.types import Logprobs
from engine.errors import Cancelled, RequestError, as_request_error
from engine.serving.answer import OpenAnswer
from engine.serving.latency import Latency
from engine.serving.prompt import Prompt
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest

log = logging.getLogger(__name__)


class Sender(Protocol):
    """Where responses go. `send` may take long; nothing is called after a send with `final`."""

    def send(self, payload: bytes, final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...


class Reply:
    """The listener of one request. The engine client's thread calls `tokens` and `ended`, one sender thread at a time
    calls `send_gathered`, the cancel thread `end_if_cancelled`."""

    def __init__(
        self, request: GenerationRequest, prompt: Prompt, sender: Sender, tokenizer: Tokenizer, received: float
    ):
        self.req_id = request.req_id  # chosen by the client, who may use it again
        self.engine_id = uuid.uuid4().hex  # never used again
        self.prompt = prompt
        self.streaming = not request.return_all_tokens
        self.wake: Callable[[Reply], None] = lambda reply: None  # puts this reply into the senders' queue
        self.leave: Callable[[Reply], None] = lambda reply: None  # called once, before the final response
        self._request = request
        self._sender = sender
        self._tokenizer = tokenizer
        self._received, self._accepted, self._first_token = received, time.time(), 0.0
        self._last_token = received
        # Shared between threads, under the lock
        self._lock = threading.Lock()
        self._gathered: list[tuple[int, Logprobs | None]] = []
        self._finish_reason: str | None = None
        self._error: RequestError | None = None
        self._awake = False  # in the senders' queue, with a sender, or ended
        self._asking = threading.Lock()  # held to ask Triton for a cancellation and to set _ended
        self._ended = False  # the final response is on its way or sent
        # Of the sender's side only
        self._answer = OpenAnswer(tokenizer, request)
        self._num_sent = 0  # of its visible tokens
        self._len_sent = 0  # of its text

    @property
    def is_over(self) -> bool:
        """Its last response is sent or will be the next."""
        return self._ended or self._error is not None

    # The listener

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None) -> None:
        with self._lock:
            self._gathered += zip(token_ids, logprobs or [None] * len(token_ids), strict=True)
            self._finish_reason = finish_reason
            # Without streaming and stop strings all but the time of the first token can wait for the end.
            worthwhile = finish_reason or self.streaming or self._request.stop_sequences or not self._first_token
            self._wake_once(bool(worthwhile))

    def ended(self, error: RequestError) -> None:
        with self._lock:
            self._error = error
            self._wake_once(True)

    def end_if_cancelled(self) -> bool:
        """True if the client has left and nobody knew."""
        error: RequestError = Cancelled("the client has cancelled the request")
        with self._asking:  # after the final response the question itself would crash Triton
            if self.is_over:
                return False
            try:
                if not self._sender.is_cancelled():
                    return False
            except Exception as failure:
                log.exception("%s: its stream is broken", self.engine_id)
                error = as_request_error(failure)
        self.ended(error)
        return True

    def _wake_once(self, worthwhile: bool) -> None:
        if worthwhile and not self._awake:
            self._awake = True
            self.wake(self)

    # The sender

    def send_gathered(self, latency: Latency) -> None:
        """Sends what has gathered as one response. Whatever goes wrong, the request ends and the caller does not."""
        with self._lock:
            gathered, self._gathered = self._gathered, []
            error, finish_reason = self._error, self._finish_reason
        if error is None:
            try:
                self._respond(gathered, finish_reason, latency)
            except Exception as failure:  # a dead stream, or a bug of ours
                log.exception("%s: a response could not be sent", self.engine_id)
                error = as_request_error(failure)
        if error and not self._ended:
            try:
                self._send_final(wire.write_answer(self._failure(error)), error.kind, latency)
            except Exception:
                log.exception("%s: the final response could not be sent", self.engine_id)
        with self._lock:
            self._awake = self._ended  # after the end nothing wakes it
            self._wake_once(bool(self._gathered or self._error))

    def _respond(
        self, gathered: list[tuple[int, Logprobs | None]], finish_reason: str | None, latency: Latency
    ) -> None:
        self._note_arrival(len(gathered), latency)
        answer = self._answer
        answer.push(gathered, finish_reason)
        if answer.finish_reason:
            self._send_final(wire.write_answer(self._delta()), answer.finish_reason, latency)
        elif self.streaming and (len(answer.text) > self._len_sent or answer.num_visible > self._num_sent):
            self._sender.send(wire.write_answer(self._delta()), False)
            self._num_sent, self._len_sent = answer.num_visible, len(answer.text)

    def _send_final(self, payload: bytes, reason: str, latency: Latency) -> None:
        with self._asking:
            self._ended = True
        latency.ended(reason, time.time() - self._received)
        self.leave(self)
        self._sender.send(payload, True)

    def _note_arrival(self, count: int, latency: Latency) -> None:
        if count:
            now = time.time()
            latency.tokens(count, now - self._last_token, self._answer.num_generated == 0)
            self._first_token = self._first_token or now
            self._last_token = now

    def _delta(self) -> wire.Delta:
        answer = self._answer
        unsent = slice(self._num_sent, answer.num_visible)
        num_tokens = answer.num_generated if answer.finish_reason else answer.num_visible  # the former has the stop id
        gained: dict[str, Any] = {
            "req_id": self.req_id,
            "token": answer.text[self._len_sent :],
            "token_ids": answer.token_ids[unsent],
            "send_idx": self._num_sent,
            "usage": self._usage(num_tokens),
            "infer_seed": self.prompt.sampling.seed,
            "inference_time_cost": time.time() - self._accepted,
            "return_all_tokens": self._request.return_all_tokens,
            "logprobs": self._logprobs(unsent) if self.prompt.sampling.num_logprobs >= 0 else None,
            "times": self._times() if self._request.benchmark else None,
        }
        if answer.finish_reason is None:
            return wire.Delta(**gained)
        return wire.Final(
            **gained,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_string,
            tokens_all=answer.text,
            tokens_all_ids=answer.token_ids,
        )

    def _failure(self, error: RequestError) -> wire.Failure:
        usage = self._usage(self._num_sent)
        return wire.Failure(error, self.req_id, self._num_sent, usage, self.prompt.sampling.seed)

    def _usage(self, num_tokens: int) -> wire.Usage:
        return wire.Usage(len(self.prompt.token_ids), num_tokens)

    def _times(self) -> dict[str, str]:
        received, accepted, now = map(_as_date, (self._received, self._accepted, time.time()))
        return dict(zip(wire.TIMES, (received, accepted, accepted, str(self._first_token), now), strict=True))

    def _logprobs(self, unsent: slice) -> tuple[wire.TokenLogprob, ...]:
        pairs = zip(self._answer.token_ids[unsent], self._answer.logprobs[unsent], strict=True)
        return tuple(self._logprob(token_id, logprobs) for token_id, logprobs in pairs)

    def _logprob(self, token_id: int, logprobs: Logprobs | None) -> wire.TokenLogprob:
        if logprobs is None:
            return wire.TokenLogprob(token_id)
        top = tuple([self._named(each, logprob) for each, logprob in logprobs.top])
        return self._named(token_id, logprobs.chosen, top)

    def _named(self, token_id: int, logprob: float, top: tuple[wire.TokenLogprob, ...] = ()) -> wire.TokenLogprob:
        text, data = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return wire.TokenLogprob(token_id, text, tuple(data), logprob, top)


def _as_date(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_s)) + f".{int(epoch_s % 1 * 1e6):06d}"
