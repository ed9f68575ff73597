"""Decides which tokens of which requests a step computes. Pure bookkeeping: no tensors, no threads, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.core.block_pool import BlockPool, OutOfBlocks, chain_key
from engine.core.types import NO_TOKEN, Batch, Chunk, Logprobs, Request, StepOutput
from engine.errors import InvalidRequest, queue_full

FAILED = "failed"


@dataclass(frozen=True)
class Limits:
    max_batch: int  # requests in a step
    max_batched_tokens: int  # tokens in a step; at least max_batch, so that decodes leave prompts something
    block_ratio: float = 0.75  # share of the blocks that prompts may fill at admission; >= 1 reserves the worst case
    max_waiting: int = 128  # beyond what can start at once


@dataclass(frozen=True)
class Update:
    """What a step brought one request: a token, and why it was the last if it was; or none, and it FAILED."""

    request: Request
    token_id: int
    logprobs: Logprobs | None
    finish_reason: str | None


class Scheduler:
    """First come, first served, with a budget of tokens a step.

    Running decodes go first, so that a long prompt only slows them down; what is left of the budget goes to prompts
    that have begun, then to waiting requests. A request is admitted with all blocks of its prompt, while prompts leave
    `1 - block_ratio` of the pool for running requests to grow (one request alone may always take everything). When a
    running request needs a block and none is available, the youngest gives up all of its own, waits at the head of the
    queue and is computed again from its tokens; with `block_ratio >= 1` a request is admitted with every block it may
    come to need, and this never happens.
    """

    def __init__(self, pool: BlockPool, limits: Limits):
        assert limits.max_batched_tokens >= limits.max_batch
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of requests when they are first admitted
        self.num_cached_tokens = 0  # of these, found in the prefix cache
        self._keys: dict[Request, list[bytes]] = {}  # of a running request's leading full blocks

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request, replay: bool = False) -> None:
        """Raises InvalidRequest for what could never run and Overloaded when too many wait; a replay was admitted once
        and is never refused for the latter."""
        assert request.token_ids and not request.block_ids
        need = self.pool.blocks_for(request.max_len)
        if need > self.pool.num_blocks:
            raise InvalidRequest(
                f"prompt ({request.prompt_len} tokens) and answer (up to {request.sampling.max_new_tokens}) need "
                f"{need} KV blocks of {self.pool.block_size} tokens, the server has {self.pool.num_blocks}"
            )
        num_queued = len(self.waiting) - (self.limits.max_batch - len(self.running))
        if num_queued >= self.limits.max_waiting and not replay:
            raise queue_full(num_queued, self.limits.max_waiting)
        self.waiting.append(request)

    def drop(self, request_id: str) -> Request | None:
        """Forgets a request and gives its blocks back. None if it is not here (any more)."""
        for queue in (self.waiting, self.running):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    self._release(request)
                    return request
        return None

    def next_batch(self) -> Batch | None:
        """None when there is nothing to compute."""
        decodes = self._grow_decodes()
        budget = self.limits.max_batched_tokens - len(decodes)
        prefills: list[Chunk] = []
        for request in self.running:
            if request not in decodes and budget > 0:
                prefills.append(self._prefill_chunk(request, budget))
                budget -= prefills[-1].num_tokens
        while budget > 0 and (request := self._admit()):
            prefills.append(self._prefill_chunk(request, budget))
            budget -= prefills[-1].num_tokens
        chunks = [Chunk(request, request.num_computed, 1) for request in decodes] + prefills
        return Batch(chunks) if chunks else None

    def apply(self, batch: Batch, output: StepOutput) -> list[Update]:
        """Enters what the step computed. Finished requests have given their blocks back on return."""
        updates = []
        sampled = iter(zip(output.token_ids, output.logprobs, strict=True))
        for chunk in batch.chunks:
            request, samples = chunk.request, chunk.samples
            request.num_computed = chunk.end
            self._publish(request)
            if samples:
                token_id, logprobs = next(sampled)
                if token_id != NO_TOKEN:
                    request.append(token_id)
                finish_reason = FAILED if token_id == NO_TOKEN else request.finish_reason
                updates.append(Update(request, token_id, logprobs, finish_reason))
        for update in updates:
            if update.finish_reason:
                self.running.remove(update.request)
                self._release(update.request)
        return updates

    def check(self) -> None:
        """The pool's books and ours agree."""
        self.pool.check()
        assert self.pool.num_held == len({block for request in self.running for block in request.block_ids})
        assert not any(request.block_ids for request in self.waiting)

    def _grow_decodes(self) -> dict[Request, None]:
        """The running requests that only miss their last token, each with a block for it; preempts if it must."""
        decodes: dict[Request, None] = {}
        for request in list(self.running):
            if request not in self._keys or len(request.token_ids) - request.num_computed > 1:
                continue  # preempted in this very loop, or still in its prompt
            if self._has_room(request):
                decodes[request] = None
        return decodes  # none of them was preempted since: only younger ones are

    def _has_room(self, request: Request) -> bool:
        """A block for the next position of `request`; False when it had to be preempted itself."""
        while self.pool.blocks_for(request.num_computed + 1) > len(request.block_ids):
            try:
                request.block_ids += self.pool.take(1)
            except OutOfBlocks:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _prefill_chunk(self, request: Request, budget: int) -> Chunk:
        return Chunk(request, request.num_computed, min(budget, len(request.token_ids) - request.num_computed))

    def _admit(self) -> Request | None:
        """Moves the head of the queue to the running requests, with its blocks; None if it has to wait."""
        if not self.waiting or len(self.running) >= self.limits.max_batch:
            return None
        request = self.waiting[0]
        reserve = self.limits.block_ratio >= 1
        need = self.pool.blocks_for(request.max_len if reserve else len(request.token_ids))
        prefix = self.pool.find(request.token_ids)
        allowance = min(1.0, self.limits.block_ratio) * self.pool.num_blocks
        if self.running and self.pool.num_held + need - self.pool.num_held_of(prefix) > allowance:
            return None
        try:
            request.block_ids = self.pool.take(need - len(prefix), prefix)
        except OutOfBlocks:
            return None
        self.waiting.popleft()
        self.running.append(request)
        self._keys[request] = list(prefix)
        request.num_cached = request.num_computed = len(prefix) * self.pool.block_size
        if request.num_preemptions == 0:  # one that comes back finds its own blocks: no merit of the cache
            self.num_prompt_tokens += len(request.token_ids)
            self.num_cached_tokens += request.num_cached
        return request

    def _publish(self, request: Request) -> None:
        """Makes the blocks that have become full findable."""
        keys, size = self._keys[request], self.pool.block_size
        for index in range(len(keys), request.num_computed // size):
            parent = keys[-1] if keys else b""
            keys.append(chain_key(parent, request.token_ids[index * size : (index + 1) * size]))
            self.pool.publish(request.block_ids[index], keys[-1])

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        self._keys.pop(request, None)
