"""Reply to one request: collects the tokens of its choices, sends them as responses and ends exactly once."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine import wire
from engine.core.types import Logprobs, PromptOutputs
from engine.errors import Cancelled, InvalidRequest, RequestError, TimedOut, as_request_error
from engine.link.journal import Submission
from engine.serving.choice import Choice, RequestState
from engine.serving.completion_output import select_best
from engine.serving.latency import LatencyStats, RequestRecord
from engine.serving.rate_limits import OwnerUsage

log = logging.getLogger(__name__)


class Sender(Protocol):
    """Sink of the responses to one request. `send` may block; nothing is called after a `send` with `final`."""

    def send(self, payload: bytes, final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...


class ReplyCallbacks(NamedTuple):
    """Functions of the service that its replies call."""

    enqueue: Callable[[Reply], None]  # puts the reply into the queue of the sender threads
    on_finished: Callable[[Reply], None]  # called once, before the final response
    cancel: Callable[[str, bool], None]  # (engine id of a choice, whether its answer is complete): cancels it
    streaming: bool = True  # False: only complete answers are sent


class Reply:
    """Reply to one request, with all its choices. The engine client's thread calls `tokens` and `ended`, one sender
    thread at a time calls `send_pending`, and the polling thread calls `end_if_cancelled`."""

    def __init__(
        self,
        state: RequestState,
        sender: Sender,
        received_at: float,
        owner_usage: OwnerUsage,
        callbacks: ReplyCallbacks,
    ):
        self.state, self.prompt, self.choices = state, state.prompt, state.choices
        request, self.storing = state.request, state.storing
        self.req_id = request.req_id  # chosen by the client, who may reuse it
        self.engine_id = uuid.uuid4().hex  # unique
        self.is_released = threading.Event()  # set when the request is in the caches of finished requests
        self._is_choosing = len(self.choices) > request.n  # the best n are sent as soon as all are finished
        self._may_stream = callbacks.streaming and not (request.return_all_tokens or self._is_choosing)
        self.streaming = self._may_stream
        self.owner_usage = owner_usage
        self._callbacks = callbacks
        self._request = request
        self.sender = sender
        self.received_at, self._accepted_at = received_at, time.time()
        self._num_before = sum(choice.answer.num_generated for choice in self.choices)  # tokens of a resumed answer
        self._asked_at = received_at  # last check of the queue timeout
        # Shared between threads, under the lock, like the pending tokens of the choices
        self._lock = threading.Lock()
        self._arrived: list[Choice] = []  # choices with pending tokens
        # There are tokens to send at once.
        self._is_known = any(each.known_token_ids or not each.is_open for each in self.choices)
        self._has_begun = self._is_known
        self._calls: list[Callable[[], None]] = []  # see `call_between_responses`
        self.error: RequestError | None = None
        self._is_enqueued = False  # in the senders' queue, with a sender thread, or ended
        self._asking = threading.Lock()  # held to query Triton for a cancellation and to set _ended
        self._ended = False  # the final response is on its way or sent

    @property
    def is_over(self) -> bool:
        """Return whether the last response is sent or will be the next."""
        return self._ended or self.error is not None

    @property
    def error_kind(self) -> str:
        """Return the kind of the error that ended the request, or an empty string."""
        return self.error.kind if self.error else ""

    def submissions(self) -> list[Submission]:
        """Return the submissions to the engine: one per choice that is not complete."""
        return [
            Submission(self._engine_id(each), each.sampling, _Listener(self, each), each.known_token_ids)
            for each in self.choices
            if each.is_open and not each.finish_reason
        ]

    def begin(self) -> None:
        """Send the known tokens of a resumed answer."""
        with self._lock:
            self._arrived = list(self.choices) if self._is_known else []
            self._enqueue_once(self._is_known)

    @property
    def has_begun(self) -> bool:
        """Return whether a token has arrived."""
        return self._has_begun

    def call_between_responses(self, call: Callable[[], None]) -> bool:
        """Let a sender thread call `call` while nothing is being sent, when all arrived tokens are processed. Return
        False if the reply has ended."""
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                self._enqueue_once(True)
            return not self._ended

    def start_streaming(self, num_sent: int) -> None:
        """Stream the only choice to a client that has `num_sent` tokens of it. Must be called between responses."""
        self.streaming = self._may_stream
        [choice] = self.choices
        choice.resume(num_sent)
        self.sender.send(self._encode_delta(choice, is_end=False), False)
        choice.mark_sent()

    def stop_streaming(self) -> None:
        """Send no more before the end of the answer. Must be called between responses."""
        self.streaming = False

    def drop_images(self) -> None:
        """Release the memory of images, which is not needed once the engine client has them."""
        if self.prompt.spans:
            self.state = self.state.without_images()
            self.prompt = self.state.prompt

    def cancel_all(self) -> None:
        """Cancel all choices in the engine; those that have ended are not affected."""
        for choice in self.choices:
            self._callbacks.cancel(self._engine_id(choice), self.error is None)

    @property
    def first_id(self) -> str:
        """Return the engine id of the first open choice, which stands for all choices in the engine's waiting queue."""
        return self._engine_id(next((choice for choice in self.choices if choice.is_open), self.choices[0]))

    @property
    def num_generated(self) -> int:
        """Return the number of tokens generated for this client, without those of a resumed answer."""
        return sum(choice.answer.num_generated for choice in self.choices) - self._num_before

    def _engine_id(self, choice: Choice) -> str:
        return f"{self.engine_id}-{choice.index}"

    # Called by the engine client

    def prompt_outputs(self, choice: Choice, outputs: PromptOutputs) -> None:
        """Store the prompt outputs of a choice. A restarted engine sends them again; the first ones are kept."""
        with self._lock:
            choice.prompt_outputs = choice.prompt_outputs or outputs

    def tokens(
        self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None
    ) -> None:
        """Add tokens of a choice; `logprobs` has one item per token. `finish_reason` belongs to the last token."""
        of_each: Sequence[Logprobs | None] = logprobs or [None] * len(token_ids)
        with self._lock:
            if self._ended:  # too late: a client that resumes the answer gets them again
                return
            self._has_begun = True
            if choice not in self._arrived:
                self._arrived.append(choice)
            choice.pending += zip(token_ids, of_each, strict=True)
            choice.finish_reason = finish_reason
            # Without streaming and stop strings all but the time of the first token can wait for the end.
            worthwhile = finish_reason or self.streaming or self._request.stop_sequences or not choice.first_token_at
            self._enqueue_once(bool(worthwhile))

    def ended(self, error: RequestError) -> None:
        """End the request with `error`, with all its choices. The first error is kept."""
        with self._lock:
            self.error = self.error or error
            self._enqueue_once(True)

    def end_if_cancelled(self) -> bool:
        """End the request if its client has disconnected. Return True if this call has ended it."""
        error: RequestError = Cancelled("the client has cancelled the request")
        with self._asking:  # after the final response the query would crash Triton
            if self.is_over:
                return False
            try:
                if not self.sender.is_cancelled():
                    return False
            except Exception as failure:
                log.exception("%s: its stream is broken", self.engine_id)
                error = as_request_error(failure)
        self.ended(error)
        return True

    def end_if_late(self) -> bool:
        """End the request if no token has arrived within its own `timeout`. Return True if this call has ended it."""
        limit_s = self._request.timeout
        if not limit_s or self._has_begun or self.is_over or time.time() - self.received_at < limit_s:
            return False
        self.ended(TimedOut("the model sent no response for {limit} s, the request is cancelled", limit=limit_s))
        return True

    def take_expiry_check(self, limit_s: float) -> bool:
        """Return True, at most once a second, if no token has arrived within `limit_s`. Only the engine knows whether
        the request is still waiting."""
        now = time.time()
        if self._has_begun or self.is_over or now - self.received_at < limit_s or now - self._asked_at < 1:
            return False
        self._asked_at = now
        return True

    def _enqueue_once(self, worthwhile: bool) -> None:
        if worthwhile and not self._is_enqueued:
            self._is_enqueued = True
            self._callbacks.enqueue(self)

    # Called by sender threads

    def send_pending(self, latency: LatencyStats) -> None:
        """Send the pending tokens, one response per choice, and the final response if the request has ended. An
        exception ends the request and is not raised."""
        with self._lock:
            error = self.error
            arrivals = [] if error else [(each, each.pending, each.finish_reason) for each in self._arrived]
            for choice, _, _ in arrivals:
                choice.pending = []
            self._arrived = []
        if error is None:
            try:
                for choice, pending, finish_reason in arrivals:
                    self._respond(choice, pending, finish_reason, latency)
            except InvalidRequest as refusal:
                error = refusal
            except Exception as failure:  # a broken stream, or a bug
                log.exception("%s: a response could not be sent", self.engine_id)
                error = as_request_error(failure)
        if error and not self._ended:
            try:
                latency.record_end(self._record(error.kind, self.choices))
                self._send_final(wire.write_answer(self._failure(error)))
            except Exception:
                log.exception("%s: the final response could not be sent", self.engine_id)
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # the stream of another client is broken, or a bug
                log.exception("%s: a call between responses failed", self.engine_id)
        with self._lock:
            self._is_enqueued = self._ended  # an ended reply is not enqueued again
            self._enqueue_once(bool(self._arrived or self._calls or self.error))

    def _respond(
        self,
        choice: Choice,
        pending: list[tuple[int, Logprobs | None]],
        finish_reason: str | None,
        latency: LatencyStats,
    ) -> None:
        if choice.is_over or self._ended:  # a stop string has ended it while these tokens were in flight
            return
        if choice.is_open:
            if pending:
                self._note_arrival(choice, len(pending), latency)
            choice.answer.push(pending, finish_reason)
        if choice.answer.finish_reason and self._is_choosing:
            self._callbacks.cancel(self._engine_id(choice), True)  # as in `_finish`
            self._choose(latency)
        elif choice.answer.finish_reason:
            self._finish(choice, choice.answer.finish_reason, latency)
        elif self.streaming and choice.has_unsent_tokens:
            self.sender.send(self._encode_delta(choice, is_end=False), False)
            choice.mark_sent()

    def _choose(self, latency: LatencyStats) -> None:
        """Send the choices with the highest mean log-probability once all choices have finished."""
        if any(each.is_open for each in self.choices):
            return
        chosen = select_best(self.choices, self._request.n)
        places = [(each.index, each.num_sent) for each in self.choices[: len(chosen)]]
        self.choices[:] = chosen
        for each, (index, num_sent) in zip(chosen, places, strict=True):
            each.index, each.num_sent = index, num_sent  # positions of the client, which may have a part of them
        for each in chosen:
            self._finish(each, each.answer.finish_reason or "", latency)

    def _finish(self, choice: Choice, reason: str, latency: LatencyStats) -> None:
        is_end = all(each.is_over or each is choice for each in self.choices)
        payload = self._encode_delta(choice, is_end)
        latency.record_end(self._record(reason, [choice]))
        if is_end:
            self._send_final(payload)
            return
        self._callbacks.cancel(self._engine_id(choice), True)  # the engine does not know stop strings
        self.sender.send(payload, False)
        choice.mark_sent()

    def _record(self, reason: str, choices: Sequence[Choice]) -> RequestRecord:
        """Return the record of one choice, or of all choices that have failed together."""
        began = [each.first_token_at for each in choices if each.first_token_at]
        return RequestRecord(
            reason,
            time.time() - self.received_at,
            min(began) - self.received_at if began else None,
            len(self.prompt.token_ids),
            sum(each.answer.num_generated for each in choices),
            self.owner_usage.name,
        )

    def _send_final(self, payload: bytes) -> None:
        with self._asking, self._lock:
            self._ended = True
        self._callbacks.on_finished(self)
        self.sender.send(payload, True)

    def _note_arrival(self, choice: Choice, count: int, latency: LatencyStats) -> None:
        now = time.time()
        latency.record_tokens(count, now - (choice.last_token_at or self.received_at), not choice.first_token_at)
        choice.first_token_at = choice.first_token_at or now
        choice.last_token_at = now

    def _encode_delta(self, choice: Choice, is_end: bool) -> bytes:
        seconds = time.time() - self._accepted_at
        times = self._times(choice) if self._request.benchmark else None
        return wire.write_answer(choice.next_delta(seconds, times, is_end))

    def _failure(self, error: RequestError) -> wire.Failure:
        num_sent = sum(choice.num_sent for choice in self.choices)
        usage = wire.Usage(len(self.prompt.token_ids), num_sent)
        return wire.Failure(error, self.req_id, num_sent, usage, self.prompt.sampling.seed)

    def _times(self, choice: Choice) -> dict[str, str]:
        received, accepted, now = map(_as_date, (self.received_at, self._accepted_at, time.time()))
        return dict(zip(wire.TIMES, (received, accepted, accepted, str(choice.first_token_at), now), strict=True))


class _Listener(NamedTuple):
    """Listener of one choice, for the engine client."""

    reply: Reply
    choice: Choice

    def prompt_outputs(self, outputs: PromptOutputs) -> None:
        self.reply.prompt_outputs(self.choice, outputs)

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None, finish_reason: str | None) -> None:
        self.reply.tokens(self.choice, token_ids, logprobs, finish_reason)

    def ended(self, error: RequestError) -> None:
        self.reply.ended(error)


def _as_date(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_s)) + f".{int(epoch_s % 1 * 1e6):06d}"
