"""The same traffic on a real engine, without Triton and HTTP: what its requests and its steps took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulate.replicas import Cluster, Result
from benchmarks.simulate.step_time import Work, work_of
from benchmarks.simulate.traffic import Arrival, answer_token, token_ids
from engine.core.executor import Executor, Step
from engine.core.loop import EngineLoop
from engine.core.types import Batch, Request, Sampling, StepOutput
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.cache import export_cached
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest, is_exported
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config


class Clock:
    """Wall clock of an engine with all cores."""

    num_threads = 0

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ProcessorClock(Clock):
    """Processor time of an engine with one thread, as if it had a core of its own. It goes on without waiting while
    there is no request. For a machine that does other work at the same time."""

    num_threads = 1

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return time.process_time() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds


class RecordingExecutor:
    """Executor that notes the work and the seconds of every step of another one. The tokens that it samples are
    replaced by those of the traffic, so that the next turn of a conversation finds its answer in the prefix cache.

    A step takes until the next one is launched, if that is in the same turn of the loop, because scheduling is a part
    of what a request waits for; otherwise until its result."""

    def __init__(self, executor: Executor, vocab_size: int, clock: Clock):
        self.steps: list[tuple[Work, float]] = []
        self._executor, self._vocab_size, self._clock = executor, vocab_size, clock
        self._prompt_lens: dict[int, int] = {}  # of slots
        self._launched: tuple[Step, Batch, float] | None = None
        self._ended: tuple[Work, float, float] | None = None  # with the times of launch and result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch) -> RecordingExecutor:
        for arrival in batch.arrivals:
            self._prompt_lens[arrival.slot] = arrival.prompt_len
        now = self._clock.now()
        if self._ended:
            self.steps.append((self._ended[0], now - self._ended[1]))
            self._ended = None
        self._launched = self._executor.launch(batch), batch, now
        return self

    def result(self) -> StepOutput:
        assert self._launched
        step, batch, launched_at = self._launched
        output = step.result()
        self._ended = work_of(batch), launched_at, self._clock.now()
        sampling = [row for row in batch.rows if row.num_sampled]
        indices = [row.start + len(row.token_ids) - self._prompt_lens[row.slot] for row in sampling]
        return output._replace(token_ids=[[answer_token(index) % self._vocab_size] for index in indices])

    def end_turn(self) -> None:
        """Note the step that ended in this turn of the loop, if no other one was launched."""
        if self._ended:
            work, launched_at, ended_at = self._ended
            self.steps.append((work, ended_at - launched_at))
            self._ended = None


class RealEngine:
    """An engine of this process with the CPU executor."""

    def __init__(self, model: Path, cluster: Cluster, clock: Clock):
        config = Config(batch_size=cluster.batch_size, device="cpu", cpu_threads=clock.num_threads)
        graph = model
        if not is_exported(model):
            graph = export_cached(model, Path(config.export_cache_dir).expanduser(), options_of(config, model))
        self._vocab_size = Manifest.read(graph).vocab_size
        self._config, self._num_blocks, self._clock = config, cluster.num_blocks, clock
        self._executor = make_executor(graph, config, owns_process=False)
        allocate_cache(self._executor, config, Manifest.read(graph).max_seq_len)
        self._executor.allocate(cluster.num_blocks)
        collect_garbage_seldom()

    def run(self, arrivals: Sequence[Arrival]) -> tuple[Result, list[tuple[Work, float]]]:
        """Return what the requests took, and the work and the seconds of each step. The prefix cache is empty at the
        start. As in `engine.link.server`, requests are read between two steps."""
        recorder = RecordingExecutor(self._executor, self._vocab_size, self._clock)
        loop = EngineLoop(recorder, self._num_blocks, self._config)
        waiting, result = deque(arrivals), Result()
        began_at: dict[str, float] = {}
        started = self._clock.now()
        while waiting or not loop.is_idle:
            now = self._clock.now() - started
            if loop.is_idle and waiting[0].at > now:
                self._clock.sleep(waiting[0].at - now)
            while waiting and waiting[0].at <= self._clock.now() - started:
                arrival = waiting.popleft()
                began_at[arrival.body["req_id"]] = arrival.at
                loop.add(self._request(arrival))
            updates = loop.step()
            now = self._clock.now() - started
            recorder.end_turn()
            for update in updates:
                request = update.request
                if request.num_new_tokens == 1:
                    result.ttft_s.append(now - began_at[request.request_id])
                if update.finish_reason:
                    result.e2e_s.append(now - began_at.pop(request.request_id))
        result.check(len(arrivals))
        stats = loop.stats()
        result.num_steps, result.hit_rate = (
            int(stats["num_steps"]),
            stats["num_cached_tokens"] / stats["num_prompt_tokens"],
        )
        return result, recorder.steps

    def close(self) -> None:
        self._executor.close()

    def _request(self, arrival: Arrival) -> Request:
        ids = [each % self._vocab_size for each in token_ids(arrival.body["messages"])]
        sampling = Sampling(arrival.num_tokens, min_new_tokens=arrival.num_tokens, temperature=0)
        return Request(arrival.body["req_id"], ids, len(ids), sampling)
