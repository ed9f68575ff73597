"""Blocks of the KV cache on all ranks of a host, which are read and written beside the steps: each rank has a thread
and a connection for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol


class BlockAccess(Protocol):
    """Executor whose blocks can be read and written in another thread while steps run. `read_block` is for blocks that
    no step writes, `write_block` for those that no step uses."""

    @property
    def num_steps(self) -> int:
        """Return how many steps have ended on this rank."""
        ...

    def read_block(self, block: int) -> bytes:
        """Return the content of a block, that of all ranks one after another."""
        ...

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """Overwrite a block with what `read_block` has returned elsewhere."""
        ...


class BlocksOfRanks:
    """Access to the blocks of all ranks. `first` is the rank of this process."""

    def __init__(self, first: BlockAccess, others: Sequence[Connection]):
        self._first, self._others = first, others

    @property
    def num_steps(self) -> int:
        return self._first.num_steps

    def read_block(self, block: int) -> bytes:
        for other in self._others:
            other.send((block, None, self._first.num_steps))
        return self._first.read_block(block) + b"".join([other.recv_bytes() for other in self._others])

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """See `BlockAccess`. All ranks have written on return."""
        size = len(content) // (1 + len(self._others))
        for place, other in enumerate(self._others, 1):
            other.send((block, bytes(content[place * size : (place + 1) * size]), 0))
        self._first.write_block(block, content[:size])
        for other in self._others:
            other.recv_bytes()


def serve_blocks(first: Connection, executor: BlockAccess) -> None:
    """Read and write blocks for the first rank in a thread, until the connection ends."""

    def serve() -> None:
        while True:
            try:
                block, content, num_steps = first.recv()
            except (EOFError, OSError):
                return
            while executor.num_steps < num_steps:  # the first rank may end a step a little earlier than this one
                time.sleep(1e-4)
            if content is None:
                first.send_bytes(executor.read_block(block))
            else:
                executor.write_block(block, content)
                first.send_bytes(b"")

    threading.Thread(target=serve, name="blocks", daemon=True).start()
