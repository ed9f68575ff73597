"""Steps of a `SpeculativeExecutor`, with drafts and without, and the queue of batches for the former."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from engine.core.types import Batch, Step, StepOutput


@dataclass
class DraftedStep:
    """A step with drafts. It may still wait for the steps before it."""

    output: Future[StepOutput] = field(default_factory=Future)
    drafted: Future[Mapping[int, Sequence[int]]] = field(default_factory=Future)
    masked: Future[Any] = field(default_factory=Future)
    follows: bool = False  # immediately another one, on an executor that runs ahead

    def drafts(self) -> Mapping[int, Sequence[int]]:
        return self.drafted.result()

    def mask(self, bits: Any) -> None:
        self.masked.set_result(bits)

    def result(self) -> StepOutput:
        return self.output.result()


class PlainStep:
    """A step without drafts, which was launched on the target executor. `finish` is called with its output."""

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


class BatchQueue:
    """Batches on the way to a thread, which may look at the next one before it takes it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Batch] = SimpleQueue()
        self._next: Batch | None = None

    def put(self, batch: Batch) -> None:
        self._queue.put(batch)

    def peek(self, timeout_s: float) -> Batch | None:
        """Return the next batch, which stays in the queue. Return None if none comes in time."""
        if self._next is None:
            with contextlib.suppress(Empty):
                self._next = self._queue.get(timeout=timeout_s)
        return self._next

    def take(self) -> None:
        """Take the next batch, which is there."""
        if self._next is None:
            self._queue.get(block=False)
        self._next = None
