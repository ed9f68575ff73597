"""Ways to compute a launched step: in a separate thread, when its result is requested, or on another executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from engine.core.types import Batch, Step, StepOutput

Mask = np.ndarray | None  # u32 [S, ceil(V / 32)], see `engine.core.types.Step.mask`
Compute = Callable[[Batch, Callable[[], Mask]], StepOutput]


class StepInThread:
    """Step that is computed in `thread`. `compute` receives a function that waits for the mask; it need not be called
    for a batch without one."""

    def __init__(self, thread: ThreadPoolExecutor, batch: Batch, compute: Compute):
        self._masks: SimpleQueue[Mask] = SimpleQueue()
        if not batch.has_mask:
            self._masks.put(None)
        self._future = thread.submit(compute, batch, self._masks.get)

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: np.ndarray) -> None:
        self._masks.put(bits)

    def result(self) -> StepOutput:
        return self._future.result()


class StepWhenAsked:
    """Step that is computed when `result` is called."""

    def __init__(self, compute: Callable[[Mask], StepOutput]):
        self._compute = compute
        self._mask: Mask = None

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: np.ndarray) -> None:
        self._mask = bits

    def result(self) -> StepOutput:
        return self._compute(self._mask)


class ComingBatches:
    """Batches on the way to a thread, which may look at the next one before it takes it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self._next: Batch | None = None

    def put(self, batch: Batch) -> None:
        self._queue.put(batch)

    def next(self, timeout_s: float) -> Batch | None:
        """Return the next batch, which stays there. Return None if none comes in time."""
        if self._next is None:
            with contextlib.suppress(Empty):
                self._next = self._queue.get(timeout=timeout_s)
        return self._next

    def take(self) -> None:
        """Take the next batch, which is there."""
        if self._next is None:
            self._queue.get(block=False)
        self._next = None


@dataclass
class DraftingStep:
    """A step of a `DraftingExecutor`. It may still wait for the steps before it."""

    output: Future[StepOutput] = field(default_factory=Future)
    drafted: Future[Mapping[int, Sequence[int]]] = field(default_factory=Future)
    masked: Future[Any] = field(default_factory=Future)
    follows: bool = False  # immediately another one, on an executor that runs ahead
    learn: Callable[[], None] = lambda: None  # from its times, once the next step is launched

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return self.drafted.result()

    def mask(self, bits: Any) -> None:
        self.masked.set_result(bits)

    def result(self) -> StepOutput:
        return self.output.result()


class PassedStep:
    """A step without drafts that was launched ahead, as if there were no `DraftingExecutor`."""

    def __init__(self, step: Step, finish: Callable[[StepOutput], None]):
        self._step, self._finish = step, finish
        self._output: StepOutput | None = None

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return {}

    def mask(self, bits: Any) -> None:
        self._step.mask(bits)

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._step.result()
            self._finish(self._output)
        return self._output

    @property
    def is_finished(self) -> bool:
        return self._output is not None
