"""Engine side of the fork server and its workers: messages and exits, independent of grammars."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from engine.errors import SetupError
from engine.grammars.fork_server import MAX_MESSAGE, Setup

ROOT = Path(__file__).resolve().parents[2]
SOCKET_TIMEOUT_S = 1  # for a process that has been stopped in the middle of a message
OnReply = Callable[[Any], None]


class Exit(NamedTuple):
    """Exit of a worker. `status` is that of waitpid."""

    worker_id: int
    status: int
    cpu_s: float


class WorkerProcess:
    """One worker process. Messages are sent at once; replies arrive in the same order and are passed to their
    callbacks."""

    def __init__(self, worker_id: int, connection: Connection):
        self.worker_id = worker_id
        self.cpu_s = 0.0  # of all replies so far
        self.asked_at = 0.0  # when it was asked for the reply that comes next
        self.to_close: list[int] = []  # matchers that are not needed any more
        self._connection = connection
        self._pending: deque[OnReply] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def fileno(self) -> int:
        return self._connection.fileno()

    def call(self, kind: str, *arguments: Any, on_reply: OnReply) -> None:
        """Send a message; a process that cannot take it is about to be found dead."""
        closed, self.to_close = self.to_close, []
        if not self._pending:
            self.asked_at = time.monotonic()
        self._pending.append(on_reply)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(msgpack.packb((kind, closed, *arguments)))

    def receive(self) -> bool:
        """Take the next reply. False: there is none, as the process has ended or has stopped in the middle of it."""
        try:
            result, cpu_s = msgpack.unpackb(self._connection.recv_bytes(), use_list=False)
        except (EOFError, OSError):
            return False
        self.cpu_s += cpu_s
        self.asked_at = time.monotonic()
        self._pending.popleft()(result)
        return True

    def has_reply(self) -> bool:
        return self._connection.poll()

    def close(self) -> None:
        """Let it end. Calls stay pending until it has, because it may still write masks."""
        self._connection.close()

    def ended(self) -> None:
        """Forget the pending calls of a process that has ended."""
        self._pending.clear()


class ForkServerProcess:
    """The fork server process: starts it, requests workers, and receives their exits."""

    def __init__(self, setup: Setup, rows_fd: int):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = (theirs.fileno(), rows_fd)
            command = [sys.executable, "-m", "engine.grammars.fork_server", *map(str, fds)]
            # One arena: those of more would count for the limit of a worker's memory.
            env = {**os.environ, "MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=env)
        self._control.send(pickle.dumps(setup))
        self.loaded_at = 0.0  # 0: the vocabulary is not there yet

    def fileno(self) -> int:
        return self._control.fileno()

    def wait_until_loaded(self) -> None:
        """Raise SetupError if it cannot load the vocabulary."""
        if not self.loaded_at:
            self._heard(self._control.recv(MAX_MESSAGE))

    def start_worker(self, worker_id: int) -> WorkerProcess:
        """Raise OSError when the fork server has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            timeout = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, timeout)
            worker = WorkerProcess(worker_id, Connection(ours.detach()))
            socket.send_fds(self._control, [msgpack.packb(("fork", worker_id))], [theirs.fileno()])
        return worker

    def kill_worker(self, worker_id: int) -> None:
        with contextlib.suppress(OSError):  # then it has ended with the fork server
            self._control.send(msgpack.packb(("kill", worker_id)))

    def exits(self) -> list[Exit]:
        """Return what has ended since the last call. Raise EOFError when the fork server itself has, SetupError when it
        cannot load the vocabulary."""
        found: list[Exit] = []
        while select.select([self._control], [], [], 0)[0]:
            if heard := self._heard(self._control.recv(MAX_MESSAGE)):
                found.append(heard)
        return found

    def close(self) -> None:
        """End it and its workers."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _heard(self, message: bytes) -> Exit | None:
        if not message:
            raise EOFError("its connection is closed")
        kind, *fields = msgpack.unpackb(message)
        if kind == "failed":
            raise SetupError(*fields)
        if kind == "exited":
            return Exit(*fields)
        self.loaded_at = time.monotonic()
        return None


class SharedRows:
    """Shared memory with the rows of masks that workers write. A late worker may still write its rows when the next
    step needs some; these then begin behind the late ones."""

    def __init__(self, num_rows: int, vocab_size: int):
        num_words = -(-vocab_size // 32)
        self.fd = os.memfd_create("masks")
        os.ftruncate(self.fd, 4 * max(num_rows * num_words, 1))
        self.num_words = num_words
        self._rows = np.frombuffer(mmap.mmap(self.fd, 0), np.uint32).reshape(-1, num_words)

    def take(self, num_rows: int, first: int) -> np.ndarray | None:
        """Return `num_rows` rows from `first` on, u32 [num_rows, num_words], or None if there are not as many."""
        end = first + num_rows
        return self._rows[first:end] if end <= len(self._rows) else None

    def close(self) -> None:
        os.close(self.fd)
