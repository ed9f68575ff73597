"""From a client's JSON to a stream of JSON responses: check, tokenize, submit, detokenize, send. No Triton here.

Threads: the caller of `submit` only hands the payload over; `intake` threads parse and tokenize; the engine client's
thread delivers tokens; `sender` threads turn what has gathered into responses. A response that takes long to send holds
up its own request only: tokens that arrive meanwhile are merged into its next response.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine import wire
from engine.client import EngineClient
from engine.errors import DuplicateRequest, EngineUnavailable, RequestError
from engine.latency import Latency
from engine.prompt import Prompt, PromptReader
from engine.reply import Reply, Sender
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NUM_INTAKE_THREADS = 2
NUM_SENDER_THREADS = 4
MIN_CANCEL_POLL_S = 0.05


@dataclass(frozen=True)
class ServiceOptions:
    streaming: bool = True  # False: only final responses leave the server
    hang_after_s: float = 60.0  # an engine that is silent for longer is not ready


class Service:
    """`reader` checks requests against the model's limits; `client` is the way to the engine."""

    def __init__(self, tokenizer: Tokenizer, reader: PromptReader, client: EngineClient, options: ServiceOptions):
        self.client = client
        self.latency = Latency()
        self._tokenizer = tokenizer
        self._reader = reader
        self._options = options
        self._replies: dict[str, Reply] = {}
        self._lock = threading.Lock()  # of _replies
        self._ready: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()  # replies with something to send
        self._closing = threading.Event()
        self._intake = ThreadPoolExecutor(NUM_INTAKE_THREADS, "intake")
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
        try:
            self._intake.submit(self._accept, payload, sender, received)
        except RuntimeError:  # the pool is shut down
            sender.send(wire.failure(EngineUnavailable("the server is stopping"), None), True)

    def not_ready_reason(self) -> str:
        """Why a request would not be answered now; empty when it would."""
        if self._closing.is_set():
            return "the server is stopping"
        if failure := self.client.failure():
            return failure
        if self.client.silent_s == float("inf"):
            return "the engine is starting"
        if self.client.silent_s > self._options.hang_after_s:
            return f"the engine has been silent for {self.client.silent_s:.0f} s"
        return ""

    def close(self, drain_s: float) -> None:
        """Refuses new requests, waits up to `drain_s` seconds for the open ones, then ends them with an error."""
        deadline = time.monotonic() + drain_s
        self._intake.shutdown(wait=True)
        while self._replies and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closing.set()
        self.client.close()
        while self._replies:  # the client has ended each of them, the senders say so
            time.sleep(0.005)
        for _ in range(NUM_SENDER_THREADS):
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    # Intake

    def _accept(self, payload: bytes, sender: Sender, received: float) -> None:
        req_id = None
        try:
            body = wire.only_object(payload)
            if body.get(wire.PROBE):
                reason = self.not_ready_reason()
                sender.send(wire.model_state(not reason, reason, self._facts()), True)
                return
            request = wire.parse_request(body)
            req_id = request.req_id
            prompt = self._reader.read(request)
            self._start(request, prompt, sender, received)
        except RequestError as error:
            log.info("refused: %s: %s", error.kind, error)
            sender.send(wire.failure(error, req_id), True)
        except Exception as error:  # a bug of ours must not leave a client waiting
            log.exception("a request could not be accepted")
            sender.send(wire.failure(RequestError(f"internal error: {type(error).__name__}"), req_id), True)

    def _start(self, request: wire.GenerationRequest, prompt: Prompt, sender: Sender, received: float) -> None:
        reply = Reply(request, prompt, sender, self._tokenizer, received)
        reply.streaming = self._options.streaming and not request.return_all_tokens
        reply.wake = self._wake
        with self._lock:
            if request.req_id in self._replies:
                raise DuplicateRequest(
                    f"The req_id {wire.shown(request.req_id)} already exists in the current batch, "
                    "the current request will be ignored."
                )
            self._replies[request.req_id] = reply
        try:
            self.client.submit(request.req_id, prompt.token_ids, prompt.sampling, reply)
        except EngineUnavailable as error:
            reply.ended(error)

    def _facts(self) -> dict[str, object]:
        stats = self.client.stats
        return {
            "model_len": self._reader.model_len,
            "max_seq_len": self._reader.max_seq_len,
            "max_dec_len": self._reader.max_dec_len,
            "num_running": stats.get("num_running", 0),
            "num_waiting": stats.get("num_waiting", 0),
            "num_blocks_held": stats.get("num_blocks_held", 0),
            "num_open": self.num_open,
            "engine_silent_s": min(self.client.silent_s, 1e9),
            "num_restarts": self.client.num_restarts,
        }

    # Sending

    def _wake(self, reply: Reply) -> None:
        self._ready.put(reply)

    def _send_forever(self) -> None:
        while (reply := self._ready.get()) is not None:
            try:
                ended = reply.send_gathered(self.latency)
            except Exception:  # a dead stream or a bug: this request ends, the thread does not
                log.exception("a response could not be sent")
                ended = True
            if ended:
                self._forget(reply)

    def _forget(self, reply: Reply) -> None:
        self.client.cancel(reply.req_id)  # no-op unless it ended early, at a stop string or a cancellation
        with self._lock:
            if self._replies.get(reply.req_id) is reply:
                del self._replies[reply.req_id]

    def _poll_cancelled(self) -> None:
        wait = MIN_CANCEL_POLL_S
        while not self._closing.wait(wait):
            started = time.monotonic()
            with self._lock:
                replies = list(self._replies.values())
            for reply in replies:
                reply.end_if_cancelled()
            # A poll costs a message to Triton each, some 70 us: spend a tenth of the time on it at most.
            wait = max(MIN_CANCEL_POLL_S, 10 * (time.monotonic() - started))
