"""Service: parses, tokenizes and submits requests, detokenizes tokens and sends responses. Independent of Triton.

Threads: the caller of `submit` only queues the payload, and answers a plain probe, which therefore never waits. Parser
threads parse and tokenize; one more takes urgent requests, and one loads adapters. The engine client's thread delivers
tokens. Sender threads turn pending tokens into responses. A response that takes long to send delays its own request
only: tokens that arrive meanwhile are merged into its next response.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from engine import wire
from engine.errors import Cancelled, EngineUnavailable, RequestError, as_request_error, waited_too_long
from engine.link.journal import JournalEntry
from engine.serving.admission import Admission
from engine.serving.background_sender import BackgroundSender
from engine.serving.finished_requests import FinishedRequest
from engine.serving.input_processor import InputProcessor
from engine.serving.latency import LatencyStats, RequestRecord
from engine.serving.model_state import model_state
from engine.serving.open_replies import OpenReplies
from engine.serving.options import ServiceOptions
from engine.serving.rate_limits import OwnerUsage
from engine.serving.readiness import Readiness
from engine.serving.reply import Reply, ReplyCallbacks, Sender
from engine.serving.resumption import Resumption
from engine.serving.shared_streams import SharedStreams
from engine.serving.stored_responses import StoredResponses
from engine.serving.tokenization import tokenize_or_detokenize
from engine.serving.trace_spans import request_spans
from engine.wire import GenerationRequest

if TYPE_CHECKING:
    from engine.link.engine_set import Engines

log = logging.getLogger(__name__)

NUM_PARSER_THREADS = 2
NUM_IMAGE_THREADS = 8  # requests whose images are downloaded or decoded at the same time
NUM_SENDER_THREADS = 4
MAX_REPLIES_PER_FLUSH = 64  # replies whose deltas are collected before a flush of the shared streams
MIN_CANCEL_POLL_S, MAX_CANCEL_POLL_S = 0.05, 0.5
CANCEL_POLL_SHARE = 0.003  # fraction of one core: the cores are needed by the kernels
FINAL_RESPONSES_S = 5.0  # limit for sending the final responses of requests that a shutdown has ended


class Service:
    """Owns the open requests and the threads that parse them and send their responses. `processor` checks and tokenizes
    requests, `client` is the connection to the engine."""

    def __init__(self, processor: InputProcessor, client: Engines, options: ServiceOptions):
        self.client = client
        self.latency = LatencyStats()
        self.vllm_model_name, self.cache_port = options.vllm_model_name, options.cache_port
        self._tracer = options.tracer
        self._processor = processor
        self._options = options
        self._replies = OpenReplies()
        self._admission = Admission(client, self._replies, options)
        self.rate_limiter = self._admission.rate_limiter
        self._shared = SharedStreams()
        self._resumption = Resumption(processor, self._replies, options.is_first_model)
        self._stored = StoredResponses(self._replies, options.stored_ttl_s, options.max_stored_tokens)
        self._readiness = Readiness(client, options)
        self._ready: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()  # replies with something to send
        self._callbacks = ReplyCallbacks(self._ready.put, self._release, client.cancel, options.streaming)
        self._closing = threading.Event()  # set when open requests have been given up
        self._parsers = ThreadPoolExecutor(NUM_PARSER_THREADS, "parser")
        self._images = ThreadPoolExecutor(NUM_IMAGE_THREADS, "images")  # waits for downloads and decoders
        self._urgent = ThreadPoolExecutor(1, "urgent")
        self._loading = ThreadPoolExecutor(1, "loading")  # waits for the disk
        self._threads = [
            threading.Thread(target=self._send_forever, name=f"sender-{i}", daemon=True)
            for i in range(NUM_SENDER_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._poll_cancelled, name="cancel", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return len(self._replies)

    @property
    def is_stopping(self) -> bool:
        """Return whether a shutdown has been announced, other than that of a reload."""
        return self._readiness.is_stopping

    def submit(self, payload: bytes, sender: Sender) -> None:
        """Queue a request and return at once. `sender` gets exactly one final response in any case."""
        received_at = time.time()
        if payload == wire.PROBE_PAYLOAD:
            self._send_state(sender)
            return
        try:
            is_urgent = wire.may_be_urgent(payload)
            self._admission.take(payload, is_urgent)
            try:
                (self._urgent if is_urgent else self._parsers).submit(self._accept, payload, sender, received_at)
            except RuntimeError:  # the pool is shut down
                raise self._readiness.stopping from None
        except RequestError as error:
            self._refuse(error, None, sender, received_at)

    def not_ready_reason(self) -> str:
        """Return why a request would not be answered now; empty if the server is ready."""
        return self._readiness.not_ready_reason()

    def close(self, drain_s: float) -> None:
        """Refuse new requests, wait up to `drain_s` seconds for the open ones, then end them with an error."""
        deadline = time.monotonic() + drain_s
        for pool in (self._parsers, self._urgent, self._loading, self._images):
            pool.shutdown(wait=True)
        self._processor.close()
        self._readiness.is_draining = True
        while self._replies and time.monotonic() < deadline:
            time.sleep(0.02)
        self._closing.set()
        self.client.close()
        deadline = time.monotonic() + FINAL_RESPONSES_S
        while self._replies and time.monotonic() < deadline:  # the client has ended them; the senders send it
            time.sleep(0.005)
        self._shared.close()
        for _ in range(NUM_SENDER_THREADS):
            self._ready.put(None)
        for thread in self._threads:
            thread.join(FINAL_RESPONSES_S)  # a blocked stream must not block the shutdown
        if self._tracer:
            self._tracer.close()

    # Parsing

    def _accept(self, payload: bytes, sender: Sender, received_at: float) -> None:
        try:
            self._admission.mark_parsed()
            if sender.is_cancelled():
                raise Cancelled("the client has cancelled the request")
            body = wire.only_object(payload)
        except Exception as error:
            self._refuse(error, None, sender, received_at)
            return
        if self._processor.images and wire.has_images(body):
            self._admission.mark_waiting()
            self._images.submit(self._accept_images, body, sender, received_at)
        else:
            self._accept_body(body, sender, received_at)

    def _accept_images(self, body: dict[str, Any], sender: Sender, received_at: float) -> None:
        """Accept a request with images. Reading them takes long, so that it has threads of its own."""
        self._admission.mark_parsed()
        self._accept_body(body, sender, received_at)

    def _accept_body(self, body: dict[str, Any], sender: Sender, received_at: float) -> None:
        req_id = None
        try:
            if body.get(wire.PROBE):
                self._send_state(sender, body[wire.PROBE] == wire.METRICS)
                return
            if isinstance(name := body.get(wire.SHARE), str):
                self._shared.open(name, sender)
                return
            if shared := wire.shared_of(body):
                sender = self._shared.join(*shared, sender)
            owner = wire.owner_of(body)
            if wire.LOAD_LORA in body:
                self._loading.submit(self._load_lora, body, owner, sender, received_at)
                return
            if answer := self._answer_at_once(body, owner):
                sender.send(wire.write_answer(answer), True)
                return
            if wire.STORED in body:
                self._stored.answer(*wire.stored_action_of(body), owner, sender)
                return
            req_id, storing = wire.req_id_of(body), wire.storing_of(body)
            self._check_open()
            request = wire.parse_request(body)
            if storing and storing.is_background:
                self._begin_background(request, owner, storing, sender, received_at)
                return
            reply = self._admit(request, owner, sender, received_at, storing)
        except Exception as error:
            self._refuse(error, req_id, sender, received_at)
            return
        self._start(reply, owner)

    def _begin_background(
        self,
        request: GenerationRequest,
        owner: wire.Owner,
        storing: wire.StoreOptions,
        sender: Sender,
        received_at: float,
    ) -> None:
        """Start a background response unless the same request has started it already, and answer with the
        StoredResponse or stream its answer. A gateway that has lost its connection, or a client that wants to follow
        the answer again, repeats the request."""
        if not self._stored.has(request, owner):
            reply = self._admit(request, owner, BackgroundSender(), received_at, storing)
            reply.stop_streaming()
            self._start(reply, owner)
        if storing.is_streamed:
            self._stored.watch(request, owner, sender)
        else:
            self._stored.answer(request.req_id, wire.RETRIEVE, owner, sender)

    def _answer_at_once(self, body: dict[str, Any], owner: wire.Owner) -> wire.Answer | None:
        """Return the answer to a request that does not need the engine, or None if `body` is another one."""
        if wire.ABORT in body:
            return self._abort(body[wire.ABORT], owner)
        return self._processor.loras.answer(body, owner) or tokenize_or_detokenize(body, self._processor)

    def _load_lora(self, body: dict[str, Any], owner: wire.Owner, sender: Sender, received_at: float) -> None:
        try:
            if sender.is_cancelled():
                raise Cancelled("the client has cancelled the request")
            answer = self._answer_at_once(body, owner)
            assert answer
            sender.send(wire.write_answer(answer), True)
        except Exception as error:
            self._refuse(error, None, sender, received_at)

    def _check_open(self) -> None:
        if self._readiness.is_draining:
            raise self._readiness.stopping
        if self._options.why_not_served:
            raise EngineUnavailable(self._options.why_not_served)

    def _admit(
        self,
        request: GenerationRequest,
        owner: wire.Owner,
        sender: Sender,
        received_at: float,
        storing: wire.StoreOptions | None,
    ) -> Reply:
        self._admission.check_room()
        if request.resume_from is not None:
            self._resumption.end_previous(request)
        elif storing:
            self._stored.has(request, owner)  # raises if the id belongs to the response of another request

        def make(owner_usage: OwnerUsage) -> Reply:
            return Reply(
                self._resumption.request_state(request, owner.name, storing),
                sender,
                received_at,
                owner_usage,
                self._callbacks,
            )

        return self._admission.enter(owner, make)

    def _abort(self, req_id: object, owner: wire.Owner) -> wire.Aborted:
        """End an open request. Clients with an API key of a named owner can end requests of this owner only."""
        name = wire.FIELDS["req_id"].check(wire.ABORT, req_id)
        reply = self._replies.get(name)
        if reply is None or reply.is_over or owner.name not in ("", reply.owner_usage.name):
            return wire.Aborted(name, False)
        reply.ended(Cancelled("the request was aborted"))
        reply.cancel_all()
        return wire.Aborted(name, True)

    def _refuse(self, reason: Exception, req_id: str | None, sender: Sender, received_at: float) -> None:
        if not isinstance(reason, RequestError | RecursionError):  # a bug must not leave a client waiting
            log.error("a request could not be accepted", exc_info=reason)
        error = as_request_error(reason)
        log.info("refused: %s", error.kind)  # the text may quote the client
        self.latency.record_end(RequestRecord(error.kind, time.time() - received_at))
        try:
            sender.send(wire.write_answer(wire.Failure(error, req_id)), True)
        except Exception:
            log.exception("a refusal could not be sent")

    def _start(self, reply: Reply, owner: wire.Owner) -> None:
        priority = owner.priority + max(reply.state.request.priority, 0 if owner.name else -100)
        try:
            submissions = reply.submissions()
            reply.begin()
            if submissions:
                prompt, position = reply.prompt, (owner.name, priority)
                entry = JournalEntry.of(
                    prompt.token_ids, submissions, prompt.salt, position, prompt.spans, owner.cached_at
                )
                self.client.submit(entry)
            reply.drop_images()  # the client has those that the engine needs
        except Exception as error:
            reply.ended(as_request_error(error))
        if reply.is_over:  # cancelled before the engine client knew it
            reply.cancel_all()

    def _send_state(self, sender: Sender, with_metrics: bool = False) -> None:
        try:
            state = model_state(self, self._processor, self._options.max_running, with_metrics)
            sender.send(wire.write_answer(state), True)
        except Exception:
            log.exception("a probe could not be answered")

    # Sending

    def _send_forever(self) -> None:
        num_sent = 0
        while (reply := self._ready.get()) is not None:
            reply.send_pending(self.latency)
            num_sent += 1
            if num_sent % MAX_REPLIES_PER_FLUSH == 0 or self._ready.empty():
                self._shared.flush()

    def _release(self, reply: Reply) -> None:
        """Release and record a reply that ends. Called just before its final response, so that a client can reuse the
        req_id as soon as it has received that."""
        reply.cancel_all()  # no effect unless it ends early, by a stop string or a cancellation
        reply.drop_images()
        if self._tracer:
            self._tracer.send(request_spans(reply, self._tracer.model_name))
        self._resumption.finished.add(FinishedRequest(reply.state))
        self._stored.add(reply)
        self._replies.remove(reply)
        reply.owner_usage.charge(0, reply.num_generated)
        reply.owner_usage.release()
        reply.is_released.set()

    def _poll_cancelled(self) -> None:
        wait, queue_s = MIN_CANCEL_POLL_S, self._options.queue_timeout_s
        while not self._closing.wait(wait):
            started = time.monotonic()
            self._shared.end_unused()
            self._stored.finished.evict_expired()
            replies = self._replies.all()
            if self._readiness.update_drain():
                for reply in replies:
                    reply.ended(self._readiness.stopping)
                    reply.cancel_all()
            for reply in replies:
                if reply.end_if_cancelled() or reply.end_if_late():
                    reply.cancel_all()  # at once: the senders may be busy
                elif queue_s and reply.take_expiry_check(queue_s):
                    self.client.expire(reply.first_id, waited_too_long(queue_s))
            # A poll costs about 70 us per reply for a message to Triton. A poll that was slow on a busy machine must
            # not delay the next one too much, or requests of disconnected clients would keep running.
            wait = min(max(MIN_CANCEL_POLL_S, (time.monotonic() - started) / CANCEL_POLL_SHARE), MAX_CANCEL_POLL_S)
