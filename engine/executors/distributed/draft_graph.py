"""The graph of an MTP layer or an EAGLE-3 head on all ranks: each computes its share, and the ops of the graph sum the
partial results, as in a step of the model. The first rank alone decides what is computed and verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.executors.device_executor import DeviceExecutor
from engine.executors.speculation.draft_model import DraftGraph


class DraftGraphOfRanks:
    """A graph that drafts, of which every rank has its share. Each call is sent to the other ranks."""

    def __init__(self, first: DraftGraph, call: Callable[[str, Any, Callable[[], Any]], Any]):
        """Take the graph of the first rank. `call` sends the name of a method and its argument to the other ranks, for
        their `ServedDraftGraph`, makes the call that it is given on the first one, and returns the result."""
        self.block_bytes, self.states_width = first.block_bytes, first.states_width
        self._first, self._call = first, call

    def allocate(self, num_blocks: int) -> None:
        self._call("allocate", num_blocks, lambda: self._first.allocate(num_blocks))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._call("copy", pairs, lambda: self._first.copy(pairs))

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run the graph on all ranks and return the outputs of the first one."""
        arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in inputs.items()}
        outputs: Mapping[str, np.ndarray] = self._call("run", arrays, lambda: self._first.run(inputs))
        return outputs


class ServedDraftGraph:
    """The graph that drafts on another rank, which makes the calls that the first rank sends."""

    def __init__(self, executor: DeviceExecutor):
        """Take the executor of this rank, or of this host."""
        self._executor = executor
        self._graph: DraftGraph | None = None

    def call(self, method: str, argument: Any) -> None:
        if method == "load":
            self._graph = self._executor.load_draft_graph(argument)
            return
        if method == "run":
            argument = {
                name: np.frombuffer(content, dtype).reshape(shape) for name, (dtype, shape, content) in argument.items()
            }
        call, thread = getattr(self._graph, method), self._executor.thread
        _ = thread.submit(call, argument).result() if thread else call(argument)
