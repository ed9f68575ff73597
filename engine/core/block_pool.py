"""Block pool of the KV cache: counts the holders of each block and finds full blocks by their hashes. It handles block
ids and keys only and is independent of tensors and requests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from engine.core.host_blocks import HostBlocks
from engine.core.prefix_lru import PrefixLRU
from engine.core.types import Swaps


class OutOfBlocks(Exception):
    """There are fewer available blocks than needed. The scheduler handles this by preemption."""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block: of its tokens and the hash of the block before it. Equal hashes mean equal
    prefixes."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


def root_hash(salt: str, adapter_id: str = "") -> bytes:
    """Return the parent hash of a first block. No block hash is equal to it, whatever the salt."""
    key = b""
    for text, kind in ((salt, b"salt"), (adapter_id, b"adapter")):
        if text:
            text_bytes = text.encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(key + text_bytes, digest_size=16, person=kind).digest()
    return key


class BlockPool:
    """Every block is in exactly one of three states: held by one or more requests; cached, which means that it is held
    by none, but can be found by its key until it is evicted; or free. If there are `num_host_blocks`, an evicted block
    is swapped out to the host, where its key can still be found."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True, num_host_blocks: int = 0):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, lowest id first
        self._holders: dict[int, int] = {}  # block -> number of requests that hold it, at least 1
        self._cached: PrefixLRU[int, None] = PrefixLRU()
        self._spare: PrefixLRU[int, None] = PrefixLRU()  # cached blocks that are evicted before all others
        self._becomes_spare: set[int] = set()  # held blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._host = HostBlocks(num_host_blocks) if num_host_blocks else None

    @property
    def num_available(self) -> int:
        """Return the number of free and cached blocks."""
        return len(self._free) + len(self._spare) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Return the number of blocks that requests hold."""
        return self.num_blocks - self.num_available

    @property
    def num_swap_ins(self) -> int:
        """Return the number of blocks that are swapped in before the next step."""
        return self._host.num_swap_ins if self._host else 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block with this key can be found, here or on the host."""
        return key in self._block_of or bool(self._host and key in self._host)

    def is_on_device(self, key: bytes) -> bool:
        """Return whether the block with this key can be found in the cache itself."""
        return key in self._block_of

    def awaits_swap_in(self, key: bytes) -> bool:
        """Return whether the block with this key is swapped in before the next step. It cannot be copied until then."""
        return self._host is not None and self._host.awaits_swap_in(self._block_of.get(key))

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` can be found."""
        for count, key in enumerate(keys):
            if key not in self:
                return count
        return len(keys)

    def num_held_of(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of `keys` are held by requests, so that taking them needs no available block."""
        return sum(self._block_of.get(key) in self._holders for key in keys)

    def take(self, count: int, prefix: Sequence[bytes] = ()) -> list[int]:
        """Return the blocks of `prefix`, keys which `find` has found, and `count` new ones. The caller holds them all.

        Raises OutOfBlocks and changes nothing if fewer are available.
        """
        shared = [self._block_of[key] for key in prefix if key in self._block_of]
        available = self.num_available - sum(block in self._cached or block in self._spare for block in shared)
        need = count + len(prefix) - len(shared)
        if need > available:
            raise OutOfBlocks(f"need {need} blocks, {available} of {self.num_blocks} are available")
        for block in shared:
            self._cached.pop(block, None)
            self._spare.pop(block, None)
            self._becomes_spare.discard(block)
            self._holders[block] = self._holders.get(block, 0) + 1
        if len(shared) < len(prefix):
            self._swap_in([key for key in prefix if key not in self._block_of])
            shared = [self._block_of[key] for key in prefix]
        return shared + [self._take_one() for _ in range(count)]

    def _swap_in(self, keys: Sequence[bytes]) -> None:
        """Swap the blocks of `keys` in from the host, into new blocks."""
        assert self._host
        self._host.protect(keys)
        for key in keys:
            block = self._take_one()
            self._block_of[key], self._key_of[block] = block, key
            self._host.swap_in(key, block)

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = (self._spare or self._cached).evict()
            key = self._key_of.pop(block)
            del self._block_of[key]
            if self._host:
                self._host.swap_out(key, block)
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each of `blocks`, which are held already."""
        for block in blocks:
            self._holders[block] += 1

    def is_shared(self, block: int) -> bool:
        """Return whether several requests hold the block."""
        return self._holders[block] > 1

    def is_published(self, block: int) -> bool:
        """Return whether the block can be found by its key, so that its content must not change."""
        return block in self._key_of

    def publish(self, block: int, key: bytes, is_spare: bool = False) -> None:
        """Make the held `block`, which is full and computed, findable by `key`, unless another block has this key.
        `is_spare`: it is evicted before all others until it has been found once."""
        assert block in self._holders, f"block {block} is published but not held"
        if self.caching and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if is_spare:
                self._becomes_spare.add(block)

    def unpublish(self, block: int) -> None:
        """Make the held `block` unfindable, so that it may change. A copy on the host can still be found."""
        del self._block_of[self._key_of.pop(block)]

    def discard(self, key: bytes) -> None:
        """Make the block with this key, if there is one, and its copy on the host unfindable."""
        block = self._block_of.pop(key, None)
        if block is not None:
            del self._key_of[block]
            for cached in (self._cached, self._spare):
                if block in cached:
                    del cached[block]
                    self._free.append(block)
        if self._host:
            self._host.discard(key)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release consecutive `blocks` of a request. Those that no other request holds are free or cached."""
        cached = []
        for block in reversed(blocks):
            self._holders[block] -= 1  # a KeyError here is a double free
            if self._holders[block]:
                continue
            del self._holders[block]
            if block not in self._key_of:
                self._free.append(block)
            elif block in self._becomes_spare:
                self._spare.put([(block, None)])
            else:
                cached.append((block, None))
            self._becomes_spare.discard(block)
        self._cached.put(cached[::-1])

    def take_swaps(self) -> Swaps | None:
        """Return the swaps that the next step starts with, or None."""
        return self._host.take_swaps() if self._host else None

    def check(self) -> None:
        """Check that every block is in exactly one state. It is cheap enough to be called when the engine is idle."""
        states = [set(self._free), {*self._cached, *self._spare}, set(self._holders)]
        assert sum(map(len, states)) == len(set().union(*states)) == self.num_blocks
        assert len(self._free) == len(states[0]), "a block is free twice"
        assert all(count > 0 for count in self._holders.values()), "a held block has no holder"
        assert states[1] <= set(self._key_of), "a block without key cannot be found again"
        assert states[0].isdisjoint(self._key_of), "a free block can be found"
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        if self._host:
            self._host.check()
