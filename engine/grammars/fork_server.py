"""The fork server of grammar workers: `python -m engine.grammars.fork_server CONTROL_FD ROWS_FD`.

It loads the vocabulary once and forks a worker for each grammar, in milliseconds and with the vocabulary's memory
shared. It is a process of one thread, which a fork can copy safely. It ends with the engine, and its workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgpack
import numpy as np

from engine.errors import SetupError
from engine.grammars.vocabulary import Vocabulary
from engine.grammars.worker import Worker, limit_memory
from engine.text.tokenizer import Tokenizer

MAX_MESSAGE = 1 << 16
PR_SET_PDEATHSIG = 1


class Setup(NamedTuple):
    """The first message of the engine, pickled."""

    load_tokenizer: Callable[[], Tokenizer]
    vocab_size: int
    memory_bytes: int  # of a worker


class ForkServer:
    def __init__(self, control: socket.socket, rows_fd: int):
        self._control = control
        setup: Setup = pickle.loads(control.recv(MAX_MESSAGE))
        tokenizer = setup.load_tokenizer()
        self._memory_bytes = setup.memory_bytes
        # Without a token that ends an answer no answer can have a grammar.
        self._vocabulary = Vocabulary(tokenizer, setup.vocab_size) if tokenizer.eos_token_ids else None
        shared = mmap.mmap(rows_fd, 0)
        self._rows = np.frombuffer(shared, np.uint32).reshape(-1, -(-setup.vocab_size // 32))
        self._id_of: dict[int, int] = {}  # of workers, by their pids
        self._wake_up = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid = os.getpid()

    def run(self) -> None:
        """Serve until the engine closes the connection or ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_up[1], warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        self._send("loaded")
        poll = select.poll()
        for fd in (self._control.fileno(), self._wake_up[0]):
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._wake_up[0] in ready:
                os.read(self._wake_up[0], 4096)
                self._report_exits()
            if self._control.fileno() in ready and not self._take_message():
                return

    def _take_message(self) -> bool:
        message, fds, *_ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        if not message:
            return False
        kind, worker_id = msgpack.unpackb(message)
        if kind == "fork":
            self._fork(worker_id, fds[0])
        elif kind == "kill":
            for pid in [pid for pid, each in self._id_of.items() if each == worker_id]:
                os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, worker_id: int, connection_fd: int) -> None:
        try:
            pid = os.fork()
        except OSError:  # the machine has no process left
            self._send("exited", worker_id, int(signal.SIGKILL), 0.0)
        else:
            if pid == 0:
                self._become_worker(connection_fd)
            self._id_of[pid] = worker_id
        os.close(connection_fd)

    def _become_worker(self, connection_fd: int) -> None:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance would report its own crash
            limit_memory(self._memory_bytes)
            assert self._vocabulary
            Worker(self._vocabulary, Connection(connection_fd), self._rows).run()
        except MemoryError:
            os.abort()
        finally:
            os._exit(0)

    def _report_exits(self) -> None:
        while self._id_of:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return
            self._send("exited", self._id_of.pop(pid), status, usage.ru_utime + usage.ru_stime)

    def _send(self, *message: Any) -> None:
        self._control.send(msgpack.packb(message))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the engine decides
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        server = ForkServer(control, int(sys.argv[2]))
    except SetupError as error:
        control.send(msgpack.packb(("failed", str(error))))
    else:
        with contextlib.suppress(ConnectionError):
            server.run()


if __name__ == "__main__":
    main()
