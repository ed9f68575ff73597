"""Requests whose prefix another replica has cached, which they pull instead of computing it. Independent of the
network.

The front end names the replica (`Request.cached_at`): one that has served prompts with this beginning, or that has
handed the request over because it is stopped. A pull begins if it is expected to take less time than to compute the
same tokens, from the measured seconds of a token and of a block from this replica. It is given up as soon as it has
taken longer than to compute the blocks that have arrived, which are used then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.remote_prefill import BlockSource, Pull, RemotePrefill
from engine.core.scheduler import Scheduler
from engine.core.types import Request

FORGET_S = 60.0  # a replica is measured again after this time, because the load of its network may have changed
MAX_DELAY = 0.25  # a pull may delay a request by this share of the time to compute what is pulled, not more


@dataclass(frozen=True)
class PullEstimate:
    """Estimate of pulls from a replica, measured by the last one."""

    at: float  # time.monotonic() at its end
    block_s: float = 0.0  # seconds of a block
    min_compute_s: float = 0.0  # prompts that are computed in less time are not worth asking for


class SharedPrefixes(RemotePrefill):
    """Requests that await blocks of other replicas. `token_s` returns the seconds in which a token of a prompt is
    computed here, 0 while they are unknown: then nothing is pulled."""

    _finds_tail = False  # a replica that is still computing an answer only has full blocks in its prefix cache
    _waits_for_room = False

    def __init__(self, scheduler: Scheduler, source: BlockSource, min_tokens: int, token_s: Callable[[], float]):
        super().__init__(scheduler, source, min_tokens)
        self._token_s = token_s
        self._estimates: dict[str, PullEstimate] = {}  # by replica

    def _has_source(self, request: Request) -> bool:
        return bool(request.cached_at)

    def _is_faster(self, request: Request, num_tokens: int, num_blocks: int) -> bool:
        compute_s = num_tokens * self._token_s()
        estimate = self._estimates.get(request.cached_at)
        if estimate is None or time.monotonic() - estimate.at > FORGET_S:
            return compute_s > 0
        return max(num_blocks * estimate.block_s, estimate.min_compute_s) < compute_s

    def _is_stalled(self, pull: Pull, now: float) -> bool:
        num_blocks = len(pull.keys) if pull.num_found is None else pull.num_found
        block_s = self._compute_s(pull) / len(pull.keys)
        return now - pull.began_at > max(MAX_DELAY * num_blocks, len(pull.published)) * block_s

    def _note_end(self, pull: Pull, num_tokens: int) -> None:
        """Measure the replica. One that has sent nothing of what it was asked for is not asked again for a while: if it
        was only slow, it is still asked for prompts that take twice as long to compute."""
        now = time.monotonic()
        if num_arrived := len(pull.published):
            estimate = PullEstimate(now, block_s=(pull.arrived_at - pull.asked_at) / num_arrived)
        elif pull.num_found == 0 or not self._waits(pull.request):
            return
        else:
            estimate = PullEstimate(now, min_compute_s=math.inf if pull.has_ended else 2 * self._compute_s(pull))
        self._estimates[pull.request.cached_at] = estimate

    def _compute_s(self, pull: Pull) -> float:
        """Return the seconds in which the tokens that were not cached before the pull are computed."""
        return (len(pull.request.token_ids) - pull.num_cached) * self._token_s()
