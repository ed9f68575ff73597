"""Decode side of disaggregation: requests whose prompts a prefill instance computes wait until their blocks have been
pulled. Independent of the network.

Pulled blocks are published in the prefix cache under their block hashes, then the request is admitted like any other
and finds them as a cached prefix. A block that does not arrive, for whatever reason, is therefore simply computed, and
every cache group is served by the same code. Until the admission the blocks stay held: otherwise they would be evicted
for those of later prompts while the request waits for a slot. The last block is pulled although it is not full, so that
the only token left to compute is the last one of the prompt. This is a row like that of a running answer, which fits
into a captured decode step, so that the other answers do not wait for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from engine.core.scheduler import Scheduler
from engine.core.types import Request

STALL_S = 10.0  # a request is computed here after this time without a new block


@dataclass(eq=False)
class Pull:
    """Blocks of one prompt that are being pulled. The network thread writes block `i` of `block_ids` while `is_open`,
    which `lock` protects, and then appends `i` to `arrived`."""

    request: Request
    keys: Sequence[bytes]  # of the blocks
    block_ids: Sequence[int]  # reserved for them
    found_ids: Sequence[int]  # blocks of the prefix that were cached before, which are held meanwhile
    num_cached: int  # leading tokens that were cached before
    began_at: float = math.inf  # when the source was asked to begin; before that, no time passes
    progress_at: float = field(default_factory=time.monotonic)
    lock: Lock = field(default_factory=Lock)
    is_open: bool = True
    arrived: deque[int] = field(default_factory=deque)
    published: list[int] = field(default_factory=list)  # what was taken from `arrived`
    has_ended: bool = False  # no more blocks will arrive
    # Of a replica, which sends what it has cached: number of blocks that it has found, times of question and last block
    num_found: int | None = None
    asked_at: float = 0.0
    arrived_at: float = 0.0

    @property
    def num_held(self) -> int:
        return len(self.found_ids) + len(self.block_ids)


class BlockSource(Protocol):
    """The prefill instances from which blocks are pulled."""

    @property
    def is_ready(self) -> bool:
        """Return whether an instance is connected."""
        ...

    @property
    def num_connected(self) -> int:
        """Return the number of connected instances."""
        ...

    def begin(self, pull: Pull) -> bool:
        """Let an instance compute the prompt and send its blocks. Return False if none is connected."""
        ...

    def end(self, pull: Pull) -> None:
        """Tell the instance that no more blocks are wanted."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has arrived or has ended."""
        ...


@dataclass
class PullCounters:
    """Counters since the start."""

    num_remote_prefills: int = 0  # prompts that prefill instances were asked to compute
    num_remote_prefill_failures: int = 0  # of these, prompts of which some blocks did not arrive
    num_pulled_blocks: int = 0


class RemotePrefill:
    """Requests that await blocks. They stay in the waiting queue of `scheduler`, which does not admit them meanwhile.

    `min_tokens`: prompts with fewer tokens to compute are computed here.
    """

    _finds_tail = True  # the last block is pulled, although it is not full
    _waits_for_room = True  # otherwise a request is computed here if no blocks can be reserved for it now

    def __init__(self, scheduler: Scheduler, source: BlockSource, min_tokens: int):
        self._scheduler, self._source, self._min_tokens = scheduler, source, min_tokens
        self._pulls: dict[Request, Pull] = {}
        self._pulled: dict[Request, Pull] = {}  # pulls that have ended; their blocks are held until the admission
        self._waits_since: dict[Request, float] = {}  # requests that have no blocks for a pull yet
        # Pulls that begin when so many steps have ended, because these may still write the blocks.
        self._reserved: deque[tuple[int, Pull]] = deque()
        self._launched_before = -1  # steps when the last `poll` ended with blocks held for requests that wait
        self.counters = PullCounters()

    @property
    def num_connected(self) -> int:
        """Return the number of prefill instances that are connected."""
        return self._source.num_connected

    @property
    def num_open(self) -> int:
        """Return the number of requests that await blocks, or for which blocks are held."""
        return len(self._pulls) + len(self._pulled) + len(self._waits_since)

    def consider(self, request: Request) -> None:
        """Let a request that was just added to the scheduler await blocks, unless it has to be computed here: its
        prompt is short, it depends on more than token ids, or no instance is connected."""
        wants_outputs = request.wants_token_outputs and not request.prompt_outputs_sent
        needs_more = request.spans or request.sampling.adapter or wants_outputs
        if len(request.token_ids) >= self._min_tokens and not needs_more and self._has_source(request):
            request.awaits_blocks, request.finds_tail = True, self._finds_tail
            self._waits_since[request] = time.monotonic()

    def poll(self) -> None:
        """Publish the blocks that have arrived, and begin and end pulls. Called between two steps."""
        now = time.monotonic()
        for pull in [each for each in self._pulled.values() if not self._waits(each.request)]:
            self._release(pull)
        for pull in list(self._pulls.values()):
            self._advance(pull, now)
        for request in list(self._waits_since):
            # A block that the next step copies may be available already, so it must not be reserved before that step.
            is_blocked = self._scheduler.has_copies or len(self._pulls) >= self._scheduler.limits.max_batch
            if is_blocked or not self._reserve(request, now):
                break
        while self._reserved and self._reserved[0][0] <= self._scheduler.num_applied:
            _, pull = self._reserved.popleft()
            if pull.is_open:
                pull.began_at = now
                if not self._source.begin(pull):  # otherwise the network thread may end the pull before this returns
                    pull.has_ended = True
        self._release_if_needed()

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something to do."""
        self._source.wait(timeout_s)

    def _reserve(self, request: Request, now: float) -> bool:
        """Reserve blocks for a request, or let it be computed here. Return False if it has to wait."""
        if not self._waits(request) or not self._has_source(request) or now - self._waits_since[request] > STALL_S:
            self._admit(request)
            return True
        pool = self._scheduler.pool
        keys, num_cached = self._scheduler.longest_prefix(request)
        missing, found = [key for key in keys if key not in pool], [key for key in keys if pool.is_on_device(key)]
        num_tokens = len(request.token_ids) - num_cached
        if not missing or num_tokens < self._min_tokens or not self._is_faster(request, num_tokens, len(missing)):
            self._admit(request)
            return True
        held = self._take(request, len(missing), found)
        if held is None:
            is_possible = self._scheduler.running or self._pulls or self._pulled
            if is_possible and self._waits_for_room:
                return False
            self._admit(request)
            return True
        pull = Pull(request, missing, held[len(found) :], held[: len(found)], num_cached)
        del self._waits_since[request]
        self._pulls[request] = pull
        self._reserved.append((self._scheduler.num_launched, pull))
        self.counters.num_remote_prefills += 1
        return True

    def _release_if_needed(self) -> None:
        """Release the blocks of one request that waits, if the running ones need them or if no request could start for
        lack of them."""
        running, num_launched = self._scheduler.running, self._scheduler.num_launched
        is_short = self._scheduler.pool.num_available < len(running) * len(self._scheduler.limits.cache_groups)
        if self._pulled and (is_short or not running and num_launched == self._launched_before):
            self._release(next(reversed(self._pulled.values())))
        self._launched_before = num_launched if self._pulled else -1

    def _take(self, request: Request, count: int, found: Sequence[bytes]) -> list[int] | None:
        """Return the blocks of `found` and `count` others, or None if other requests need them: those that run, or for
        which blocks were reserved before."""
        pool, ratio, running = self._scheduler.pool, self._scheduler.limits.block_ratio, self._scheduler.running
        num_available, needed = pool.num_available, count + len(found) - pool.num_held_of(found)
        pulls = [*self._pulls.values(), *self._pulled.values()]
        if ratio >= 1:
            num_available -= self._scheduler.num_promised_blocks()
        elif running or pulls:
            num_available = min(num_available, int(ratio * pool.num_blocks) - pool.num_held)
        if running or pulls:
            needed += self._num_at_admission(request, count + len(found))
            needed += sum(self._num_at_admission(each.request, each.num_held) for each in pulls)
        return pool.take(count, found) if needed <= num_available else None

    def _num_at_admission(self, request: Request, num_held: int) -> int:
        """Return how many blocks a request must find available at its admission when `num_held` are held for it."""
        limits = self._scheduler.limits
        num_written = sum(group.num_parts for group in limits.cache_groups)  # it continues copies, or new blocks
        return num_written + (self._scheduler.max_blocks(request) - num_held if limits.block_ratio >= 1 else 0)

    def _advance(self, pull: Pull, now: float) -> None:
        pool, has_ended = self._scheduler.pool, pull.has_ended  # read before the blocks, the last of which precede it
        while pull.arrived:
            pull.published.append(pull.arrived.popleft())
            self._publish(pull, pull.published[-1:])
            pull.progress_at = now
            self.counters.num_pulled_blocks += 1
        if not has_ended and self._waits(pull.request) and not self._is_stalled(pull, now):
            return
        with pull.lock:
            pull.is_open = False
        self._source.end(pull)
        self._publish(pull, pull.published)  # again: another block that had the same key may have been evicted
        keys, num_cached = self._scheduler.longest_prefix(pull.request)
        has_all, is_wanted = all(key in pool for key in keys), self._waits(pull.request)
        self._note_end(pull, max(0, num_cached - pull.num_cached))
        self.counters.num_remote_prefill_failures += is_wanted and not has_all and len(pull.published) != pull.num_found
        self._admit(pull.request)
        self._pulled[pull.request] = pull
        if not has_all or not is_wanted:
            self._release(pull)

    def _release(self, pull: Pull) -> None:
        """Release the blocks of a pull that has ended. They can still be found until they are evicted."""
        del self._pulled[pull.request]
        self._scheduler.pool.give_back([*pull.found_ids, *pull.block_ids])

    def _publish(self, pull: Pull, indices: Sequence[int]) -> None:
        for index in indices:
            self._scheduler.pool.publish(pull.block_ids[index], pull.keys[index])

    def _has_source(self, request: Request) -> bool:
        """Return whether an instance can be asked for the blocks of a request."""
        return self._source.is_ready

    def _is_faster(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        """Return whether it is better to pull `num_blocks` blocks than to compute these tokens here."""
        return True

    def _is_stalled(self, pull: Pull, now: float) -> bool:
        """Return whether an open pull is given up."""
        return now - pull.progress_at > STALL_S

    def _note_end(self, pull: Pull, num_tokens: int) -> None:
        """Note that a pull has ended, after which the prefix cache has `num_tokens` more tokens of its prompt."""
        pull.request.num_pulled = num_tokens

    def _waits(self, request: Request) -> bool:
        """Return whether the request is still wanted."""
        return self._scheduler.waiting.get(request.request_id) is request

    def _admit(self, request: Request) -> None:
        request.awaits_blocks = False
        self._pulls.pop(request, None)
        self._waits_since.pop(request, None)
