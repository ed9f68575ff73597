"""The engine as its users see it: submit, cancel, and a listener per request. Keeps the journal.

The journal is what makes a crash of the engine invisible: for every open request the prompt, the sampling (with its
seed) and the tokens received so far. When a new engine process answers, every open request is submitted again with what
it already has; the engine goes on from there, greedy or seeded, with the same tokens as without the crash. A request
that crashes every engine is found (`engine.link.trials`) and ended with an error.

One thread owns the socket. It calls the listeners, which must not block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from engine.core.types import Logprobs, Sampling
from engine.errors import EngineUnavailable, RequestError, error_of
from engine.link import messages
from engine.link.trials import Trials

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.25
MAX_RECEIVED = 50  # messages in a row: an engine that is faster than we are must not keep pings and commands waiting


class Listener(Protocol):
    """Told what happens to one request. Exactly one of `ended` and a `token` with a finish_reason comes last."""

    def token(self, token_id: int, logprobs: Logprobs | None, finish_reason: str | None) -> None: ...

    def ended(self, error: RequestError) -> None: ...


@dataclass
class Entry:
    """One open request of the journal."""

    token_ids: list[int]  # prompt, then what was received
    prompt_len: int
    sampling: Sampling
    listener: Listener
    submitted: bool = False  # to the engine process of now
    replay: bool = False


class EngineClient:
    """`failed_file` is written by the supervisor when it gives the engine up; its text is the reason."""

    def __init__(self, address: str, failed_file: Path | None = None):
        self.stats: dict[str, float] = {}  # of the engine, from its last answer
        self.num_restarts = 0  # engine processes seen after the first
        self._address = address
        self._failed_file = failed_file
        self._journal: dict[str, Entry] = {}
        self._lock = threading.Lock()  # of the journal and the commands
        self._commands: deque[Callable[[], None]] = deque()
        self._pipe = list(os.pipe())  # wakes the thread; empty once closed
        os.set_blocking(self._pipe[1], False)
        self._epoch: str | None = None
        self._last_answer = 0.0
        self._last_ping = 0.0
        self._closing = False
        self._broken: str | None = None  # by a bug of ours
        self._trials = Trials(self._submit)
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # Called from any thread

    def submit(self, request_id: str, token_ids: list[int], sampling: Sampling, listener: Listener) -> None:
        """Raises EngineUnavailable when the engine has been given up or the client is closed.

        A `request_id` is never used twice: tokens of one that was cancelled may still be on their way.
        """
        if reason := self.failure():
            raise EngineUnavailable(reason)
        entry = Entry(list(token_ids), len(token_ids), sampling, listener)
        with self._lock:
            if self._closing:
                raise EngineUnavailable("the server is stopping")
            assert request_id not in self._journal, f"{request_id} is open already"
            self._journal[request_id] = entry
        self._command(lambda: self._trials.add(request_id))

    def cancel(self, request_id: str) -> None:
        """Forgets a request; its listener hears nothing more. Harmless when it has ended."""
        with self._lock:
            known = self._journal.pop(request_id, None)
        if known:
            self._command(lambda: self._cancelled(request_id))

    def failure(self) -> str | None:
        """Why the engine will not come back, or None."""
        if self._broken:
            return self._broken
        try:
            return self._failed_file.read_text().strip() if self._failed_file else None
        except FileNotFoundError:
            return None

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last answered; infinite before the first time."""
        return time.monotonic() - self._last_answer if self._last_answer else float("inf")

    @property
    def num_open(self) -> int:
        return len(self._journal)

    def close(self) -> None:
        """Ends every open request with an error and stops the thread."""
        with self._lock:
            self._closing = True
        self._command(lambda: None)
        self._thread.join()
        with self._lock:
            while self._pipe:
                os.close(self._pipe.pop())

    # The thread

    def _run(self) -> None:
        context = zmq.Context()
        error = EngineUnavailable("the server is stopping")
        try:
            self._connect(context)
            self._serve()
        except Exception:  # a bug of ours must not leave anybody waiting
            self._broken = "internal error: the way to the engine is broken"
            log.exception(self._broken)
            error = EngineUnavailable(self._broken)
        finally:
            with self._lock:
                self._closing = True
            self._end_all(error)
            context.destroy(linger=0)

    def _connect(self, context: zmq.Context) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 200  # ms
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a full queue would drop tokens or block
        self._socket.immediate = 1  # without an engine nothing queues up for the next one
        self._socket.connect(messages.endpoint_to(self._address))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pipe[0], zmq.POLLIN)
        while not self._closing:
            self._heartbeat()
            ready = dict(poller.poll(PING_INTERVAL_S * 1000))
            if self._pipe[0] in ready:
                os.read(self._pipe[0], 4096)
            while self._commands:
                self._commands.popleft()()
            if self._socket in ready:
                self._receive()

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._last_ping < PING_INTERVAL_S:
            return
        self._last_ping = now
        self._send(messages.PING)
        if self._journal and (reason := self.failure()):
            self._end_all(EngineUnavailable(reason))

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                kind, fields = messages.unpack(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._last_answer = time.monotonic()
            if kind == messages.PONG:
                self.stats = fields[1]
                if fields[0] != self._epoch:
                    self._meet(fields[0])
            elif fields[0] == self._epoch:
                if kind == messages.TOKENS:
                    for update in fields[1]:
                        self._token(*update)
                elif kind == messages.REFUSED:
                    self._refused(*fields[1:])

    def _meet(self, epoch: str) -> None:
        """A new engine process, or a new connection to the same: submit everything that is open."""
        is_first = self._epoch is None
        is_restart = not is_first and epoch.partition("/")[0] != self._epoch.partition("/")[0]
        if not is_first:
            why = "the engine has been restarted" if is_restart else "the connection to the engine was lost"
            log.warning("%s, replaying %d requests", why, len(self._journal))
        if is_restart:
            self.num_restarts += 1
            if culprit := self._trials.note_crash():
                log.error("%s has crashed the engine twice in a row, it is not replayed", culprit)
                self._refused(culprit, RequestError.kind, "the engine crashes whenever it computes this request")
        self._epoch = epoch
        with self._lock:
            entries = dict(self._journal)
        for entry in entries.values():
            entry.replay |= entry.submitted
            entry.submitted = False
        if is_restart:
            self._trials.begin(entries)
        else:
            self._trials.call_off()
            for request_id in entries:
                self._submit(request_id)

    def _submit(self, request_id: str) -> bool:
        """False when it was cancelled meanwhile. Before there is an engine nothing is sent: its first answer will."""
        entry = self._journal.get(request_id)
        if entry is None:
            return False
        if self._epoch is None or entry.submitted:
            return True
        entry.submitted = True
        sampling = messages.pack_sampling(entry.sampling)
        self._send(messages.SUBMIT, self._epoch, request_id, entry.token_ids, entry.prompt_len, sampling, entry.replay)
        return True

    def _cancelled(self, request_id: str) -> None:
        if self._epoch:
            self._send(messages.CANCEL, self._epoch, request_id)
        self._trials.acquit(request_id)

    def _token(self, request_id: str, token_id: int, logprobs: Any, finish_reason: str | None) -> None:
        with self._lock:
            entry = self._journal.get(request_id)
            if entry is None:
                return  # cancelled, the engine does not know yet
            entry.token_ids.append(token_id)
            if finish_reason:
                del self._journal[request_id]
        entry.listener.token(token_id, messages.unpack_logprobs(logprobs), finish_reason)
        self._trials.acquit(request_id)

    def _refused(self, request_id: str, kind: str, text: str) -> None:
        with self._lock:
            entry = self._journal.pop(request_id, None)
        if entry:
            entry.listener.ended(error_of(kind, text))
        self._trials.acquit(request_id)

    def _end_all(self, error: RequestError) -> None:
        with self._lock:
            entries = list(self._journal.values())
            self._journal.clear()
        for entry in entries:
            entry.listener.ended(error)

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._pipe:
                return
            self._commands.append(command)
            try:
                os.write(self._pipe[1], b"!")
            except BlockingIOError:
                pass  # the pipe is full of wake-ups already

    def _send(self, kind: str, *fields: Any) -> None:
        try:
            self._socket.send(messages.pack(kind, *fields), zmq.NOBLOCK)
        except zmq.Again:
            pass  # there is no engine; the next one is told all that is open
