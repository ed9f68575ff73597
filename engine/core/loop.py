"""Engine loop: the only component that uses both the scheduler and the executor. Independent of processes, sockets and
texts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

from engine.core.adapters import Adapters
from engine.core.beam_driver import BeamDriver
from engine.core.block_pool import BlockPool
from engine.core.executor import Executor, Step
from engine.core.grammar import CompilationQueue, Grammars
from engine.core.image_queue import ImageCounters, ImageQueue
from engine.core.limits import Counters, Limits, PrefillLimits
from engine.core.prefill_jobs import PrefillJobs
from engine.core.remote_prefill import PullCounters, RemotePrefill
from engine.core.scheduler import Scheduler
from engine.core.types import Request
from engine.core.updates import FAILED, Update
from engine.errors import RequestError, queue_full
from engine.settings.config import Config

WAIT_S = 0.005  # to wait for grammars, blocks or images while no step can be computed; then new requests are read
MEASURED_TOKENS, TOKEN_S_WEIGHT = 64, 0.2  # of a step that counts for `EngineLoop.token_s`, and its weight there
STEP_MARGIN = 3.0  # a step of n tokens takes at most this times as long as n steps of one token


@dataclass
class Stats(PullCounters, ImageCounters, Counters):
    """Counters since the start and the current state, from which the metrics of the server are made."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # of their prompts
    num_blocks: int = 0
    num_blocks_held: int = 0
    num_prefill_instances: int = 0  # connected ones, of a decode instance
    block_size: int = 0
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_dropped: int = 0
    num_wasted_tokens: int = 0  # computed for answers that were dropped
    step_time_s: float = 0.0
    step_age_s: float = 0.0  # of the running step
    step_limit_s: float = 0.0  # how long it may take, estimated from earlier steps; 0: unknown
    fingerprint: int = 0  # of the arithmetic of the executor; 0: unknown


# Fields of `Stats` that describe the current state of the scheduler and of the running step; the others are counters.
GAUGES = ("num_running", "num_waiting", "num_waiting_tokens", "num_blocks", "num_blocks_held", "num_prefill_instances")
PROPERTIES = ("block_size", "step_age_s", "step_limit_s", "fingerprint")


class EngineLoop:
    """Owner of the scheduler and the executor. Without `grammars` no request may want a structured output.
    `fingerprint` is that of the executor, see `engine.executors.fingerprint`; 0: unknown.
    """

    def __init__(
        self,
        executor: Executor,
        num_blocks: int,
        config: Config,
        grammars: Grammars | None = None,
        fingerprint: int = 0,
    ):
        self.executor, self.fingerprint = executor, fingerprint
        num_host_blocks = config.num_host_blocks(executor.block_bytes)
        pool = BlockPool(num_blocks, executor.block_size, config.enable_prefix_caching, num_host_blocks)
        limits = Limits(
            max_batch=config.batch_size,
            max_batched_tokens=config.max_step_tokens,
            block_ratio=config.block_ratio,
            max_waiting=config.max_cached_task_num,
            max_waiting_tokens=config.max_waiting_tokens,
            max_prompt_logits=executor.max_prompt_logits,
            prefills=_prefill_limits(config),
            cache_groups=executor.cache_groups,
            takes_spans=executor.takes_spans,
        )
        self._images = ImageQueue(executor.vision) if executor.vision else None
        if executor.expert_usage:
            executor.expert_usage.clear()  # of the steps that were not those of requests
        self.scheduler = Scheduler(pool, limits, self._images)
        self._beams = BeamDriver(self.scheduler)
        self.adapters = Adapters(executor, config.max_loras, self._adapters_in_use)
        self._grammars = grammars
        self._compiling = CompilationQueue()
        self.remote: RemotePrefill | None = None
        self.jobs: PrefillJobs | None = None
        self._steps: deque[tuple[Step, int]] = deque()  # launched steps and their numbers of tokens
        self._running = (0, 0.0)  # tokens and start (time.monotonic) of the running step, or of the last one
        self._slowest_token_s = 0.0  # seconds a token of the slowest step so far
        self.token_s = 0.0  # seconds of a token in recent steps with prompts; 0: unknown
        self._num_steps = self._num_generated_tokens = self._num_dropped = self._num_wasted_tokens = 0
        self._step_time_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether there is no request."""
        return self.scheduler.is_idle and not self._compiling

    def serve_prefills(self, jobs: PrefillJobs) -> None:
        """Compute the prompts of `jobs`: those of decode instances or of other replicas."""
        self.jobs = jobs

    def pull_prefills(self, remote: RemotePrefill | None) -> None:
        """Let later requests pull the blocks of their prompts from prefill instances or other replicas."""
        self.remote = remote

    def add(self, request: Request, replay: bool = False) -> None:
        """Add a request. Raises RequestError if it is refused. A request for a structured output may also be refused
        later, by an Update, if its grammar does not compile."""
        if request.sampling.adapter:
            self.adapters.ensure_loaded(request.sampling.adapter)
        if request.sampling.structured_output:
            assert self._grammars
            if len(self._compiling) >= self.scheduler.limits.max_waiting and not replay:
                raise queue_full(len(self._compiling), self.scheduler.limits.max_waiting)
            self._compiling.add(request, replay, self._grammars.begin(request))
        else:
            self._enter(request, replay)

    def drop(self, request_id: str, is_complete: bool = False) -> None:
        """Drop a request; unknown ids are ignored. `is_complete`: the answer is complete, for example by a stop string,
        so its tokens are not wasted."""
        running = self.scheduler.running.get(request_id)
        num_computed = running.num_computed - running.num_cached if running else 0
        compilation = self._compiling.drop(request_id)
        if compilation and not compilation.wanted and self._grammars:
            self._grammars.cancel(compilation.grammars)
        if compilation or self._beams.drop(request_id):
            self._num_dropped += 1
            self._num_wasted_tokens += 0 if is_complete else num_computed
            self._check_when_idle()

    def has_begun(self, request_id: str) -> bool:
        """Return whether a request has started to run, or has ended. A preempted request has started."""
        if request_id in self._compiling:
            return False
        request = self.scheduler.waiting.get(request_id)
        return request is None or request.num_preemptions > 0 or request.num_new_tokens > 0

    def take_long_compilations(self) -> list[str]:
        """Return the ids of requests whose compilation has become long since the last call."""
        return self._compiling.take_long() if self._compiling else []

    def step(self) -> list[Update]:
        """Wait for the running step, launch the next one and return the updates of the first, which can be sent while
        the second runs. If the executor and the scheduler can run ahead, launch before waiting."""
        runs_ahead = bool(self._steps) and self.executor.runs_ahead and self.scheduler.may_run_ahead()
        if runs_ahead:
            self._poll()  # not after waiting, because the updates would wait for it
            if self.scheduler.may_run_ahead():  # unless a prompt that has been pulled must wait for the step
                self._launch()
        updates = self._collect() if self._steps else []
        if not runs_ahead:
            self._poll()
        if self._grammars and self._grammars.is_busy:
            self._grammars.poll()
        if self._compiling:
            updates += self._take_compiled()
        has_step = bool(self._steps) or self._launch()
        images = self._images if self._images and self._images.is_busy else None
        if images:
            images.advance()
        if not has_step and not self.is_idle:
            images.wait(WAIT_S) if images else self._wait()
        return updates

    def _enter(self, request: Request, replay: bool) -> None:
        """Add a request to the scheduler, whose prompt another instance may compute."""
        self._beams.add(request, replay)
        if self.remote:
            self.remote.consider(request)

    def _poll(self) -> None:
        """Note what has become of the prompts that other instances compute, or that are computed for them."""
        if self.remote:
            self.remote.poll()
        if self.jobs:
            self.jobs.poll()

    def _wait(self) -> None:
        """Wait for what the requests wait for: grammars, or blocks that are pulled or leased."""
        if self._grammars and self._grammars.is_busy:
            self._grammars.poll(WAIT_S)
        elif self.remote and self.remote.num_open:
            self.remote.wait(WAIT_S)
        else:
            assert self.jobs and self.jobs.num_open, "requests wait, but none can be computed"
            time.sleep(WAIT_S)

    def _adapters_in_use(self) -> set[str]:
        """Return the ids of adapters that requests need. Forks have the same adapter as their request."""
        requests = (*self.scheduler.running.values(), *self.scheduler.waiting, *self._compiling.requests)
        return {request.sampling.adapter[0] for request in requests if request.sampling.adapter}

    def _mask(self, step: Step) -> None:
        assert self._grammars
        masks = None
        try:
            masks = self._grammars.masks(self.scheduler.mask_rows(step.drafts()))
        finally:
            step.mask(masks)  # after an error, too, because the thread of the step waits for it

    def _take_compiled(self) -> list[Update]:
        """Add the requests whose grammars are compiled to the scheduler. Return updates for those that are refused."""
        refused = []
        for compiled in self._compiling.take_ready():
            wanted = compiled.wanted
            try:
                compiled.enter()
                self._enter(compiled.request, compiled.is_replay)
                for request_id in compiled.dropped:
                    self._beams.drop(request_id)
            except RequestError as error:
                failure = error.with_traceback(None)  # its frames have the updates, which would keep all requests alive
                refused += [Update(request, (), None, FAILED, failure) for request in wanted]
        return refused

    def stats(self) -> dict[str, float]:
        """Return the fields of `Stats`, the counts of drafts by position and those of chosen experts. May be called
        while another thread is in `step`."""
        scheduler, (num_tokens, began) = self.scheduler, self._running
        stats = Stats(
            **asdict(scheduler.counters),
            **asdict(self.remote.counters if self.remote else PullCounters()),
            **asdict(self._images.counters if self._images else ImageCounters()),
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_blocks=scheduler.pool.num_blocks,
            num_blocks_held=scheduler.pool.num_held,
            num_prefill_instances=self.remote.num_connected if self.remote else 0,
            block_size=scheduler.pool.block_size,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated_tokens,
            num_dropped=self._num_dropped,
            num_wasted_tokens=self._num_wasted_tokens,
            step_time_s=self._step_time_s,
            step_age_s=time.monotonic() - began if self._steps else 0.0,
            step_limit_s=STEP_MARGIN * num_tokens * self._slowest_token_s,
            fingerprint=self.fingerprint,
        )
        drafts, experts = self.executor.draft_counts, self.executor.expert_usage
        return {**asdict(stats), **(drafts.stats() if drafts else {}), **(experts.stats() if experts else {})}

    def _launch(self) -> bool:
        batch = self.scheduler.next_batch(time.time(), self.executor.max_drafts)
        if batch is None:
            return False
        launched_at, num_tokens = time.monotonic(), batch.num_tokens
        step = self.executor.launch(batch)
        if not self._steps:
            self._running = num_tokens, launched_at
        self._steps.append((step, num_tokens))
        if batch.has_mask:
            self._mask(step)
        return True

    def _collect(self) -> list[Update]:
        step, num_tokens = self._steps[0]
        output = step.result()
        self._steps.popleft()
        now = time.monotonic()
        # A part of an image that was launched before the step is not a part of it.
        duration_s = now - max(self._running[1], min(now, self._images.ended_at if self._images else 0.0))
        if self._steps:
            self._running = self._steps[0][1], now
        self._step_time_s += duration_s
        self._slowest_token_s = max(self._slowest_token_s, duration_s / num_tokens)
        if num_tokens >= MEASURED_TOKENS:
            token_s = duration_s / num_tokens
            self.token_s += (token_s - self.token_s) * (TOKEN_S_WEIGHT if self.token_s else 1.0)
        self._num_steps += 1
        updates = self._beams.advance(self.scheduler.apply(output))
        if self.jobs:
            updates = self.jobs.take(updates)
        self._num_generated_tokens += sum([len(update.token_ids) for update in updates])
        self._check_when_idle()
        return updates

    def _check_when_idle(self) -> None:
        num_holders = (self.remote.num_open if self.remote else 0) + (self.jobs.num_open if self.jobs else 0)
        if self.is_idle and not num_holders:  # they hold blocks without a request
            self.scheduler.check()


def _prefill_limits(config: Config) -> PrefillLimits | None:
    if not (config.max_num_partial_prefills or config.max_long_partial_prefills):
        return None
    max_prefills = config.max_num_partial_prefills or config.batch_size
    return PrefillLimits(max_prefills, config.max_long_partial_prefills or 1, config.long_prefill_tokens)
