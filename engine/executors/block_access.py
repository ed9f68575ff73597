"""Interfaces to blocks of the KV cache, which are read and written beside the steps, by this process or by others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Moves = Sequence[tuple[int, int]]  # block to read and block to write
STAGED = -1  # in place of a peer: the staging area of `FetchedBlocks`
# Number of blocks, and for each layer the handle of an allocation and the offset of its cache in it. With NIXL:
# metadata of the agent and index of the device, and then for each layer an empty text and the address of its cache
SharedCaches = tuple[int, Sequence[tuple[bytes, int]]]


class BlockAccess(Protocol):
    """Blocks that can be read and written in another thread while steps run. `read_block` is for blocks that no step
    writes, `write_block` for those that no step uses."""

    @property
    def num_steps(self) -> int:
        """Return how many steps have ended on this rank, or always 0 if nothing depends on it."""
        ...

    def read_block(self, block: int) -> bytes:
        """Return the content of a block, that of all ranks one after another."""
        ...

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        """Overwrite a block with what `read_block` has returned elsewhere."""
        ...


class DeviceBlocks(BlockAccess, Protocol):
    """Blocks in the memory of GPUs, which other processes of the same host can copy from there. A list has an item for
    each rank. `peer` is a number that the caller gives the caches of another process."""

    def share(self) -> list[SharedCaches]:
        """Return how another process can open the caches. Raises OSError if the device does not support that."""
        ...

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the digest of the content of each block."""
        ...

    def open(self, peer: int, shared: Sequence[SharedCaches]) -> None:
        """Open what `share` has returned in another process. Raises OSError or ValueError if that is not possible."""
        ...

    def close(self, peer: int) -> None:
        """Close the caches of another process, which frees them if it has ended."""
        ...

    def copy(self, peer: int, moves: Moves) -> list[bytes]:
        """Copy blocks of another process to blocks here and return the digests of what was read. Raises ValueError for
        a block that the other process does not have."""
        ...


class FetchedBlocks(DeviceBlocks, Protocol):
    """Blocks that other processes read over a network. A read is in the background and ends in slots of a staging area,
    from which `copy` takes them as from the peer STAGED."""

    def stage(self) -> int:
        """Allocate the staging area and return its number of slots. Raises OSError."""
        ...

    def fetch(self, read_id: int, peer: int, moves: Moves) -> None:
        """Begin to read blocks of another process to slots here. `read_id` identifies this read."""
        ...

    def fetched(self, read_id: int) -> str | None:
        """Return None while a read has not ended, then once why it has failed, and otherwise an empty text."""
        ...
