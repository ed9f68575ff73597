"""Server side of the engine's socket: receives requests, runs the engine loop and sends the tokens of each step.

One thread does all the work; a second one only reads the socket while a step runs, so that a long step does not look
like silence. A client that is silent for `CLIENT_TIMEOUT_S` counts as dead and its requests are dropped; if it returns,
it is informed. If another client has connected since, that one replays the same answers, so the requests of its silent
predecessor are dropped after `SUCCEEDED_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from engine.core.loop import EngineLoop
from engine.core.types import Request
from engine.core.updates import FAILED
from engine.errors import DuplicateRequest, EngineUnavailable, NoToken, RequestError
from engine.link import messages
from engine.link.messages import ANY, ModelBounds

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
SUCCEEDED_TIMEOUT_S = 1.0
MAX_GAP_S = 1.0  # upper bound for the silence counted between two polls of the socket
IDLE_WAIT_MS = 200
PULSE_S = 0.1  # polling interval of the socket while a step runs


class Server:
    """Connects the socket and the engine loop. The loop may be added later: pings are answered from the start, and
    other messages wait. `address` is a ZeroMQ endpoint to bind. `on_first_tokens` is called once. Raises ZMQError."""

    def __init__(self, address: str, max_message_bytes: int = -1, on_first_tokens: Callable[[], None] = lambda: None):
        self.epoch = uuid.uuid4().hex
        self._on_first_tokens = on_first_tokens
        self._loop: EngineLoop | None = None
        self._bounds = ANY
        self._starting = ""  # what delays the loop
        self._waiting: list[tuple[bytes, str, Sequence[Any]]] = []  # unhandled messages
        self._client_of: dict[str, bytes] = {}  # request id -> client
        self._last_seen: dict[bytes, float] = {}  # by _listened_s
        self._listened_s = 0.0  # a clock that stops while this process is paused
        self._last_look = time.monotonic()
        self._has_sent_tokens = False
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a full queue would drop tokens
        self._socket.maxmsgsize = max_message_bytes
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_fd: int | None = None
        self._lock = threading.Lock()  # of the socket and of what was read from it
        self._is_over = threading.Event()
        self._pulse = threading.Thread(target=self._listen_in_steps, name="pulse", daemon=True)
        self._pulse.start()

    def set_starting(self, reason: str) -> None:
        """Set the reason, returned to pings before `begin`, why the engine is not ready yet."""
        self._starting = reason

    def run(self, loop: EngineLoop, bounds: ModelBounds = ANY) -> None:
        """Serve until `close` is called. The executor of the loop stays open."""
        try:
            self.begin(loop, bounds)
            while not self._closing:
                self.turn()
        finally:
            self._is_over.set()
            self._pulse.join()
            self._context.destroy(linger=0)

    def begin(self, loop: EngineLoop, bounds: ModelBounds = ANY) -> None:
        """Start handling requests with `loop`."""
        self._bounds, self._loop = bounds, loop

    @property
    def loop(self) -> EngineLoop:
        assert self._loop, "there is none yet"
        return self._loop

    def turn(self) -> None:
        """Handle messages and send tokens while a step runs; only `EngineLoop.step` waits for the step."""
        with self._lock:
            self._read(wait=self.loop.is_idle and not self._waiting)
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self._handle(*message)
            self._drop_silent_clients()
        updates = self.loop.step()
        with self._lock:
            self._send_updates(updates)
            for request_id in self.loop.take_long_compilations():
                self._send(self._client_of[request_id], messages.COMPILING, request_id)

    def waker(self) -> Callable[[], None]:
        """Return a function that lets the loop make a step even if there is no message. It may be called in any
        thread."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return partial(os.eventfd_write, self._wake_fd, 1)

    def close(self) -> None:
        """End `run` after the current step. May be called from a signal handler."""
        self._closing = True

    def _listen_in_steps(self) -> None:
        while not self._is_over.wait(PULSE_S):
            with self._lock:
                self._read(wait=False)

    def _read(self, wait: bool) -> None:
        """Read messages: answer pings at once and queue the others for the loop."""
        if wait and self._wake_fd is not None:
            zmq.select([self._socket, self._wake_fd], [], [], IDLE_WAIT_MS / 1000)
            with contextlib.suppress(BlockingIOError):  # it was not woken
                os.eventfd_read(self._wake_fd)
            wait = False
        if not self._socket.poll(IDLE_WAIT_MS if wait else 0):
            return
        while True:
            try:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                kind, fields = messages.unpack(b"".join(parts))
            except ValueError as error:
                log.warning("ignored: %s", error)
                continue
            self._last_seen[client] = self._listened_s
            if kind == messages.PING:
                stats = self._loop.stats() if self._loop else {messages.STARTING: self._starting}
                self._send(client, messages.PONG, stats)
            elif fields and fields[0] == self._epoch_of(client):
                self._waiting.append((client, kind, fields))
            # Other messages are for a previous process or connection; their client notices that and replays.

    def _handle(self, client: bytes, kind: str, fields: Sequence[Any]) -> None:
        try:
            if kind == messages.SUBMIT:
                requests, replay = messages.unpack_submission(fields, self._bounds)
                self._submit(client, requests, replay)
            elif kind == messages.CANCEL:
                request_id, is_complete = messages.unpack_cancel(fields)
                self._client_of.pop(request_id, None)
                self.loop.drop(request_id, is_complete)
            elif kind == messages.EXPIRE:
                self._expire(client, *messages.unpack_expiry(fields))
        except ValueError as error:
            log.warning("ignored: %s", error)

    def _expire(self, client: bytes, request_id: str, error: RequestError) -> None:
        if self._client_of.get(request_id) == client and not self.loop.has_begun(request_id):
            del self._client_of[request_id]
            self.loop.drop(request_id)
            self._refuse(client, request_id, error)

    def _submit(self, client: bytes, requests: Sequence[Request], replay: bool) -> None:
        """Add the requests to the loop. Answers without tokens become forks, which share the computed prompt."""
        fresh = [request for request in requests if request.num_new_tokens == 0]
        if fresh:
            fresh[0].forks = fresh[1:]
        for request in fresh[:1] + [request for request in requests if request.num_new_tokens]:
            self._add(client, request, replay)

    def _add(self, client: bytes, request: Request, replay: bool) -> None:
        request_ids = [each.request_id for each in (request, *request.forks)]
        try:
            for request_id in request_ids:
                if self._client_of.get(request_id) == client:
                    raise DuplicateRequest(f"the engine has a request {request_id} already")
                if self._client_of.pop(request_id, None):  # its connection was lost: it continues on this one
                    self.loop.drop(request_id)
            self.loop.add(request, replay)
            self._client_of.update(dict.fromkeys(request_ids, client))
        except RequestError as error:
            for request_id in request_ids:
                self._refuse(client, request_id, error)

    def _send_updates(self, updates: list[Any]) -> None:
        by_client: dict[bytes, list[Any]] = {}
        for update in updates:
            request_id = update.request.request_id
            if update.finish_reason == FAILED:
                self._refuse(self._client_of.pop(request_id), request_id, update.error or NoToken())
                continue
            logprobs = update.logprobs and messages.pack_logprobs(update.logprobs)
            outputs = messages.pack_prompt_outputs(update.prompt_outputs)
            fields = (request_id, update.token_ids, logprobs, update.finish_reason, outputs)
            by_client.setdefault(self._client_of[request_id], []).append(fields)
            if update.finish_reason:
                del self._client_of[request_id]
        for client, updated in by_client.items():
            self._send(client, messages.TOKENS, updated)
        if by_client and not self._has_sent_tokens:
            self._has_sent_tokens = True
            self._on_first_tokens()

    def _drop_silent_clients(self) -> None:
        now = time.monotonic()
        # A paused container also pauses its clients, so they get time to send before they count as dead.
        self._listened_s += min(now - self._last_look, MAX_GAP_S)
        self._last_look = now
        newest = next(reversed(self._last_seen), None)
        for client, seen in list(self._last_seen.items()):
            silent_s, limit_s = self._listened_s - seen, CLIENT_TIMEOUT_S if client == newest else SUCCEEDED_TIMEOUT_S
            if silent_s <= limit_s:
                continue
            orphans = [request_id for request_id, owner in self._client_of.items() if owner == client]
            if orphans:
                log.warning("a client is silent for %.0f s, dropping its %d requests", silent_s, len(orphans))
            del self._last_seen[client]
            for request_id in orphans:
                del self._client_of[request_id]
                self.loop.drop(request_id)
                text = f"the server has not spoken to its engine for {silent_s:.0f} s"
                self._refuse(client, request_id, EngineUnavailable(text))

    def _epoch_of(self, client: bytes) -> str:
        """Return the epoch of a connection. ZeroMQ reconnects as another client; messages in flight are lost."""
        return f"{self.epoch}/{client.hex()}"

    def _refuse(self, client: bytes, request_id: str, error: RequestError) -> None:
        self._send(client, messages.REFUSED, request_id, error.kind, error.text, error.cause)

    def _send(self, client: bytes, kind: str, *fields: Any) -> None:
        self._socket.send_multipart([client, messages.pack(kind, self._epoch_of(client), *fields)])
