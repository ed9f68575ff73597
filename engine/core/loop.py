"""One step after another: what the scheduler picks, the executor computes. No processes, no sockets, no text."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from engine.core.block_pool import BlockPool
from engine.core.scheduler import Limits, Scheduler, Update
from engine.core.types import Executor, Request
from engine.settings.config import Config


@dataclass
class Stats:
    """Counters since the start, and the state at the last step. The metrics of the server are made of these."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_held: int = 0
    block_size: int = 0
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_dropped: int = 0
    step_time_s: float = 0.0


class Loop:
    """The one owner of scheduler and executor."""

    def __init__(self, executor: Executor, config: Config):
        self.executor = executor
        pool = BlockPool(executor.num_blocks, executor.block_size, config.enable_prefix_caching)
        limits = Limits(config.batch_size, config.max_step_tokens, config.block_ratio, config.max_cached_task_num)
        self.scheduler = Scheduler(pool, limits)
        self._stats = Stats(num_blocks=pool.num_blocks, block_size=pool.block_size)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def add(self, request: Request, replay: bool = False) -> None:
        """Raises RequestError when the request is refused."""
        self.scheduler.add(request, replay)

    def drop(self, request_id: str) -> None:
        """Harmless when the request has ended."""
        if not self.scheduler.drop(request_id):
            return
        self._stats.num_dropped += 1
        if self.is_idle:
            self.scheduler.check()

    def step(self) -> list[Update]:
        """Computes one batch; empty when there is nothing to do."""
        batch = self.scheduler.next_batch()
        if batch is None:
            assert self.is_idle, "requests wait and none can be computed"
            return []
        started = time.monotonic()
        updates = self.scheduler.apply(batch, self.executor.step(batch))
        self._stats.step_time_s += time.monotonic() - started
        self._stats.num_steps += 1
        self._stats.num_generated_tokens += len(updates)
        if self.is_idle:
            self.scheduler.check()
        return updates

    def stats(self) -> dict[str, float]:
        scheduler, stats = self.scheduler, self._stats
        stats.num_running, stats.num_waiting = len(scheduler.running), len(scheduler.waiting)
        stats.num_blocks_held = scheduler.pool.num_held
        stats.num_prompt_tokens, stats.num_cached_tokens = scheduler.num_prompt_tokens, scheduler.num_cached_tokens
        stats.num_preemptions = scheduler.num_preemptions
        return asdict(stats)
