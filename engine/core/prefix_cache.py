"""Prefix cache of one engine: finds the longest cached prefix of a prompt in all cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.block_pool import BlockPool, hash_block, root_hash
from engine.core.cache_groups import PAGED, STATE, CacheGroup
from engine.core.prefix_lru import PrefixLRU
from engine.core.prompt_logprobs import PromptLogprobCache
from engine.core.spans import hash_with_spans
from engine.core.types import Request


class Prefix(NamedTuple):
    """A prefix that every group of the model can continue."""

    num_blocks: int
    keys: Sequence[Sequence[bytes]]  # for each group, of the blocks that continuing takes: the last ones of the prefix
    num_paged: int  # blocks up to which the other groups would have had to be found
    tail_len: int = 0  # tokens in the last block if that is not full

    @property
    def all_keys(self) -> list[bytes]:
        """Return the keys of the blocks of all groups."""
        return [key for keys in self.keys for key in keys]

    def num_tokens(self, block_size: int) -> int:
        """Return how many tokens its blocks have."""
        return self.num_blocks * block_size - (block_size - self.tail_len if self.tail_len else 0)


class Tail(NamedTuple):
    """The last tokens of a prompt or an answer, behind which the state was kept. They may fill a part of a block."""

    token_ids: Sequence[int]
    min_len: int  # of these tokens, with which a prompt can continue: the state can take back the others
    spans_hash: bytes  # of the prompt spans among them
    block_hash: bytes


class PrefixCache:
    """Looks up prompts by block. A block hash covers the tokens of the block, the content of the prompt spans in it and
    everything before it; the key of a block in the pool is its hash and the group it belongs to."""

    def __init__(self, pool: BlockPool, groups: Sequence[CacheGroup]):
        self._pool, self._groups = pool, groups
        self._logprobs = PromptLogprobCache(pool.block_size)
        # Of models with states, by the hash of the block before it: the tail that was kept last.
        self._tails: PrefixLRU[bytes, Tail] = PrefixLRU()
        self._states = [index for index, group in enumerate(groups) if group.kind == STATE]

    def find(self, request: Request, with_tail: bool = True) -> Prefix:
        """Return the longest prefix of `request` whose blocks can be found in all groups. Without `with_tail` its last
        block is full."""
        pool, groups = self._pool, self._groups
        nothing = Prefix(0, [()] * len(groups), 0)
        if not pool.caching:
            return nothing
        self._find_logprobs(request)
        hashes = self.hashes(request, request.max_cached_tokens // pool.block_size)
        if with_tail and request.finds_tail and (tail_len := request.max_cached_tokens % pool.block_size):
            keys = self._all_keys(request, request.max_cached_tokens)
            if all(key in pool for each in keys for key in each):
                return Prefix(len(hashes) + 1, keys, len(hashes), tail_len)
        if len(groups) == 1 and groups[0].kind == PAGED:
            count = pool.find(hashes)
            return Prefix(count, (hashes[:count],), count)
        num_paged, count = self._find_blocks(hashes)
        if with_tail and (found := self._find_tail(request, hashes, count, num_paged)):
            return found
        return Prefix(count, self._all_keys(request, count * pool.block_size), num_paged)

    def _find_blocks(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return how many leading blocks can be found in all groups that keep every position, and in all groups."""
        num_paged = len(hashes)
        for index, group in enumerate(self._groups):
            if group.kind == PAGED:
                num_paged = self._pool.find([key_of(each, index) for each in hashes[:num_paged]])
        count, before = num_paged, -1
        while count != before:
            before = count
            for index, group in enumerate(self._groups):
                if group.kind != PAGED:
                    count = self._longest(index, hashes, count)
        return num_paged, count

    def _find_tail(self, request: Request, hashes: Sequence[bytes], count: int, num_paged: int) -> Prefix | None:
        """Return the longest prefix of at least `count` and at most `num_paged` full blocks and a part of the next one
        with which a kept state can continue."""
        size = self._pool.block_size
        for place in range(num_paged, count - 1, -1) if self._tails else ():
            tail, start = self._tails.get(hashes[place - 1] if place else _root_hash(request)), place * size
            if tail is None:
                continue
            own = request.token_ids[start : min(start + len(tail.token_ids), request.max_cached_tokens)]
            pairs = enumerate(zip(own, tail.token_ids, strict=False))
            num_equal = next((index for index, (ours, theirs) in pairs if ours != theirs), len(own))
            end = start + num_equal
            if num_equal < tail.min_len or hash_with_spans(b"", request.spans, start, end) != tail.spans_hash:
                continue
            keys = [self._keys(index, [*hashes[:place], tail.block_hash], end) for index in range(len(self._groups))]
            if all(key in self._pool for each in keys for key in each):
                return Prefix(place + 1, keys, num_paged, num_equal)
        return None

    def longest(self, request: Request) -> tuple[list[bytes], int]:
        """Return the keys of all blocks that the longest possible prefix of `request` needs, and the number of tokens
        of the longest prefix that can be found. A state of which only some blocks can be found is discarded, so that
        they are not mixed with those of another one."""
        size = self._pool.block_size
        end = request.max_cached_tokens if request.finds_tail else request.max_cached_tokens // size * size
        keys = self._all_keys(request, end)
        of_states = [key for index in self._states for key in keys[index]]
        if not all(key in self._pool for key in of_states):
            for key in of_states:
                self._pool.discard(key)
        return [key for each in keys for key in each], self.find(request).num_tokens(size)

    def publish(self, request: Request, start: int, end: int) -> None:
        """Make the full blocks `start` to `end` of `request` findable in all groups that have them."""
        hashes = self.hashes(request, end)
        for index, group in enumerate(self._groups):
            if group.kind != STATE:
                for place in range(max(start, request.cache.num_freed[index]), end):
                    self._pool.publish(request.cache.block_ids[index][place], key_of(hashes[place], index))

    def publish_tail(self, request: Request, is_spare: bool = False) -> None:
        """Make the state of `request` and its last block findable, although that may not be full. `is_spare`: that of
        the state, see `BlockPool.publish`."""
        if not self._pool.caching or not request.num_computed:
            return
        place, keys = request.num_computed // self._pool.block_size, self._all_keys(request, request.num_computed)
        if self._states:
            self._publish_states(request, [key for index in self._states for key in keys[index]], is_spare)
        for index, group in enumerate(self._groups):
            if group.kind != STATE and request.num_computed % self._pool.block_size:
                self._pool.publish(request.cache.block_ids[index][place], keys[index][-1])

    def _publish_states(self, request: Request, keys: Sequence[bytes], is_spare: bool) -> None:
        """Publish the blocks of all states. States of the same tokens may differ in what they can take back, so the
        blocks of different requests must not be mixed."""
        end = request.num_computed
        start = (end - 1) // self._pool.block_size * self._pool.block_size
        parent = self._parent(request, start)
        token_ids, block_hash = request.token_ids[start:end], self._partial_hash(request, end)
        min_len = max(len(token_ids) - request.num_retractable, 1)
        if all(key in self._pool for key in keys):
            if parent in self._tails and self._tails[parent].block_hash == block_hash:
                return
            min_len = len(token_ids)
        else:
            for key in keys:
                self._pool.discard(key)
            blocks = [block for index in self._states for block in request.cache.block_ids[index]]
            for block, key in zip(blocks, keys, strict=True):
                self._pool.publish(block, key, is_spare)
        tail = Tail(token_ids, min_len, hash_with_spans(b"", request.spans, start, end), block_hash)
        self._tails.put([(parent, tail)])
        if len(self._tails) > self._pool.num_blocks:
            self._tails.evict()

    def keep_logprobs(self, request: Request) -> None:
        """Remember the log-probabilities of its whole prompt."""
        if request.sampling.num_prompt_logprobs >= 0 and self._pool.caching:
            hashes = self.hashes(request, request.prompt_len // self._pool.block_size)
            self._logprobs.keep(hashes, request.prompt_logprobs, request.sampling.num_prompt_logprobs)

    def hashes(self, request: Request, count: int) -> Sequence[bytes]:
        """Return the hashes of its first `count` blocks. Each is computed once."""
        hashes, size = request.cache.block_hashes, self._pool.block_size
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else _root_hash(request)
            start, end = index * size, (index + 1) * size
            block_hash = hash_block(parent, request.token_ids[start:end])
            hashes.append(hash_with_spans(block_hash, request.spans, start, end) if request.spans else block_hash)
        return hashes[:count]

    def _find_logprobs(self, request: Request) -> None:
        """Reuse what earlier requests computed: once, however often this one has to wait."""
        num_top = request.sampling.num_prompt_logprobs
        if num_top >= 0 and not request.prompt_outputs_sent and not request.prompt_logprobs:
            hashes = self.hashes(request, request.prompt_len // self._pool.block_size)
            request.prompt_logprobs = self._logprobs.find(hashes, num_top)

    def _all_keys(self, request: Request, end: int) -> list[list[bytes]]:
        """Return, for each group, the keys of the blocks that it needs in order to continue at position `end`. If that
        is inside a block, the hash of this block covers its tokens up to there."""
        size = self._pool.block_size
        hashes = list(self.hashes(request, end // size))
        if end % size:
            hashes.append(self._partial_hash(request, end))
        return [self._keys(index, hashes, end) for index in range(len(self._groups))]

    def _partial_hash(self, request: Request, end: int) -> bytes:
        """Return the hash of the block with the position before `end`, up to there."""
        start = (end - 1) // self._pool.block_size * self._pool.block_size
        block_hash = hash_block(self._parent(request, start), request.token_ids[start:end])
        return hash_with_spans(block_hash, request.spans, start, end)

    def _parent(self, request: Request, start: int) -> bytes:
        """Return the hash of the block that ends at position `start`."""
        return self.hashes(request, start // self._pool.block_size)[-1] if start else _root_hash(request)

    def _keys(self, index: int, hashes: Sequence[bytes], end: int) -> list[bytes]:
        """Return the keys of the blocks that the group `index` needs in order to continue at position `end`, which is
        behind all of `hashes`."""
        group = self._groups[index]
        if group.kind == STATE:
            return [key_of(each, index, part) for each in hashes[-1:] for part in range(group.num_parts)]
        return [key_of(each, index) for each in hashes[group.first_block(end, self._pool.block_size) :]]

    def _longest(self, index: int, hashes: Sequence[bytes], count: int) -> int:
        """Return the largest number of blocks, at most `count`, behind which the group `index` can continue."""
        group, size = self._groups[index], self._pool.block_size
        if group.kind == STATE:
            parts = range(group.num_parts)
            while count and not all(key_of(hashes[count - 1], index, part) in self._pool for part in parts):
                count -= 1
            return count
        while count:
            needed = range(group.first_block(count * size, size), count)
            missing = next((i for i in reversed(needed) if key_of(hashes[i], index) not in self._pool), None)
            if missing is None:
                return count
            count = missing
        return 0


def _root_hash(request: Request) -> bytes:
    return root_hash(request.salt, *request.sampling.adapter[:1])


def key_of(block_hash: bytes, group: int, part: int = 0) -> bytes:
    """Return the pool's key of a block of the cache group with this index, or of a part of its state."""
    if part:
        return block_hash + bytes([group]) + part.to_bytes(2, "little")
    return block_hash + bytes([group]) if group else block_hash
