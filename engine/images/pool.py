"""Pool of worker processes that decode and resize images. Each image has limits of time and memory; a worker that
exceeds them, or crashes, costs only its own request."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgpack

from engine.errors import EngineUnavailable
from engine.images.processor import ImageError
from engine.images.worker import ImageSetup

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0  # until a process has loaded its code, which takes 0.15 s on an idle machine
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
# Memory of an image is used again for the next one. Getting it from the system takes as long as decoding.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "PILLOW_BLOCKS_MAX": "8",  # of 16 MiB
}


class PreparedImage(NamedTuple):
    """A decoded and resized image, as `PromptSpan` has it."""

    grid: tuple[int, int, int]
    content_hash: bytes
    pixels: bytes  # u8 [height, width, 3]

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


class ImageWorkerPool:
    """Pool of at most `size` worker processes, which start with the first images. Thread-safe: a thread that finds all
    workers busy waits for one."""

    def __init__(self, setup: ImageSetup, size: int):
        self._setup = setup
        self._is_closed = False
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: one that is not started
        for _ in range(size):
            self._free.put(None)

    def prepare(self, data: bytes, limits: tuple[int | None, int | None] = (None, None)) -> PreparedImage:
        """Return the image in a file; `limits` are the least and the most pixels after resizing, None for those of the
        checkpoint. Raises ImageError, whose text follows the name of the image."""
        worker = self._free.get()
        try:
            if self._is_closed:
                raise EngineUnavailable("the server is stopping")
            if worker is None or not worker.is_alive:
                worker = _Worker(self._setup)
            answer = worker.ask(data, limits)
        except ImageError:
            if worker:
                worker.close()
            worker = None
            raise
        finally:
            if worker and self._is_closed:
                worker.close()
                worker = None
            self._free.put(worker)
        if len(answer) == 1:
            raise ImageError(*answer)
        return PreparedImage(*answer)

    def close(self) -> None:
        """End the workers that are free. Those that are busy end after their image, when they are not used again."""
        self._is_closed = True
        free: list[_Worker | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                free.append(self._free.get_nowait())
        for worker in free:
            if worker:
                worker.close()
            self._free.put(None)  # for threads that wait, which see that it is closed


class _Worker:
    """One worker process and the connection to it."""

    def __init__(self, setup: ImageSetup):
        ours, theirs = socket.socketpair()
        timeout = struct.pack("ll", math.ceil(setup.timeout_s), 0)  # of a process that is stopped inside a message
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, timeout)
        with theirs:
            # The embedded interpreter of Triton's stub may not name its own binary.
            command = [sys.executable or shutil.which("python3") or "python3", "-m", "engine.images.worker"]
            env = {
                **os.environ,
                **ONE_THREAD,
                **KEEP_MEMORY,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            }
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=env
            )
        self._connection, self._timeout_s = Connection(ours.detach()), setup.timeout_s
        self._send(msgpack.packb(setup))
        if not self._connection.poll(START_S):  # does not count for the first image
            self.close()
            raise EngineUnavailable(f"a decoder of images did not start within {START_S:g} s")
        with contextlib.suppress(EOFError, OSError):  # the next call finds a process that has ended
            self._connection.recv_bytes()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, data: bytes, limits: tuple[int | None, int | None]) -> tuple:
        """Raise ImageError if the process ends or takes too long; it must not be used again then."""
        try:
            self._send(msgpack.packb(limits))
            self._send(data)
            if not self._connection.poll(self._timeout_s):
                raise ImageError(f"could not be decoded within {self._timeout_s:g} s")
            answer = msgpack.unpackb(self._connection.recv_bytes(), use_list=False)
            return answer if len(answer) == 1 else (*answer, self._connection.recv_bytes())
        except (EOFError, OSError):
            raise ImageError("could not be decoded: its decoder has ended, probably for lack of memory") from None

    def _send(self, message: bytes) -> None:
        self._connection.send_bytes(message)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
