"""The engine's end of the socket: takes requests, runs the loop, sends back what each step brings.

One thread does everything; a client is whoever sends. A client that is silent for `CLIENT_TIMEOUT_S` has died and its
requests are dropped; should it come back, it is told.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from engine.core.loop import Loop
from engine.core.scheduler import FAILED
from engine.core.types import Request
from engine.errors import DuplicateRequest, EngineUnavailable, NoToken, RequestError
from engine.link import messages

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
MAX_GAP_S = 1.0  # of the time between two looks at the socket, so much at most counts as silence of the clients
IDLE_WAIT_MS = 200


class Server:
    """Between the socket and the loop, which may come later: pings are answered from the start, and what is submitted
    waits. `address` is a ZeroMQ endpoint to bind."""

    def __init__(self, address: str):
        self.epoch = uuid.uuid4().hex
        self._loop: Loop | None = None
        self._starting = ""  # what keeps the loop from being there
        self._waiting: list[tuple[bytes, str, list[Any]]] = []  # messages that came before it
        self._client_of: dict[str, bytes] = {}  # request -> who asked
        self._last_seen: dict[bytes, float] = {}  # by _listened_s
        self._listened_s = 0.0  # grows like a clock, but stands still while this process does
        self._last_look = time.monotonic()
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a full queue would drop tokens
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @contextlib.contextmanager
    def starting(self, reason: str) -> Iterator[Callable[[str], None]]:
        """Until the end of the block a thread answers, with the reason why nothing is computed yet. It is changed by
        what the block gets."""
        self._starting = reason
        is_over = threading.Event()

        def answer() -> None:
            while not is_over.is_set():
                self._take_messages(wait=True)

        thread = threading.Thread(target=answer, name="starting", daemon=True)
        thread.start()
        try:
            yield lambda reason: setattr(self, "_starting", reason)
        finally:
            is_over.set()
            thread.join()
            self._starting = ""

    def run(self, loop: Loop) -> None:
        try:
            self.begin(loop)
            while not self._closing:
                self.turn()
        finally:
            loop.executor.close()
            self._context.destroy(linger=0)

    def begin(self, loop: Loop) -> None:
        """From now on there is something that computes."""
        self._loop = loop
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._handle(*message)

    @property
    def loop(self) -> Loop:
        assert self._loop, "there is none yet"
        return self._loop

    def turn(self) -> None:
        """Messages are read and tokens sent while a step runs; only `Loop.turn` waits for it."""
        self._take_messages(wait=self.loop.is_idle)
        self._drop_silent_clients()
        self._send_updates(self.loop.turn())

    def close(self) -> None:
        """Ends `run` after the current step. May be called from a signal handler."""
        self._closing = True

    def _take_messages(self, wait: bool) -> None:
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
                log.warning("a message that is none of ours: %s", error)  # whoever found our port
                continue
            self._last_seen[client] = self._listened_s
            if kind == messages.PING:
                stats = self._loop.stats() if self._loop else {messages.STARTING: self._starting}
                self._send(client, messages.PONG, stats)
            elif not fields or fields[0] != self._epoch_of(client):
                continue  # meant for the process or the connection before; its client will notice and replay
            elif self._loop:
                self._handle(client, kind, fields)
            else:
                self._waiting.append((client, kind, fields))

    def _handle(self, client: bytes, kind: str, fields: list[Any]) -> None:
        if kind == messages.SUBMIT:
            self._submit(client, fields[1:])
        elif kind == messages.CANCEL:
            self._client_of.pop(fields[1], None)
            self.loop.drop(fields[1])

    def _submit(self, client: bytes, submitted: Sequence[Any]) -> None:
        """Answers that have no token yet share the work of their prompt."""
        prompt_ids, answers, replay, salt = submitted
        requests = [
            Request(
                request_id, [*prompt_ids, *token_ids], len(prompt_ids), messages.unpack_sampling(sampling), salt=salt
            )
            for request_id, sampling, token_ids in answers
        ]
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
                if self._client_of.pop(request_id, None):  # its connection was lost: it goes on over this one
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
            fields = (request_id, update.token_ids, logprobs, update.finish_reason)
            by_client.setdefault(self._client_of[request_id], []).append(fields)
            if update.finish_reason:
                del self._client_of[request_id]
        for client, updated in by_client.items():
            self._send(client, messages.TOKENS, updated)

    def _drop_silent_clients(self) -> None:
        now = time.monotonic()
        # A paused container pauses its clients too: they must get the time to speak before they count as dead.
        self._listened_s += min(now - self._last_look, MAX_GAP_S)
        self._last_look = now
        for client in [c for c, seen in self._last_seen.items() if self._listened_s - seen > CLIENT_TIMEOUT_S]:
            orphans = [request_id for request_id, owner in self._client_of.items() if owner == client]
            if orphans:
                log.warning("a client is silent for %.0f s, dropping its %d requests", CLIENT_TIMEOUT_S, len(orphans))
            del self._last_seen[client]
            for request_id in orphans:
                del self._client_of[request_id]
                self.loop.drop(request_id)
                text = f"the server has not spoken to its engine for {CLIENT_TIMEOUT_S:.0f} s"
                self._refuse(client, request_id, EngineUnavailable(text))

    def _epoch_of(self, client: bytes) -> str:
        """ZeroMQ connects again by itself, as another client; what was on its way over the lost connection is lost."""
        return f"{self.epoch}/{client.hex()}"

    def _refuse(self, client: bytes, request_id: str, error: RequestError) -> None:
        self._send(client, messages.REFUSED, request_id, error.kind, error.text, error.cause)

    def _send(self, client: bytes, kind: str, *fields: Any) -> None:
        self._socket.send_multipart([client, messages.pack(kind, self._epoch_of(client), *fields)])
