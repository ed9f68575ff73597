"""LoRA adapters in memory reserved for them on the device, and the rows of a step that use each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.core.types import Batch
from engine.errors import ConfigError, InvalidRequest, escape_braces
from engine.executors.cuda.program import GROUPS, LOGIT_GROUPS
from engine.models.adapters import Adapter, AdapterError, network_of, read_pairs
from engine.models.layers import Linear
from engine.models.weights import found_in
from engine.ops.cuda.adapters import NO_ADAPTER, Layer, groups_of
from engine.settings.config import Config


class CudaAdapters:
    """Loaded LoRA adapters of one rank. Owns MAX_LORAS slots of device memory for them.

    `place` is the rank and the number of ranks. `like` is a tensor with the dtype and device of the activations. Raises
    ConfigError when the GPU has no room.
    """

    def __init__(self, graph_dir: Path, place: tuple[int, int], config: Config, like: Tensor):
        self._network = network_of(graph_dir, *place)
        self._num_slots, self._max_rank = config.max_loras, config.max_lora_rank
        self._slot_of: dict[str, int] = {}  # by adapter id
        self._parts: dict[tuple[str, int], int] = {}  # by matrix name and the part's first output
        self.layers: dict[str, Layer] = {}  # by matrix name
        try:
            self._make_room(like)
        except torch.cuda.OutOfMemoryError:
            what = f"MAX_LORAS({self._num_slots}) adapters of MAX_LORA_RANK({self._max_rank})"
            raise ConfigError(f"the GPU has no room for {what} beside the weights") from None

    def _make_room(self, like: Tensor) -> None:
        for linear in found_in(self._network, Linear):
            name, width = linear.weight.name, linear.weight.shape[1]
            sizes = [part.rank_shape[0] for part in linear.weight.parts]
            self._parts |= {(name, sum(sizes[:part])): part for part, size in enumerate(sizes) if size}
            self.layers[name] = Layer.empty(sizes, width, (self._num_slots, self._max_rank), like)

    def load(self, adapter: Adapter) -> None:
        """Copy an adapter's matrices into a free slot, in the stream's order after the steps that were launched. Raises
        InvalidRequest."""
        if adapter[0] in self._slot_of:
            return
        try:
            pairs = read_pairs(adapter, self._network, self._max_rank)
        except AdapterError as error:
            raise InvalidRequest(escape_braces(str(error)), field="lora_name") from None
        slot = min(set(range(self._num_slots)) - set(self._slot_of.values()))
        for layer in self.layers.values():
            layer.a[slot] = 0
            layer.b[slot] = 0
        for pair in pairs:
            layer, last = self.layers[pair.parameter], pair.first + pair.b.shape[1]
            if pair.b.size:
                part = self._parts[pair.parameter, pair.first]
                layer.a[slot, part, : len(pair.a)] = torch.from_numpy(pair.a).to(layer.a)
                layer.b[slot, pair.first : last, : len(pair.b)] = torch.from_numpy(pair.b).to(layer.b).t()
        self._slot_of[adapter[0]] = slot

    def drop(self, adapter_id: str) -> None:
        self._slot_of.pop(adapter_id, None)

    def groups(
        self, adapter_of: Mapping[int, str], batch: Batch, inputs: Mapping[str, np.ndarray], sizes: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """Group the tokens and the logits of a step by the adapters of their slots. Return no arrays when no row has an
        adapter. `sizes` are the numbers of tokens and of logits, padding included."""
        of_row = np.array([self._slot_of.get(adapter_of.get(row.slot, ""), NO_ADAPTER) for row in batch.rows], np.int32)
        if (of_row == NO_ADAPTER).all():
            return {}
        of_token = np.repeat(of_row, np.diff(inputs["query_starts"]))
        return self._groups(of_token, of_token[inputs["logit_rows"]], sizes)

    def no_groups(self, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return the groups of a step that consists of padding only."""
        padding = np.zeros(0, np.int32)
        return self._groups(padding, padding, sizes)

    def _groups(self, of_token: np.ndarray, of_logits: np.ndarray, sizes: tuple[int, int]) -> dict[str, np.ndarray]:
        num_tokens, num_logits = sizes
        return {
            GROUPS: groups_of(of_token, num_tokens, self._num_slots),
            LOGIT_GROUPS: groups_of(of_logits, num_logits, self._num_slots),
        }
