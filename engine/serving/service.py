"""From a client's JSON to a stream of JSON responses: check, tokenize, submit, detokenize, send. No Triton here.

Threads: the caller of `submit` only hands the payload over, and answers a probe, which so waits for nobody; `intake`
threads parse and tokenize; the engine client's thread delivers tokens; `sender` threads turn what has gathered into
responses. A response that takes long to send holds up its own request only: tokens that arrive meanwhile are merged
into its next response.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine import wire
from engine.errors import (
    Cancelled,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    RequestError,
    UnknownAnswer,
    as_request_error,
    queue_full,
    tokens_full,
    waited_too_long,
)
from engine.link.client import EngineClient
from engine.link.messages import STARTING
from engine.serving.accounts import Accounts
from engine.serving.choice import Asked
from engine.serving.kept import KeptAnswers, check_same
from engine.serving.latency import Latency
from engine.serving.metrics import samples
from engine.serving.prompt import PromptReader
from engine.serving.reply import Reply, Sender
from engine.serving.tokens import answer_about_tokens
from engine.text.tokenizer import Tokenizer
from engine.wire import GenerationRequest

log = logging.getLogger(__name__)

MAX_SILENCE_S = 2.0  # of an engine that is ready: it answers four times a second, also while it computes
MIN_STEP_LIMIT_S = 5.0  # other processes may need the cores, too
STOPPING = "the server is stopping"
NUM_INTAKE_THREADS = 2
NUM_SENDER_THREADS = 4
MIN_CANCEL_POLL_S, MAX_CANCEL_POLL_S = 0.05, 0.5
CANCEL_POLL_SHARE = 0.03  # of one core: the cores belong to the kernels
LAST_WORDS_S = 5.0  # at most, for the final responses of requests that a stop has ended


@dataclass(frozen=True)
class ServiceOptions:
    streaming: bool = True  # False: only whole answers leave the server
    hang_after_s: float = 60.0  # of a step, where those before do not say less
    max_body_bytes: int = 4 << 20  # of one request
    max_running: int = 1 << 10  # requests in the engine, and beyond them
    max_waiting: int = 1 << 10
    max_waiting_tokens: int = 1 << 20  # of their prompts
    queue_timeout_s: float = 0.0  # from a request's arrival until it begins; 0: it may wait for ever
    why_not_served: str = ""  # of a machine that only holds ranks: what requests are told
    stopping_file: Path | None = None  # the supervisor writes when requests are refused from
    drain_s: float = 30.0  # from then on, until the open ones are ended


class Service:
    """`reader` checks requests against the model's limits; `client` is the way to the engine."""

    def __init__(self, tokenizer: Tokenizer, reader: PromptReader, client: EngineClient, options: ServiceOptions):
        self.client = client
        self.latency = Latency()
        self.accounts = Accounts()
        self._tokenizer = tokenizer
        self._reader = reader
        self._options = options
        self._replies: dict[str, Reply] = {}
        self._kept = KeptAnswers()
        self._lock = threading.Lock()  # of _replies
        self._ready: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()  # replies with something to send
        self._refuse_at: float | None = None  # the end of the server is announced
        self._is_draining = False  # nothing is taken any more
        self._closing = threading.Event()  # nor does what is open go on
        self._intake = ThreadPoolExecutor(NUM_INTAKE_THREADS, "intake")
        self._num_unread = 0  # requests that wait for it; under the lock, too
        self._threads = [
            threading.Thread(target=self._send_forever, name=f"sender-{i}", daemon=True)
            for i in range(NUM_SENDER_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._poll_cancelled, name="cancel", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        return len(self._replies)

    def submit(self, payload: bytes, sender: Sender) -> None:
        """Returns at once; whatever happens, `sender` gets exactly one final response."""
        received = time.time()
        if payload == wire.PROBE_PAYLOAD:
            self._tell_state(sender)
            return
        try:
            self._check_size(payload)
            with self._lock:
                self._check_room(self._num_unread)
                self._num_unread += 1
            try:
                self._intake.submit(self._accept, payload, sender, received)
            except RuntimeError:  # the pool is shut down
                raise EngineUnavailable(STOPPING) from None
        except RequestError as error:
            self._refuse(error, None, sender, received)

    def not_ready_reason(self) -> str:
        """Why a request would not be answered now; empty when it would."""
        if self._is_draining or self._refuse_at is not None:
            return STOPPING
        if failure := self.client.failure():
            return failure
        if self.client.silent_s == float("inf"):
            return "the engine is starting"
        if starting := self.client.stats.get(STARTING):
            return f"the engine is starting: {starting}"
        if self.client.silent_s > MAX_SILENCE_S:
            return f"the engine has been silent for {self.client.silent_s:.0f} s"
        age_s, expected_s = self.client.stats.get("step_age_s", 0.0), self.client.stats.get("step_limit_s", 0.0)
        longest_s = self._options.hang_after_s
        if age_s > min(max(expected_s, MIN_STEP_LIMIT_S) if expected_s else longest_s, longest_s):
            return f"the engine has been computing one step for {age_s:.0f} s"
        return ""

    def close(self, drain_s: float) -> None:
        """Refuses new requests, waits up to `drain_s` seconds for the open ones, then ends them with an error."""
        deadline = time.monotonic() + drain_s
        self._intake.shutdown(wait=True)
        self._is_draining = True
        while self._replies and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closing.set()
        self.client.close()
        deadline = time.monotonic() + LAST_WORDS_S
        while self._replies and time.monotonic() < deadline:  # the client has ended each of them, the senders say so
            time.sleep(0.005)
        for _ in range(NUM_SENDER_THREADS):
            self._ready.put(None)
        for thread in self._threads:
            thread.join(LAST_WORDS_S)  # a stream that takes nothing any more must not keep the server

    # Intake

    def _accept(self, payload: bytes, sender: Sender, received: float) -> None:
        req_id = None
        try:
            with self._lock:
                self._num_unread -= 1
            if sender.is_cancelled():
                raise Cancelled("the client has cancelled the request")
            body = wire.only_object(payload)
            if body.get(wire.PROBE):
                self._tell_state(sender, body[wire.PROBE] == wire.METRICS)
                return
            owner = wire.owner_of(body)
            if wire.ABORT in body:
                sender.send(wire.write_answer(self._abort(body[wire.ABORT], owner)), True)
                return
            if answer := answer_about_tokens(body, self._reader):
                sender.send(wire.write_answer(answer), True)
                return
            req_id = wire.req_id_of(body)
            if self._is_draining:
                raise EngineUnavailable(STOPPING)
            if self._options.why_not_served:
                raise EngineUnavailable(self._options.why_not_served)
            request = wire.parse_request(body)
            self._check_room()
            if request.resume_from is not None:
                self._end_before(request)
            reply = self._enter(owner, lambda: Reply(self._asked(request), sender, received))
            reply.standing = owner.name, owner.priority + max(request.priority, 0 if owner.name else -100)
        except (RequestError, RecursionError) as error:
            self._refuse(as_request_error(error), req_id, sender, received)
            return
        except Exception as error:  # a bug of ours must not leave a client waiting
            log.exception("a request could not be accepted")
            self._refuse(as_request_error(error), req_id, sender, received)
            return
        self._start(reply)

    def _asked(self, request: GenerationRequest) -> Asked:
        """With what is known of its answer. Raises UnknownAnswer when the client has a part of one that would not be
        the same again."""
        if request.resume_from is None:
            return Asked.now(request, self._reader.read(request), self._tokenizer)
        asked = self._kept.take(request)
        if asked is None:
            if any(request.resume_from) and not request.answer_ids and not request.is_repeatable:
                text = "The answer to {field} {value} is not known any more: ask again without `{resume_from}`"
                raise UnknownAnswer(text, field="req_id", value=wire.shown(request.req_id))
            asked = Asked.now(request, self._reader.read(request), self._tokenizer)
        asked.go_on(request)
        return asked

    def _end_before(self, request: GenerationRequest) -> None:
        """Its client asks again: it has lost a connection of which nobody has told us yet."""
        with self._lock:
            before = self._replies.get(request.req_id)
        if before is not None:
            check_same(before.asked, request)
            before.ended(Cancelled("the answer goes on over another connection"))
            before.has_left.wait(LAST_WORDS_S)

    def _check_size(self, payload: bytes) -> None:
        limit = self._options.max_body_bytes
        if len(payload) > limit:
            text = "The request has {value} bytes, at most MAX_BODY_BYTES({limit}) are taken"
            raise InvalidRequest(text, value=len(payload), limit=limit)

    def _check_room(self, num_unread: int = 0) -> None:
        """Before time goes into a request that the engine would refuse: into reading it, and into its tokens."""
        num_waiting = self.num_open + num_unread - self._options.max_running
        if num_waiting >= self._options.max_waiting:
            raise queue_full(num_waiting, self._options.max_waiting)
        num_tokens = self.client.stats.get("num_waiting_tokens", 0)
        if num_tokens >= self._options.max_waiting_tokens:
            raise tokens_full(num_tokens, self._options.max_waiting_tokens)

    def _enter(self, owner: wire.Owner, make: Callable[[], Reply]) -> Reply:
        """With the request counted as its owner's, until it ends or is refused."""
        account = self.accounts.of(owner)
        account.enter(owner)
        try:
            reply = make()
            reply.account = account
            self._open(reply)
        except BaseException:
            account.leave()
            raise
        account.charge(len(reply.prompt.token_ids), 0)
        return reply

    def _abort(self, req_id: object, owner: wire.Owner) -> wire.Aborted:
        """Who has a key of a name may end their own requests only."""
        name = wire.FIELDS["req_id"].check(wire.ABORT, req_id)
        with self._lock:
            reply = self._replies.get(name)
        if reply is None or reply.is_over or owner.name not in ("", reply.account.name):
            return wire.Aborted(name, False)
        reply.ended(Cancelled("the request was aborted"))
        reply.cancel_all()
        return wire.Aborted(name, True)

    def _refuse(self, error: RequestError, req_id: str | None, sender: Sender, received: float) -> None:
        log.info("refused: %s", error.kind)  # the text may quote what the client wrote
        self.latency.ended(error.kind, time.time() - received)
        try:
            sender.send(wire.write_answer(wire.Failure(error, req_id)), True)
        except Exception:
            log.exception("a refusal could not be sent")

    def _open(self, reply: Reply) -> None:
        reply.streaming &= self._options.streaming
        reply.wake, reply.leave, reply.cancel = self._ready.put, self._forget, self.client.cancel
        with self._lock:
            if reply.req_id in self._replies:
                text = "The {field} {value} already exists in the current batch, the current request will be ignored."
                raise DuplicateRequest(text, field="req_id", value=wire.shown(reply.req_id))
            self._replies[reply.req_id] = reply

    def _start(self, reply: Reply) -> None:
        try:
            submissions = reply.submissions()
            reply.begin()
            if submissions:
                self.client.submit(reply.prompt.token_ids, submissions, reply.prompt.salt, reply.standing)
        except Exception as error:
            reply.ended(as_request_error(error))
        if reply.is_over:  # cancelled before the engine client knew it
            reply.cancel_all()

    def _tell_state(self, sender: Sender, with_metrics: bool = False) -> None:
        try:
            sender.send(wire.write_answer(self._state(with_metrics)), True)
        except Exception:
            log.exception("a probe could not be answered")

    def _state(self, with_metrics: bool) -> wire.ModelState:
        stats, reason = self.client.stats, self.not_ready_reason()
        return wire.ModelState(
            ready=not reason,
            reason=reason,
            model_len=self._reader.model_len,
            max_seq_len=self._reader.max_seq_len,
            max_dec_len=self._reader.max_dec_len,
            num_running=int(stats.get("num_running", 0)),
            num_waiting=int(stats.get("num_waiting", 0)),
            num_blocks_held=int(stats.get("num_blocks_held", 0)),
            num_open=self.num_open,
            engine_silent_s=min(self.client.silent_s, 1e9),
            engine_step_s=stats.get("step_age_s", 0.0),
            num_restarts=self.client.num_restarts,
            metrics=[*samples(self, self._options.max_running)] if with_metrics else None,
        )

    # Sending

    def _send_forever(self) -> None:
        while (reply := self._ready.get()) is not None:
            reply.send_gathered(self.latency)

    def _forget(self, reply: Reply) -> None:
        """Just before its final response, so that a client may use its req_id again as soon as it has that."""
        reply.cancel_all()  # no-op unless it ends early, at a stop string or a cancellation
        self._kept.keep(reply.asked)
        with self._lock:
            self._replies.pop(reply.req_id, None)
        reply.account.charge(0, reply.num_generated)
        reply.account.leave()
        reply.has_left.set()

    def _poll_cancelled(self) -> None:
        wait, queue_s = MIN_CANCEL_POLL_S, self._options.queue_timeout_s
        while not self._closing.wait(wait):
            started = time.monotonic()
            with self._lock:
                replies = list(self._replies.values())
            if self._is_time_up():
                for reply in replies:
                    reply.ended(EngineUnavailable(STOPPING))
                    reply.cancel_all()
            for reply in replies:
                if reply.end_if_cancelled() or reply.end_if_late():
                    reply.cancel_all()  # now: the senders may be busy
                elif queue_s and reply.may_wait_too_long(queue_s):
                    self.client.expire(reply.first_id, waited_too_long(queue_s))
            # A poll costs a message to Triton for each reply, some 70 us. One that took long on a busy machine must not
            # put off the next for longer still: requests of nobody would run.
            wait = min(max(MIN_CANCEL_POLL_S, (time.monotonic() - started) / CANCEL_POLL_SHARE), MAX_CANCEL_POLL_S)

    def _is_time_up(self) -> bool:
        """Of an announced end of the server: for those who are still open. Triton would end their streams without a
        final response, and begins to do so before it tells us."""
        if self._refuse_at is None and self._options.stopping_file:
            with contextlib.suppress(FileNotFoundError):
                self._refuse_at = float(self._options.stopping_file.read_text())
        if self._refuse_at is None:
            return False
        self._is_draining |= time.monotonic() >= self._refuse_at
        return time.monotonic() >= self._refuse_at + self._options.drain_s
