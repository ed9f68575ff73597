"""Reads blocks of prefill instances in the background into a staging area."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

from engine.executors.block_access import FetchedBlocks, Moves
from engine.transfer import messages

POLL_S = 0.001
WITHIN_S = 5.0  # for a slot to be free, and for a read
NUM_PARTS = 8  # of the staging area: parts are read while others are copied and checked


class Staging:
    """Slots of the staging area of `device`. Used in the thread of the transfer."""

    def __init__(self, device: FetchedBlocks):
        self._device, num_slots = device, device.stage()
        self.max_blocks = num_slots // NUM_PARTS  # of a read
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(num_slots):
            self._free.put_nowait(slot)
        self._turn = asyncio.Lock()
        self._read_ids = itertools.count()

    @contextlib.asynccontextmanager
    async def fetch(self, peer: int, blocks: Sequence[int]) -> AsyncIterator[list[int]]:
        """Read blocks of a peer and give the slots where they are. Raises TimeoutError if no slots become free, and
        OSError if the read fails. Slots of a read that was given up are used again when it has failed."""
        slots: list[int] = []
        task: asyncio.Task[str] | None = None
        try:
            await messages.within(WITHIN_S, self._take(slots, len(blocks)))
            task = asyncio.create_task(self._read(peer, list(zip(blocks, slots, strict=True))))
            done, _ = await asyncio.wait({task}, timeout=WITHIN_S)
            if reason := task.result() if done else f"a read has not ended after {WITHIN_S:g} s":
                raise OSError(reason)
            yield slots
        finally:
            if task and not task.done():
                task.add_done_callback(lambda _: self._give_back(slots))
            else:
                self._give_back(slots)

    async def _take(self, slots: list[int], count: int) -> None:
        async with self._turn:  # otherwise several might wait for slots that each of them holds
            while len(slots) < count:
                slots.append(await self._free.get())

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._free.put_nowait(slot)

    async def _read(self, peer: int, moves: Moves) -> str:
        """Return an empty text when the blocks have been read, or why they have not."""
        read_id = next(self._read_ids)
        self._device.fetch(read_id, peer, moves)
        while (reason := self._device.fetched(read_id)) is None:
            await asyncio.sleep(POLL_S)
        return reason
