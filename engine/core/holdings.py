"""Which blocks each request holds: those of its prompt, found in the prefix cache or new, those it grows by, those it
shares with its forks. Knows requests and the pool; not who runs when."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.block_pool import BlockPool, OutOfBlocks, chain_key, root_key
from engine.core.known_scores import KnownScores
from engine.core.types import Copy, Request

NEVER = 1 << 60  # blocks


class Holdings:
    """The only one who changes a request's blocks. `block_ratio`: the share of the pool that prompts may fill at
    admission; from 1 on, a request is admitted when every block it may come to need is sure."""

    def __init__(self, pool: BlockPool, block_ratio: float):
        self.pool = pool
        self._block_ratio = block_ratio
        self._known_scores = KnownScores(pool.block_size)
        self._num_in_flight = 0  # steps
        self._retired: list[list[int]] = []  # of requests that have ended, which a launched step may still write

    def most_blocks(self, request: Request) -> int:
        """That it and its forks can come to hold, all together."""
        full = request.prompt_len // self.pool.block_size
        forks = sum(self.pool.blocks_for(fork.max_len) - full for fork in request.forks)
        return self.pool.blocks_for(request.max_len) + forks

    def take_prompt(self, request: Request, running: Collection[Request]) -> bool:
        """The blocks of all its tokens, those that the prefix cache has among them; False if it has to wait. One alone
        may always take everything."""
        pool = self.pool
        prefix = self._prefix(request)
        num_shared = pool.num_held_of(prefix)
        need = pool.blocks_for(len(request.token_ids))
        if self._block_ratio >= 1:
            promised = sum(map(self._blocks_to_come, running))
            if self.most_blocks(request) - num_shared + promised > pool.num_available:
                return False
        elif running:
            # The beams of a search lose all that they have found when they must make room.
            wanted = self.most_blocks(request) if request.search else need
            if pool.num_held + wanted - num_shared > self._block_ratio * pool.num_blocks:
                return False
        try:
            request.block_ids = pool.take(need - len(prefix), prefix)
        except OutOfBlocks:
            return False
        self._own_all(request)
        request.num_published = len(prefix)
        request.num_cached = request.num_computed = len(prefix) * pool.block_size
        del request.scores[request.num_computed :]  # of one that comes back: they are computed again
        return True

    def make_room(self, request: Request) -> Copy | None:
        """A block of its own for its next position. What others hold is copied before it is written. Raises
        OutOfBlocks."""
        copy, index = None, request.num_computed // self.pool.block_size
        if index == len(request.block_ids):
            request.block_ids += self.pool.take(1)
        elif self.pool.is_shared(request.block_ids[index]):
            [target] = self.pool.take(1)
            source, request.block_ids[index] = request.block_ids[index], target
            self.pool.give_back([source])
            copy = Copy(request.slot, index, source, target)
        self._own_all(request)
        return copy

    def stretch(self, request: Request, num_more: int, num_running: int) -> int:
        """How many of `num_more` positions after the next one have a block, taken now if that leaves every running
        request one."""
        missing = self.pool.blocks_for(request.num_computed + 1 + num_more) - len(request.block_ids)
        if missing > 0:
            if self.pool.num_available - missing < num_running:
                return len(request.block_ids) * self.pool.block_size - request.num_computed - 1
            request.block_ids += self.pool.take(missing)
            self._own_all(request)
        return num_more

    def share(self, leader: Request) -> None:
        """Its forks hold what it holds."""
        is_partial = leader.num_computed % self.pool.block_size > 0
        for fork in leader.forks:
            self.pool.share(leader.block_ids)
            fork.block_ids, fork.keys = list(leader.block_ids), list(leader.keys)
            fork.num_computed, fork.num_published = leader.num_computed, leader.num_published
            fork.num_cached = leader.num_cached
            fork.room = leader.room = leader.num_computed
            fork.has_shared_tail = leader.has_shared_tail = is_partial

    def branch(self, beams: Sequence[Request], parents: Sequence[int]) -> None:
        """Each goes on where `parents` says, and those beyond them hold nothing. The prefix cache does not learn of
        what they write."""
        before, num_computed = [each.block_ids for each in beams], beams[0].num_computed
        for parent in parents:
            self.pool.share(before[parent])
        for blocks in before:
            self.pool.give_back(blocks)
        for index, each in enumerate(beams):
            each.block_ids = list(before[parents[index]]) if index < len(parents) else []
            each.num_computed = each.room = num_computed
            each.num_placed, each.num_published = 0, NEVER

    def publish(self, request: Request) -> None:
        """Makes the blocks that have become full findable."""
        count = request.num_computed // self.pool.block_size
        if count > request.num_published and self.pool.caching:
            keys = self._keys(request, count)
            for index in range(request.num_published, count):
                self.pool.publish(request.block_ids[index], keys[index])
        request.num_published = count

    def keep_scores(self, request: Request) -> None:
        """Of its whole prompt."""
        if request.sampling.num_prompt_logprobs >= 0 and self.pool.caching:
            keys = self._keys(request, request.prompt_len // self.pool.block_size)
            self._known_scores.keep(keys, request.scores, request.sampling.num_prompt_logprobs)

    def new_blocks(self, request: Request) -> Sequence[int]:
        """Those that the executor has not been told of; it is told now."""
        placed, request.num_placed = request.num_placed, len(request.block_ids)
        return request.block_ids[placed:]

    def release(self, request: Request) -> None:
        """If a step was launched that may write them, they come back when it has ended."""
        if self._num_in_flight:
            self._retired.append(request.block_ids)
        else:
            self.pool.give_back(request.block_ids)
        request.block_ids = []
        request.num_computed = request.num_published = request.num_placed = request.room = 0
        request.has_shared_tail = False

    def begin_step(self) -> None:
        self._num_in_flight += 1

    def end_step(self) -> None:
        """One that was launched meanwhile may still write the blocks that come back now, but before any later one."""
        self._num_in_flight -= 1
        for blocks in self._retired:
            self.pool.give_back(blocks)
        self._retired.clear()

    def check(self, running: Collection[Request]) -> None:
        """The pool's books and the requests' agree. Between two steps."""
        self.pool.check()
        assert not self._retired
        assert self.pool.num_held == len(set().union(*map(_held, running)))

    def _own_all(self, request: Request) -> None:
        request.room = len(request.block_ids) * self.pool.block_size
        request.has_shared_tail = False

    def _blocks_to_come(self, request: Request) -> int:
        num_held = len(_held(request)) if request.search else len(request.block_ids)
        return self.most_blocks(request) - num_held + request.has_shared_tail

    def _prefix(self, request: Request) -> Sequence[bytes]:
        """Keys of the cached blocks that it begins with."""
        size, num_likeliest = self.pool.block_size, request.sampling.num_prompt_logprobs
        if not self.pool.caching:
            return ()
        if num_likeliest >= 0 and not request.is_told and not request.scores:  # once, however often it has to wait
            request.scores = self._known_scores.find(self._keys(request, request.prompt_len // size), num_likeliest)
        keys = self._keys(request, request.most_cached // size)
        return keys[: self.pool.find(keys)]

    def _keys(self, request: Request, count: int) -> Sequence[bytes]:
        """Of its first `count` blocks, each made once."""
        keys, size = request.keys, self.pool.block_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else root_key(request.salt, *request.sampling.adapter[:1])
            keys.append(chain_key(parent, request.token_ids[index * size : (index + 1) * size]))
        return keys[:count]


def _held(request: Request) -> set[int]:
    """By it and, as long as it has some, by its forks."""
    return {block for each in (request, *request.forks) for block in each.block_ids}
