"""Ways to compute a launched step: in a separate thread, or when its result is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from engine.core.types import Batch, StepOutput

Mask = np.ndarray | None  # u32 [S, ceil(V / 32)], see `engine.core.executor.Step.mask`
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
