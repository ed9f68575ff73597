"""The graph of a draft model, an MTP layer or an EAGLE-3 head on the CPU, with its KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.executors.cpu.program import CpuProgram, allocated
from engine.models.kv_cache import CacheSpec
from engine.models.layers import PREVIOUS_STATES


class CpuDraftGraph:
    """`DraftGraph` of one rank. Owns its program and its caches."""

    def __init__(self, program: CpuProgram, specs: Sequence[CacheSpec]):
        self.block_bytes = sum(spec.block_bytes for spec in specs)
        self.states_width = program.width_of(PREVIOUS_STATES)
        self.program = program
        self._specs = specs
        self._caches: dict[str, np.ndarray] = {}

    def allocate(self, num_blocks: int) -> None:
        self._caches.clear()
        self.program.set_caches({})  # otherwise the old caches would stay alive beside the new ones
        self._caches = {spec.name: allocated(spec.shape_of(num_blocks), spec.dtype) for spec in self._specs}
        self.program.set_caches(self._caches)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for each in self._caches.values():
                each[target] = each[source]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.program.run(inputs)
