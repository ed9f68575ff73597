"""Blocks of the KV cache on all ranks of a host, which are read and written beside the steps: each rank has a thread
and a connection for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine.executors.block_access import BlockAccess, Moves, SharedCaches


class BlocksOfRanks:
    """Access to the blocks of all ranks (see `FetchedBlocks`; device and KV_TRANSFER decide which of it there is).
    `first` is the rank of this process."""

    def __init__(self, first: BlockAccess, others: Sequence[Connection]):
        self._first, self._others = first, others
        self._reasons: dict[int, list[str | None]] = {}  # what `fetched` has returned on each rank, by the ids of reads

    @property
    def num_steps(self) -> int:
        return self._first.num_steps

    def read_block(self, block: int) -> bytes:
        return b"".join(self._call("read_block", lambda rank: (block,), self._first.num_steps))

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """See `BlockAccess`. All ranks have written on return."""
        size = len(content) // (1 + len(self._others))
        self._call("write_block", lambda rank: (block, bytes(content[rank * size : (rank + 1) * size])))

    def share(self) -> list[SharedCaches]:
        return [shared for [shared] in self._call("share", lambda rank: ())]

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        results = self._call("digests", lambda rank: (blocks,), self._first.num_steps)
        return list(map(b"".join, zip(*results, strict=True)))

    def open(self, peer: int, shared: Sequence[SharedCaches]) -> None:
        if len(shared) != 1 + len(self._others):
            raise ValueError(f"{len(shared)} ranks have shared their caches, here are {1 + len(self._others)}")
        try:
            self._call("open", lambda rank: (peer, [shared[rank]]))
        except Exception:
            self.close(peer)  # on the ranks that have opened it
            raise

    def close(self, peer: int) -> None:
        self._call("close", lambda rank: (peer,))

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        return list(map(b"".join, zip(*self._call("copy", lambda rank: (peer, moves)), strict=True)))

    def stage(self) -> int:
        return min(self._call("stage", lambda rank: ()))

    def fetch(self, read_id: int, peer: int, moves: Moves) -> None:
        self._reasons[read_id] = [None] * (1 + len(self._others))
        self._call("fetch", lambda rank: (read_id, peer, moves))

    def fetched(self, read_id: int) -> str | None:
        reasons = self._reasons[read_id]
        for rank, found in enumerate(self._call("fetched", lambda rank: (read_id,))):
            reasons[rank] = found if reasons[rank] is None else reasons[rank]
        if None in reasons:
            return None
        return next(filter(None, self._reasons.pop(read_id)), "")

    def _call(self, name: str, arguments: Callable[[int], tuple[Any, ...]], num_steps: int = 0) -> list[Any]:
        """Call a method with `arguments(rank)` on every rank and return the results. Raises what a rank has raised."""
        for rank, other in enumerate(self._others, 1):
            other.send((name, arguments(rank), num_steps))
        results = [_result(self._first, name, arguments(0))]
        results += [other.recv() for other in self._others]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def serve_blocks(first: Connection, access_of: Callable[[], BlockAccess]) -> None:
    """Read and write blocks for the first rank in a thread, until the connection ends. `access_of` is called when the
    first request arrives."""

    def serve() -> None:
        access: BlockAccess | None = None
        while True:
            try:
                name, arguments, num_steps = first.recv()
            except (EOFError, OSError):
                return
            access = access or access_of()
            while access.num_steps < num_steps:  # the first rank may end a step a little earlier than this one
                time.sleep(1e-4)
            first.send(_result(access, name, arguments))

    threading.Thread(target=serve, name="blocks", daemon=True).start()


def _result(access: BlockAccess, name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a method, or the error that it has raised."""
    try:
        return getattr(access, name)(*arguments)
    except (OSError, ValueError) as error:
        return error
