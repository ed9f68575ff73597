"""KV cache manager of one engine: allocates the blocks of every cache group to requests, shares them, frees them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from engine.core.block_pool import BlockPool, OutOfBlocks
from engine.core.cache_groups import FREED, MAX_REJECTED, SLIDING_WINDOW, SNAPSHOT_INTERVAL, STATE
from engine.core.limits import Limits
from engine.core.prefix_cache import Prefix, PrefixCache
from engine.core.snapshots import snapshot_positions
from engine.core.types import Copy, Request


class KVCacheManager:
    """The only writer of the blocks of requests. One pool serves all groups, so that any mix of them can use
    the whole memory.

    `Limits.block_ratio` is the share of the pool that prompts may fill at admission; from 1 on, a request is admitted
    only when every block that it may come to need is certain.
    """

    def __init__(self, pool: BlockPool, limits: Limits):
        self.pool = pool
        self.groups = limits.cache_groups
        self._copies: list[Copy] = []  # for the next batch
        self._limits = limits
        self._prefix_cache = PrefixCache(pool, self.groups)
        self._states = [index for index, group in enumerate(self.groups) if group.kind == STATE]
        self._has_states = bool(self._states)
        self._is_uniform = len(self.groups) == 1 and not self._has_states and not self.groups[0].window
        self._num_in_flight = 0  # steps
        self._retired: list[list[int]] = []  # of finished requests, which a launched step may still write

    def max_blocks(self, request: Request) -> int:
        """Return how many blocks the request and its forks can come to hold, all together."""
        pool, size = self.pool, self.pool.block_size
        own = pool.blocks_for(request.max_len)
        full = request.prompt_len // size
        of_forks = [pool.blocks_for(fork.max_len) - full for fork in request.forks]
        chunk = self._limits.max_batched_tokens
        return sum(sum(group.max_blocks(each, size, chunk) for each in (own, *of_forks)) for group in self.groups)

    def num_found(self, request: Request) -> int:
        """Return how many leading tokens `allocate_prompt` would find in the prefix cache now, at least."""
        return 0 if self._has_states else self._prefix_cache.find(request).num_tokens(self.pool.block_size)

    def allocate_prompt(self, request: Request, slot: int, running: Collection[Request]) -> bool:
        """Allocate the blocks of its tokens, of a sliding window those of its first chunk, and reuse cached ones.
        Return False when it has to wait. A request that is alone may always take everything. `slot`: that it will
        have."""
        prefix = self._prefix_cache.find(request)
        if self._take_prompt(request, slot, running, prefix):
            return True
        if running:
            return False
        # A snapshot or the last block, and the copy of it, may be more blocks than there are.
        if prefix.tail_len:
            without = self._prefix_cache.find(request, with_tail=False)
            if self._take_prompt(request, slot, running, without):
                return True
        return self._has_states and self._take_prompt(request, slot, running, Prefix(0, [()] * len(self.groups), 0))

    def _take_prompt(self, request: Request, slot: int, running: Collection[Request], prefix: Prefix) -> bool:
        """Allocate the blocks of a prompt behind `prefix`, whose blocks it shares. Return False when it has to wait."""
        pool = self.pool
        written = [self._written(group, prefix) for group in range(len(self.groups))]
        if any(pool.awaits_swap_in(key) for keys in written for key in keys):
            return False
        on_device = [list(map(pool.is_on_device, each)) for each in written]
        num_blocks = pool.blocks_for(len(request.token_ids))
        counts = [self._num_new(group, prefix, num_blocks) + sum(each) for group, each in enumerate(on_device)]
        if not self._has_room(request, running, prefix, sum(counts)):
            return False
        try:
            blocks = iter(pool.take(sum(counts), prefix.all_keys))
        except OutOfBlocks:
            return False
        first = [self._first_block(group, prefix) for group in range(len(self.groups))]
        found = [[next(blocks) for _ in keys] for keys in prefix.keys]
        request.cache.block_ids = [
            [FREED] * n + ids + [next(blocks) for _ in range(count)]
            for n, ids, count in zip(first, found, counts, strict=True)
        ]
        request.cache.num_freed = first
        self._begin_behind(request, prefix)
        for index, each in enumerate(on_device):
            if each:
                self._own_written(request, slot, index, first[index] + len(found[index]), each)
        self._set_writable(request)
        return True

    def _has_room(self, request: Request, running: Collection[Request], prefix: Prefix, num_new: int) -> bool:
        """Return whether `Limits.block_ratio` lets a request take `num_new` blocks beside those of its prefix now."""
        pool, ratio = self.pool, self._limits.block_ratio
        keys, num_groups = prefix.all_keys, len(self.groups)
        num_shared = pool.num_held_of(keys)
        if ratio >= 1:
            # Shared blocks that it has to copy spare it no block.
            num_copied = sum(pool.num_held_of(self._written(group, prefix)) for group in range(num_groups))
            needed = self.max_blocks(request) - num_shared + num_copied
            return needed + self.num_promised(running) <= pool.num_available
        if not running:
            return True
        # Requests in lockstep lose everything when one of them is preempted.
        needed = self.max_blocks(request) if request.in_lockstep else num_new + len(keys)
        return pool.num_held + needed - num_shared <= ratio * pool.num_blocks

    def _begin_behind(self, request: Request, prefix: Prefix) -> None:
        """Note that a request starts to compute at the end of a cached prefix."""
        size, cache = self.pool.block_size, request.cache
        request.num_cached = request.num_computed = prefix.num_tokens(size)
        cache.num_published = request.num_computed // size
        cache.branch_point = prefix.num_paged * size
        if self._has_states and self.pool.caching:
            cache.last_snapshot, request.num_retractable = request.num_computed, 0
            cache.snapshots = snapshot_positions(request, size)
        del request.prompt_logprobs[request.num_computed :]  # of a preempted request: they are computed again

    def num_promised(self, running: Collection[Request]) -> int:
        """Return how many blocks the running requests may still take."""
        return sum(map(self._blocks_to_come, running))

    def longest_prefix(self, request: Request) -> tuple[list[bytes], int]:
        """See `PrefixCache.longest`."""
        return self._prefix_cache.longest(request)

    def _written(self, index: int, prefix: Prefix) -> Sequence[bytes]:
        """Return the keys of the last blocks of the prefix in a group that a request writes when it continues: those of
        a state, and a block that is not full."""
        keys = prefix.keys[index]
        return keys if self.groups[index].kind == STATE else keys[-1:] if prefix.tail_len else ()

    def _own_written(self, request: Request, slot: int, index: int, end: int, on_device: Sequence[bool]) -> None:
        """Give the request blocks of its own in place of the found ones that it writes, which are the last ones before
        place `end`. Its last blocks are those for the copies. A block that is swapped in needs none: its key can still
        be found on the host."""
        block_ids, num_copies = request.cache.block_ids[index], sum(on_device)
        copies = block_ids[len(block_ids) - num_copies :]
        del block_ids[len(block_ids) - num_copies :]
        for place, is_copied in enumerate(on_device, end - len(on_device)):
            block = block_ids[place]
            if is_copied:
                block_ids[place] = copies.pop(0)
                self._copies.append(Copy(slot, index, place, block, block_ids[place]))
                self.pool.give_back([block])
            else:
                self.pool.unpublish(block)

    def allocate(self, request: Request, num_tokens: int = 1) -> None:
        """Make its next `num_tokens` positions writable: with new blocks, and with copies of those that others hold or
        may find. Raises OutOfBlocks; what it has by then it keeps."""
        pool, cache, start = self.pool, request.cache, request.num_computed
        is_known = start >= cache.num_writable and not request.num_unverified  # it has just got here
        if self._has_states and is_known and cache.last_snapshot < start == self._next_snapshot(request, start - 1):
            self._prefix_cache.publish_tail(request)
            cache.last_snapshot = start
        for index, group in enumerate(self.groups):
            block_ids = cache.block_ids[index]
            if group.kind == STATE:
                for place, block in enumerate(block_ids):
                    if pool.is_shared(block) or pool.is_published(block):
                        self._replace(request, request.slot, index, place)
                continue
            num_freed = self._free_behind_window(request, index) if group.kind == SLIDING_WINDOW else 0
            place = start // pool.block_size
            if place < len(block_ids) and (pool.is_shared(block_ids[place]) or pool.is_published(block_ids[place])):
                self._replace(request, request.slot, index, place)
            num_missing = pool.blocks_for(min(start + request.num_unverified + num_tokens, request.max_len))
            num_missing -= len(block_ids)
            # A prompt keeps the share of the pool that it was admitted with.
            num_next = min(num_freed, pool.blocks_for(len(request.token_ids)) - len(block_ids), pool.num_available)
            if num_missing > 0 or num_next > 0:
                block_ids += pool.take(max(num_missing, num_next))
        self._set_writable(request)

    def allocate_drafts(self, request: Request, num_drafts: int, num_running: int) -> int:
        """Return how many of `num_drafts` positions behind the next one have blocks, wherever that comes to be. They
        are allocated now if that leaves every running request one."""
        pool, next_end = self.pool, request.num_computed + request.num_unverified + 1
        end = min(next_end + num_drafts, request.max_len)
        if self._has_states:  # states are kept at a position that is known
            end = min(end, next_end + MAX_REJECTED, self._next_snapshot(request, next_end - 1))
            num_drafts = end - next_end
        if end > (num_writable := request.cache.num_writable):
            num_missing = (pool.blocks_for(end) - num_writable // pool.block_size) * len(self.groups)
            if pool.num_available - num_missing < num_running * len(self.groups):
                return max(0, num_writable - next_end)
            self.allocate(request, 1 + num_drafts)
        return num_drafts

    def fork(self, source: Request, target: Request) -> None:
        """Let `target` hold the blocks of `source` in place of its own."""
        self.pool.share(_held_by(source))
        self.pool.give_back(_held_by(target))
        target.num_computed, target.num_cached = source.num_computed, source.num_cached
        ours, theirs = source.cache, target.cache
        theirs.block_ids = [list(block_ids) for block_ids in ours.block_ids]
        theirs.num_freed, theirs.block_hashes = list(ours.num_freed), list(ours.block_hashes)
        theirs.num_published, theirs.last_snapshot = ours.num_published, ours.last_snapshot
        theirs.has_new_blocks = True
        self._set_shared(source)
        self._set_shared(target)

    def chunk_len(self, request: Request, num_tokens: int) -> int:
        """Return how many of its next `num_tokens` tokens one step may compute: no more than have blocks without
        preemption, and not beyond the position of a snapshot."""
        start = request.num_computed
        if self._has_states:
            num_tokens = min(num_tokens, self._next_snapshot(request, start) - start)
        if start + num_tokens > request.cache.num_writable:
            try:
                self.allocate(request, num_tokens)
            except OutOfBlocks:
                self._set_writable(request)
        return min(num_tokens, request.cache.num_writable - start)

    def publish(self, request: Request) -> None:
        """Make the blocks that have become full findable."""
        # A launched step may compute what lies behind the end of an answer.
        count = min(request.num_computed, len(request.token_ids), request.max_len) // self.pool.block_size
        if count > request.cache.num_published and self.pool.caching:
            self._prefix_cache.publish(request, request.cache.num_published, count)
        request.cache.num_published = count

    def keep_end(self, request: Request) -> None:
        """Keep the state of a request that ends, for a prompt that goes on with its answer, unless one was kept in the
        same block. With `keeps_tail`, keep the last block of any model."""
        if request.keeps_tail:
            self._prefix_cache.publish_tail(request)
        elif self._has_states and not request.in_lockstep:
            end, size = request.num_computed, self.pool.block_size
            # A launched step may compute what lies behind the end of an answer.
            is_known = end <= min(len(request.token_ids), request.max_len)
            if is_known and (end - 1) // size > request.cache.last_snapshot // size:
                self._prefix_cache.publish_tail(request, is_spare=end > request.prompt_len)

    def keep_logprobs(self, request: Request) -> None:
        """Remember the log-probabilities of its prompt, if it asked for them."""
        self._prefix_cache.keep_logprobs(request)

    def take_new_blocks(self, request: Request) -> Sequence[Sequence[int]]:
        """Return, for each group, the blocks that have not been sent to the executor yet."""
        cache = request.cache
        num_sent = cache.num_sent or [0] * len(self.groups)
        cache.num_sent, cache.has_new_blocks = [len(ids) for ids in cache.block_ids], False
        return [ids[start:] for ids, start in zip(cache.block_ids, num_sent, strict=True)]

    @property
    def has_copies(self) -> bool:
        """Return whether blocks wait to be copied by the next step."""
        return bool(self._copies)

    def take_copies(self) -> list[Copy]:
        """Return the copies since the last call, which belong to the next batch."""
        copies, self._copies = self._copies, []
        return copies

    def resend_blocks(self, request: Request) -> None:
        """Let the next `take_new_blocks` return all blocks again."""
        request.cache.num_sent, request.cache.has_new_blocks = [], True

    def free(self, request: Request) -> None:
        """Free its blocks; if a step was launched that may write them, when that step has ended."""
        blocks = _held_by(request) if self._is_uniform else self._in_order_of_value(request)
        if self._num_in_flight:
            self._retired.append(blocks)
        else:
            self.pool.give_back(blocks)
        self._copies = [copy for copy in self._copies if copy.slot != request.slot]
        request.num_computed = request.num_unverified = 0
        cache = request.cache
        cache.block_ids, cache.num_freed, cache.num_sent = [], [], []
        cache.num_published = cache.num_writable = 0
        cache.has_shared_tail = False

    def forget_answer(self, request: Request) -> None:
        """Forget the hashes of blocks with tokens of the answer, which begins again with others."""
        del request.cache.block_hashes[request.prompt_len // self.pool.block_size :]

    def begin_step(self) -> None:
        """Note that a step was launched: blocks that are freed now may still be written."""
        self._num_in_flight += 1

    def end_step(self) -> None:
        """Free what finished requests held. A step that was launched meanwhile may still write these blocks, but it
        does so before any later one."""
        self._num_in_flight -= 1
        for blocks in self._retired:
            self.pool.give_back(blocks)
        self._retired.clear()

    def check(self, running: Collection[Request]) -> None:
        """Check that the pool and the requests agree. Called between two steps."""
        self.pool.check()
        assert not self._retired
        assert self.pool.num_held == len(set().union(*map(_held_by_all, running)))

    def _first_block(self, index: int, prefix: Prefix) -> int:
        """Return the number of leading blocks that the group does without."""
        return 0 if self.groups[index].kind == STATE else prefix.num_blocks - len(prefix.keys[index])

    def _num_new(self, index: int, prefix: Prefix, num_blocks: int) -> int:
        """Return how many blocks of a prompt of `num_blocks` the group takes at admission beside the cached ones and
        copies of them."""
        group = self.groups[index]
        if group.kind == STATE:
            return 0 if prefix.keys[index] else group.num_parts
        return group.max_blocks(num_blocks - prefix.num_blocks, self.pool.block_size, self._limits.max_batched_tokens)

    def _free_behind_window(self, request: Request, index: int) -> int:
        """Free the blocks that no later position reads. Return how many there were."""
        start, block_ids = request.cache.num_freed[index], request.cache.block_ids[index]
        end = self.groups[index].first_block(request.num_computed, self.pool.block_size)
        if end > start:
            self.pool.give_back(block_ids[start:end][::-1])
            block_ids[start:end] = [FREED] * (end - start)
            request.cache.num_freed[index] = end
        return max(0, end - start)

    def _in_order_of_value(self, request: Request) -> list[int]:
        """Return its blocks, those last that the prefix cache may lose first: of a prefix its end, of a window its
        beginning."""
        blocks: list[int] = []
        for group, ids, start in zip(self.groups, request.cache.block_ids, request.cache.num_freed, strict=False):
            blocks += ids[start:][::-1] if group.kind == SLIDING_WINDOW else ids[start:]
        return blocks

    def _replace(self, request: Request, slot: int, index: int, place: int) -> None:
        """Give the request a copy of a block of its own. Raises OutOfBlocks."""
        block_ids = request.cache.block_ids[index]
        source = block_ids[place]
        if self.pool.is_shared(source):
            [target] = self.pool.take(1)
            self.pool.give_back([source])
        else:  # a snapshot that it holds alone: at worst, the same block again
            self.pool.give_back([source])
            [target] = self.pool.take(1)
        block_ids[place] = target
        self._copies.append(Copy(slot, index, place, source, target))

    def _set_writable(self, request: Request) -> None:
        """Note how far its own blocks reach."""
        size, cache = self.pool.block_size, request.cache
        if self._is_uniform:
            cache.num_writable = len(cache.block_ids[0]) * size
        else:
            ends = [
                self._next_snapshot(request, request.num_computed) if group.kind == STATE else len(ids) * size
                for group, ids in zip(self.groups, cache.block_ids, strict=True)
            ]
            cache.num_writable = min(ends)
        cache.has_shared_tail, cache.has_new_blocks = False, True

    def _set_shared(self, request: Request) -> None:
        """Note that others hold its last blocks, too."""
        request.cache.num_writable = request.num_computed
        request.cache.has_shared_tail = self._has_states or request.num_computed % self.pool.block_size > 0

    def _next_snapshot(self, request: Request, position: int) -> int:
        """Return the first position after `position` at which its state is kept, or the largest integer."""
        if not self.pool.caching:
            return sys.maxsize
        size = self.pool.block_size
        interval = max(size, SNAPSHOT_INTERVAL // size * size)
        next_multiple = (position // interval + 1) * interval
        return min([next_multiple, *(each for each in request.cache.snapshots if each > position)])

    def _blocks_to_come(self, request: Request) -> int:
        num_shared = sum(group.num_parts for group in self.groups) if request.cache.has_shared_tail else 0
        return self.max_blocks(request) - len(_held_by(request)) + num_shared


def _held_by(request: Request) -> list[int]:
    """Return the blocks of the request in all groups."""
    block_ids, num_freed = request.cache.block_ids, request.cache.num_freed
    if len(block_ids) == 1 and not num_freed[0]:
        return block_ids[0]
    return [block for ids, start in zip(block_ids, num_freed, strict=True) for block in ids[start:]]


def _held_by_all(request: Request) -> set[int]:
    """Return the blocks of the request and of its forks."""
    return {block for each in (request, *request.forks) for block in _held_by(each)}
