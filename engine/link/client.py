"""Client of the engine process: submit, cancel, and a listener per answer.

A crash of the engine is transparent: when a new engine process answers, all open answers of the journal are submitted
again with the tokens that they already have, and continue with the same tokens as without the crash, because sampling
is greedy or seeded. A request that crashes every engine is found (`engine.link.crash_search`) and ended with an error.
With several engines (`engine.link.engine_set`) the answers of a lost one are moved to the others.

One thread owns the socket. It calls the listeners, which must not block. If it fails, the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from engine.errors import EngineUnavailable, RequestError, as_request_error, error_of
from engine.link import messages
from engine.link.crash_search import CrashSearch
from engine.link.journal import Journal, JournalEntry

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.25
MAX_GAP_S = 1.0  # upper bound for the silence counted between two polls of the socket
MAX_SILENCE_S = 2.0  # a ready engine answers four pings per second, also while it computes
MAX_RECEIVED = 50  # messages per turn, so that a fast engine cannot delay pings and commands


class EngineClient:
    """Connection to the engine process at `address`. The supervisor writes `failed_file` when it gives the engine up;
    its text is the reason. `suspect_file` informs the supervisor of a request that is computed alone. `on_lost` is
    called when the engine has been restarted or given up, before its open answers are submitted again or ended."""

    def __init__(
        self,
        address: str,
        failed_file: Path | None = None,
        suspect_file: Path | None = None,
        on_lost: Callable[[EngineClient], None] = lambda client: None,
    ):
        self.stats: dict[str, Any] = {}  # statistics of the engine, from its last pong
        self.num_restarts = 0  # engine processes seen after the first
        self.silent_s = math.inf  # since the last message; pauses of this process do not count
        self._address = address
        self._failed_file, self._suspect_file = failed_file, suspect_file
        self._on_lost = on_lost
        self.journal = Journal()
        self._lock = threading.Lock()  # of the commands
        self._commands: deque[Callable[[], None]] = deque()
        self._pipe = list(os.pipe())  # wakes the thread; empty once closed
        os.set_blocking(self._pipe[1], False)
        self._epoch: str | None = None
        self._last_look = time.monotonic()
        self._last_ping = 0.0
        self._closing = False
        self._crash_search = CrashSearch(self._submit, self._note_suspect)
        self._note_suspect(None)  # of a process before this one
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # Called from any thread

    def submit(self, entry: JournalEntry) -> None:
        """Submit a prompt, which is computed once for all of its answers. Raises EngineUnavailable if the engine has
        been given up or the client is closed."""
        if reason := self.failure():
            raise EngineUnavailable(reason)
        self.add(entry)

    def add(self, entry: JournalEntry) -> None:
        """Submit an entry with the tokens that its answers have so far, even if the engine has been given up. Raises
        EngineUnavailable if the client is closed."""
        with self._lock:
            if self._closing:
                raise EngineUnavailable("the server is stopping")
            self.journal.open(entry)
        self._command(lambda: self._crash_search.add(entry.name))

    def cancel(self, request_id: str, is_complete: bool = False) -> None:
        """Cancel an answer; its listener is not called any more. Has no effect if it has ended. `is_complete` states
        that the answer is complete, so that its tokens do not count as wasted."""
        if found := self.journal.remove(request_id):
            self._command(lambda: self._cancelled(found[0], request_id, is_complete))

    def expire(self, request_id: str, error: RequestError) -> None:
        """End an answer with `error` if it is still waiting, which the engine decides."""
        fields = (error.kind, error.text, error.cause)
        self._command(lambda: self._send(messages.EXPIRE, self._epoch, request_id, *fields) if self._epoch else None)

    def failure(self) -> str | None:
        """Return the reason why the supervisor has given the engine up, or None."""
        try:
            return self._failed_file.read_text().strip() if self._failed_file else None
        except FileNotFoundError:
            return None

    @property
    def is_up(self) -> bool:
        """Return whether the engine answers and takes requests."""
        return self.silent_s <= MAX_SILENCE_S and messages.STARTING not in self.stats and not self.failure()

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Return the clients of all engines: this one."""
        return (self,)

    @property
    def num_open(self) -> int:
        return len(self.journal)

    def close(self) -> None:
        """End every open request with an error and stop the thread."""
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
        try:
            self.connect(context)
            self._serve()
        except Exception:  # a bug must not leave clients waiting: the supervisor restarts this process
            log.exception("the connection to the engine has failed, this process ends")
            logging.shutdown()
            os._exit(1)
        self._end_all(EngineUnavailable("the server is stopping"))
        context.destroy(linger=0)

    def connect(self, context: zmq.Context) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 200  # ms
        self._socket.sndhwm = self._socket.rcvhwm = 0  # a full queue would drop tokens or block
        self._socket.immediate = 1  # without an engine nothing queues up for the next one
        self._socket.connect(self._address)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pipe[0], zmq.POLLIN)
        while not self._closing:
            if self._pipe[0] in dict(poller.poll(int(PING_INTERVAL_S * 1000))):
                os.read(self._pipe[0], 4096)
            self.turn()

    def turn(self) -> None:
        """Send pings, run commands and receive messages, without waiting."""
        self._heartbeat()
        while self._commands:
            self._commands.popleft()()
        self._receive()

    def _heartbeat(self) -> None:
        now = time.monotonic()
        self.silent_s += min(now - self._last_look, MAX_GAP_S)
        self._last_look = now
        if now - self._last_ping < PING_INTERVAL_S:
            return
        self._last_ping = now
        self._send(messages.PING)
        if self.journal and (reason := self.failure()):
            self._on_lost(self)
            self._end_all(EngineUnavailable(reason))

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                kind, fields = messages.unpack(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.silent_s = 0.0
            if kind == messages.PONG:
                self._pong(*fields)
            elif fields[0] == self._epoch:
                if kind == messages.TOKENS:
                    for update in fields[1]:
                        self._tokens(update)
                elif kind == messages.COMPILING:
                    self._crash_search.survived(self.journal.name_of(fields[1]))  # what compiles it is another process
                elif kind == messages.REFUSED:
                    request_id, error_kind, text, cause = fields[1:]
                    self._refused(request_id, error_of(error_kind, text, **cause))

    def _pong(self, epoch: str, stats: dict[str, Any]) -> None:
        if epoch != self._epoch:
            self._replay_to(epoch)
        self.stats = stats
        if messages.STARTING not in stats:
            self._crash_search.begin()

    def _replay_to(self, epoch: str) -> None:
        """Submit all open answers to a new engine process, or over a new connection to the same process."""
        before = self._epoch
        is_restart = before is not None and epoch.partition("/")[0] != before.partition("/")[0]
        if before is not None:
            why = "the engine has been restarted" if is_restart else "the connection to the engine was lost"
            log.warning("%s, replaying %d requests", why, len(self.journal))
        if is_restart:
            self.num_restarts += 1
            if culprit := self._crash_search.note_crash():
                log.error("%s has crashed the engine twice in a row, it is not replayed", culprit)
                for submission in self.journal.find(culprit)[1]:
                    error = RequestError("the engine crashes whenever it computes this request")
                    self._refused(submission.request_id, error)
            self._on_lost(self)
        self._epoch = epoch
        entries = self.journal.entries()
        for entry in entries.values():
            entry.replay |= entry.submitted
            entry.submitted = False
        if is_restart:
            self._crash_search.hold(sorted(entries, key=lambda name: entries[name].has_grammar))  # these take longer
        else:
            self._crash_search.call_off()
            for name in entries:
                self._submit(name)

    def _submit(self, name: str) -> bool:
        """Submit an entry. Return False if it is over. Without an engine nothing is sent; its first pong triggers the
        submission."""
        entry, submissions = self.journal.find(name)
        if entry is None:
            return False
        if self._epoch is None or entry.submitted:
            return True
        entry.submitted = True
        answers = [(each.request_id, messages.pack_sampling(each.sampling), each.token_ids) for each in submissions]
        spans = messages.pack_spans(entry.spans)
        fields = (entry.prompt_ids, answers, entry.replay, entry.salt, entry.queue_position, spans, entry.cached_at)
        try:
            self._send(messages.SUBMIT, self._epoch, *fields)
        except Exception as error:  # it cannot be packed, which is a bug and must not affect other requests
            log.exception("a request could not be submitted")
            for each in submissions:
                self._refused(each.request_id, as_request_error(error))
            return False
        return True

    def _note_suspect(self, name: str | None) -> None:
        """Tell the supervisor to which grammar, or request without one, a crash would be attributed."""
        if self._suspect_file is None:
            return
        _, submissions = self.journal.find(name) if name else (None, [])
        with contextlib.suppress(OSError):  # a full disk: the crash counts as one that is not attributed
            self._suspect_file.unlink(missing_ok=True)
            if submissions:
                blamed = "".join(submissions[0].sampling.structured_output) or submissions[0].request_id
                self._suspect_file.write_text(hashlib.sha256(blamed.encode()).hexdigest())

    def _cancelled(self, entry: JournalEntry, request_id: str, is_complete: bool) -> None:
        if self._epoch:
            self._send(messages.CANCEL, self._epoch, request_id, is_complete)
        if not entry.answers:
            self._crash_search.survived(entry.name)

    def _tokens(self, update: Sequence[Any]) -> None:
        request_id, token_ids, logprobs, finish_reason, outputs = update
        found = self.journal.enter(request_id, token_ids, is_end=finish_reason is not None)
        if found is None:
            return  # cancelled, the engine does not know yet
        entry, submission = found
        if outputs:
            submission.listener.prompt_outputs(messages.unpack_prompt_outputs(outputs))
        submission.listener.tokens(token_ids, messages.unpack_logprobs(logprobs), finish_reason)
        self._crash_search.survived(entry.name)

    def _refused(self, request_id: str, error: RequestError) -> None:
        if found := self.journal.remove(request_id):
            entry, submission = found
            submission.listener.ended(error)
            if not entry.answers:
                self._crash_search.survived(entry.name)

    def _end_all(self, error: RequestError) -> None:
        for submission in self.journal.remove_all():
            submission.listener.ended(error)

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
            pass  # there is no engine; the next one gets all open answers
