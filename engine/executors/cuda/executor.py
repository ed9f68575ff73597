"""One GPU as an executor: what a step needs goes up in one copy, the graph runs, tokens are chosen on the device.

`launch` returns while all that is still to come. The token that a step chooses stays on the device, too, where the next
step finds it: that one can be launched before the host knows the token (`Row.token_ids` is then PENDING).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine import graph as graphs
from engine.core.types import PENDING, Batch, StepOutput
from engine.errors import ConfigError
from engine.executors.cuda import weights
from engine.executors.cuda.cache import Caches
from engine.executors.cuda.decode_graphs import DecodeGraphs
from engine.executors.cuda.program import Program
from engine.executors.cuda.transfer import Download, Uploads
from engine.executors.slots import Choices, Slots
from engine.exporting.manifest import Manifest, rank_dir
from engine.models.constants import constants_of
from engine.ops import cuda
from engine.ops.cuda.sampler import sample
from engine.ops.sampling_rows import SampledRows, SamplingRows
from engine.settings.config import Config

log = logging.getLogger(__name__)


class CudaExecutor:
    """`device`: the GPU that torch calls the current one; with the Triton language's interpreter also the CPU."""

    runs_ahead = True

    def __init__(self, graph_dir: Path, config: Config, device: str = "cuda"):
        self._device = torch.device(device)
        self._config = config
        model = Manifest.read(graph_dir)
        self._program = _load(graph_dir, model, self._device)
        self._caches = Caches(model.graph().caches, self._device)
        self.block_size, self.block_bytes = model.block_size, self._caches.block_bytes
        max_blocks = -(-model.max_seq_len // self.block_size)
        self._slots = Slots(config.batch_size, max_blocks, self.block_size, model.vocab_size)
        self._last_tokens = torch.zeros(config.batch_size, dtype=torch.int32, device=self._device)
        self._uploads = Uploads(self._device)
        self._graphs = DecodeGraphs(config, max_blocks, self._device)
        self._vocab_size = model.vocab_size

    def free_bytes(self) -> int:
        """GPU_MEMORY_UTILIZATION of the device, less what everything but the cache has needed so far."""
        if self._device.type != "cuda":
            return 1 << 30
        free, total = torch.cuda.mem_get_info(self._device)
        foreign = total - free - torch.cuda.memory_reserved(self._device)  # the context, the captured graphs, others
        own = torch.cuda.max_memory_allocated(self._device) - self._caches.num_bytes
        logits = 2 * self._config.batch_size * self._vocab_size * 4  # of the largest step, and a copy
        return max(0, int(total * self._config.gpu_memory_utilization) - foreign - own - logits)

    def allocate(self, num_blocks: int) -> None:
        self._graphs.clear()
        self._caches.allocate(num_blocks)
        self._graphs.capture(self._decode, self._caches.nobodys_block)

    def launch(self, batch: Batch) -> CudaStep:
        self._slots.place(batch)
        for copy in batch.copies:
            self._caches.copy(copy)
        return CudaStep(self, batch)

    def close(self) -> None:
        self._graphs.clear()
        self._caches.clear()
        del self._program

    # What a step is made of

    def run(self, batch: Batch, choices: Choices, rows: SamplingRows) -> tuple[Tensor, dict[str, Tensor]]:
        """Begins the graph of a step: its logits, and all that was sent for it."""
        inputs = self._slots.graph_inputs(batch)
        _mark_pending(batch, inputs)
        is_decode = len(inputs["token_ids"]) == len(batch.rows) == len(choices.slots)
        size = self._graphs.size_for(len(batch.rows)) if is_decode else None
        if size is not None:
            inputs = self._graphs.padded(inputs, size)
        sampling = {name: value for name, value in vars(rows).items() if value is not None}
        sent = self._uploads.send(inputs | sampling | {"slots": np.array(choices.slots, np.int64)})
        if size is not None:
            return self._graphs.replay(sent, size)[: len(batch.rows)], sent
        return self._decode(sent), sent

    def choose(self, logits: Tensor, choices: Choices, rows: SamplingRows, sent: Mapping[str, Tensor]) -> Download:
        """Begins to choose tokens. Logits are of every row that is wanted, in the order of `choices`."""
        if choices.logit_rows is not None:
            logits = logits[torch.tensor(choices.logit_rows, device=self._device)]
        on_device = SamplingRows(**{field.name: sent.get(field.name) for field in fields(SamplingRows)})
        has_changes = rows.mask is not None or len(rows.bias_ids) > 0 or len(rows.seen_ids) > 0
        most = int(rows.num_logprobs.max())
        sampled = sample(logits, on_device, has_changes=has_changes, max_logprobs=most)
        self._last_tokens.index_copy_(0, sent["slots"], sampled.token_ids)
        wanted = vars(sampled) if most >= 0 else {"token_ids": sampled.token_ids}
        return Download(wanted)

    def _decode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        token_ids = cuda.last_tokens_in(inputs["token_ids"], self._last_tokens)
        return self._program({**inputs, **self._caches.tensors, "token_ids": token_ids})


class CudaStep:
    """A step that was launched. Its tokens are chosen as soon as its masks are there, if it has any."""

    def __init__(self, executor: CudaExecutor, batch: Batch):
        self._executor, self._batch = executor, batch
        self._slots = executor._slots
        self._choices = Choices.of(batch)
        self._download: Download | None = None
        self._rows = self._slots.sampling_rows(self._choices)
        self._slots.expect(self._choices)
        self._logits, self._sent = executor.run(batch, self._choices, self._rows)
        if self._choices.slots and not batch.has_mask:
            self._choose()

    def mask(self, bits: np.ndarray) -> None:
        self._rows.mask = bits
        self._sent |= self._executor._uploads.send({"mask": bits})
        self._choose()

    def result(self) -> StepOutput:
        if self._download is None:
            if self._executor._device.type == "cuda":
                torch.cuda.synchronize()
            return StepOutput([], [])
        found = self._download.wait()
        sampled = SampledRows.empty(len(self._choices.slots), 0)
        for name, array in found.items():
            setattr(sampled, name, array)
        return self._slots.accept(self._batch, self._rows, sampled)

    def _choose(self) -> None:
        self._download = self._executor.choose(self._logits, self._choices, self._rows, self._sent)


def _mark_pending(batch: Batch, inputs: dict[str, np.ndarray]) -> None:
    """-2 - slot stands for the token that was chosen last for a slot (`cuda.last_tokens_in`)."""
    is_pending = inputs["token_ids"] == PENDING
    if is_pending.any():
        slots = np.array([row.slot for row in batch.rows], np.int32)
        slot_of_token = np.repeat(slots, np.diff(inputs["query_starts"]))
        inputs["token_ids"] = np.where(is_pending, -2 - slot_of_token, inputs["token_ids"])


def _load(graph_dir: Path, model: Manifest, device: torch.device) -> Program:
    started = time.monotonic()
    files, directory = model.graph(), rank_dir(graph_dir)
    graph = graphs.read_graph(directory / files.program, files.outputs)
    size = weights.num_bytes(graph)
    try:
        if files.parameters:
            params = weights.load(graph, graphs.read_params(directory / files.parameters, graph), device)
        else:
            params = weights.draw(graph, constants_of(graph_dir), device)
    except torch.cuda.OutOfMemoryError:
        free, total = (number / 2**30 for number in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"the weights need {size / 2**30:.1f} GiB, the GPU has {total:.1f} GiB, of which {free:.1f} are free"
        ) from None
    seconds = time.monotonic() - started
    log.info("%.1f GB of weights on the device in %.1f s", size / 1e9, seconds)
    return Program(graph, params)
