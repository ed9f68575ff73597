"""Running workers and the fork server: starts, replies and exits. A fork server that has ended is restarted."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from itertools import count

from engine.errors import SetupError
from engine.grammars.fork_server import Setup
from engine.grammars.matcher import CompiledGrammar
from engine.grammars.processes import Exit, ForkServerProcess, SharedRows, WorkerProcess

log = logging.getLogger(__name__)

HUNG_S = 10.0  # without a reply until a worker counts as stopped
KILL_S = 2.0  # until one that is killed has ended, or its fork server hangs


class Workers:
    """All running worker processes. `on_exit` is called with a grammar that has lost its worker, and the exit if it is
    known."""

    def __init__(self, setup: Setup, rows: SharedRows, on_exit: Callable[[CompiledGrammar, Exit | None], None]):
        self._setup, self._rows, self._on_exit = setup, rows, on_exit
        self._server: ForkServerProcess | None = None
        self._epoll = select.epoll()
        self._ids = count()
        self._by_id: dict[int, CompiledGrammar] = {}
        self._by_fd: dict[int, CompiledGrammar] = {}
        self._ending: dict[int, WorkerProcess] = {}  # forgotten, but their exits have not been received

    @property
    def is_busy(self) -> bool:
        """Return whether a reply is pending."""
        return any(grammar.process.num_pending for grammar in self._by_id.values() if grammar.process)

    def load(self) -> None:
        """Start the fork server, if it does not run."""
        if self._server is None:
            self._server = ForkServerProcess(self._setup, self._rows.fd)
            self._epoll.register(self._server.fileno(), select.EPOLLIN)

    def wait_until_loaded(self) -> None:
        """Raise SetupError if the fork server cannot load the vocabulary."""
        self.load()
        assert self._server
        try:
            self._server.wait_until_loaded()
        except EOFError:
            raise SetupError("the fork server of grammars has ended while it loaded the vocabulary") from None

    def start(self, grammar: CompiledGrammar) -> None:
        """Give the grammar a worker, which may be lost soon."""
        self.load()
        assert self._server and grammar.process is None
        worker_id = next(self._ids)
        try:
            grammar.process = self._server.start_worker(worker_id)
        except OSError as error:
            log.error("the fork server of grammars has ended: %s", error)
            self._lose_server()
            return self.start(grammar)
        self._by_id[worker_id] = self._by_fd[grammar.process.fileno()] = grammar
        self._epoll.register(grammar.process.fileno(), select.EPOLLIN)
        return None

    def stop(self, grammar: CompiledGrammar) -> None:
        """End the worker, which nothing needs any more."""
        if grammar.process and self._server:
            self._server.kill_worker(grammar.process.worker_id)
            self._forget(grammar)

    def receive(self, timeout_s: float) -> None:
        """Take replies and exits, or wait for one."""
        for fd, _ in self._epoll.poll(max(timeout_s, 0)):
            if self._server and fd == self._server.fileno():
                self._take_exits()
            elif (grammar := self._by_fd.get(fd)) and grammar.process and not grammar.process.receive():
                self._epoll.unregister(fd)  # its exit follows
                del self._by_fd[fd]
                if self._server:
                    self._server.kill_worker(grammar.process.worker_id)

    def end_hung(self, limit_s_of: Callable[[CompiledGrammar], float]) -> None:
        """Kill workers that do not reply, and the fork server if it does not notice."""
        now = time.monotonic()
        for worker_id, grammar in list(self._by_id.items()):
            process = grammar.process
            if not (self._server and self._server.loaded_at and process and process.num_pending):
                continue
            silent_s = now - max(process.asked_at, self._server.loaded_at)
            if (over_s := silent_s - limit_s_of(grammar)) > 0:
                grammar.is_overdue = True
                self._server.kill_worker(worker_id)
                if over_s > KILL_S:
                    log.error("the fork server of grammars hangs, it is started again")
                    return self._lose_server()
        return None

    def close(self) -> None:
        """End all processes."""
        for grammar in list(self._by_id.values()):
            self._forget(grammar)
        if self._server:
            self._epoll.unregister(self._server.fileno())
            self._server.close()
            self._server = None
        for process in self._ending.values():
            process.ended()
        self._ending.clear()

    def _take_exits(self) -> None:
        assert self._server
        try:
            exits = self._server.exits()
        except (EOFError, OSError, SetupError) as error:
            log.error("the fork server of grammars has ended: %s", error)
            return self._lose_server()
        for each in exits:
            if grammar := self._by_id.get(each.worker_id):
                self._lose(grammar, each)
            if process := self._ending.pop(each.worker_id, None):
                process.ended()
        return None

    def _lose_server(self) -> None:
        lost = list(self._by_id.values())
        for grammar in lost:
            self._forget(grammar)
        self.close()
        for grammar in lost:
            grammar.is_overdue = False
            self._on_exit(grammar, None)

    def _lose(self, grammar: CompiledGrammar, exit_: Exit) -> None:
        while grammar.process and grammar.process.has_reply() and grammar.process.receive():
            pass
        self._forget(grammar)
        self._on_exit(grammar, exit_)

    def _forget(self, grammar: CompiledGrammar) -> None:
        process, grammar.process = grammar.process, None
        if process is None:
            return
        del self._by_id[process.worker_id]
        if self._by_fd.pop(process.fileno(), None):
            self._epoll.unregister(process.fileno())
        process.close()
        self._ending[process.worker_id] = process
