"""One step after another: what the scheduler picks, the executor computes. No processes, no sockets, no text."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

from engine.core.block_pool import BlockPool
from engine.core.drafting import NgramDrafter
from engine.core.scheduler import Counters, Limits, Scheduler, Update
from engine.core.types import Executor, Request, Step
from engine.settings.config import Config


@dataclass
class Stats(Counters):
    """Counters since the start, and the state now. The metrics of the server are made of these."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_held: int = 0
    block_size: int = 0
    num_steps: int = 0
    num_dropped: int = 0
    step_time_s: float = 0.0


class Loop:
    """The one owner of scheduler and executor."""

    def __init__(self, executor: Executor, num_blocks: int, config: Config):
        self.executor = executor
        pool = BlockPool(num_blocks, executor.block_size, config.enable_prefix_caching)
        limits = Limits(config.batch_size, config.max_step_tokens, config.block_ratio, config.max_cached_task_num)
        self.scheduler = Scheduler(pool, limits, _drafter(config))
        self._steps: deque[tuple[Step, float]] = deque()  # those that were launched, and when
        self._collected_at = 0.0
        self._num_steps = self._num_dropped = 0
        self._step_time_s = 0.0

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def add(self, request: Request, replay: bool = False) -> None:
        """Raises RequestError when the request is refused."""
        self.scheduler.add(request, replay)

    def drop(self, request_id: str) -> None:
        """Harmless when the request has ended."""
        if self.scheduler.drop(request_id):
            self._num_dropped += 1
            self._check_when_idle()

    def turn(self) -> list[Update]:
        """Waits for the step that runs, launches the next one, and returns what the first has brought: it can be sent
        while the second runs. Empty when nothing ran. Where the executor can, launches first and waits then."""
        if self._steps and self.executor.runs_ahead and self.scheduler.may_run_ahead():
            self._launch()
        updates = self._collect() if self._steps else []
        if not self._steps and not self._launch():
            assert self.is_idle, "requests wait and none can be computed"
        return updates

    def stats(self) -> dict[str, float]:
        scheduler = self.scheduler
        stats = Stats(
            **asdict(scheduler.counters),
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.pool.num_blocks,
            num_blocks_held=scheduler.pool.num_held,
            block_size=scheduler.pool.block_size,
            num_steps=self._num_steps,
            num_dropped=self._num_dropped,
            step_time_s=self._step_time_s,
        )
        return asdict(stats)

    def _launch(self) -> bool:
        batch = self.scheduler.next_batch()
        if batch is not None:
            self._steps.append((self.executor.launch(batch), time.monotonic()))
        return batch is not None

    def _collect(self) -> list[Update]:
        step, launched_at = self._steps.popleft()
        output = step.result()
        began, self._collected_at = max(launched_at, self._collected_at), time.monotonic()
        self._step_time_s += self._collected_at - began
        self._num_steps += 1
        updates = self.scheduler.apply(output)
        self._check_when_idle()
        return updates

    def _check_when_idle(self) -> None:
        if self.is_idle:
            self.scheduler.check()


def _drafter(config: Config) -> NgramDrafter | None:
    if config.speculate_method == "none":
        return None
    return NgramDrafter(config.speculate_max_ngram_size, config.speculate_max_draft_token_num)
