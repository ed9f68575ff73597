"""Pinned host memory for the inputs and the sampled tokens of captured steps. Kernels of the CUDA graph read and write
it directly, because a copy between host and device would cost the host a call and the device a pause of microseconds.

Each step in flight has a buffer of its own, used in rotation, because the host writes the inputs of a step while the
previous one runs. A captured kernel always has the same arguments, so the device counts the steps to find its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, wait_for_inputs

PROGRAMS = 16  # programs that load the inputs of a step, which is how the device counts steps
BLOCK = 512


class StepBuffers:
    """Buffers of the steps in flight. `num_buffers` is the maximum number of steps in flight, `num_inputs` the maximum
    number of i32 inputs of a step including its block tables, `num_tokens` the maximum number of sampled tokens."""

    def __init__(self, num_buffers: int, num_inputs: int, num_tokens: int, device: torch.device):
        self._num_buffers, is_gpu = num_buffers, device.type == "cuda"
        # A buffer holds the width of the block tables, then the inputs, then the tables, row by row.
        self._inputs = torch.empty(num_buffers, 1 + num_inputs, dtype=torch.int32, pin_memory=is_gpu)
        self._tokens = torch.empty(num_buffers, num_tokens, dtype=torch.int32, pin_memory=is_gpu)
        self._host_inputs = self._inputs.numpy()
        self._num_loads = torch.zeros(1, dtype=torch.int64, device=device)  # programs that have loaded inputs so far
        self._current = -1  # buffer of the last step whose inputs were written

    def write(self, numbers: Sequence[np.ndarray], tables: np.ndarray) -> None:
        """Write the inputs of the step that is launched next: `numbers` i32, concatenated, and the block tables, i32
        [rows, width]."""
        self._current = (self._current + 1) % self._num_buffers
        host, parts = self._host_inputs[self._current], [*numbers, tables.reshape(-1)]
        host[0] = tables.shape[1]
        np.concatenate(parts, out=host[1 : 1 + sum([len(part) for part in parts])])

    def load(self, numbers: Tensor, tables: Tensor) -> None:
        """Launch the kernel that copies the inputs of the step to the device. Rows of `tables` may be longer than those
        that were written; the rest of each row is not changed."""
        _load_inputs[(PROGRAMS,)](
            self._inputs, self._num_loads, numbers, tables, self._inputs.stride(0), len(numbers), *tables.shape,
            self._num_buffers, PROGRAMS, BLOCK, **PDL,
        )  # fmt: skip

    def store(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor, chosen: Tensor) -> None:
        """Launch the kernel that copies the sampled tokens to the host, to `last_tokens` at the slots, i64, and to the
        beginning of `chosen`."""
        _store_tokens[(cdiv(len(token_ids), BLOCK),)](
            token_ids, slots, last_tokens, chosen, self._num_loads, self._tokens, len(token_ids),
            self._tokens.stride(0),
            self._num_buffers, PROGRAMS, BLOCK, **PDL,
        )  # fmt: skip

    def tokens(self, count: int) -> Tensor:
        """Return the sampled tokens of the step whose inputs were written last. They are valid once it has ended, until
        its buffer is used again."""
        return self._tokens[self._current, :count]


@kernel
def _load_inputs(
    inputs, num_loads, numbers, tables, size, num_numbers, num_rows, row_len,
    BUFFERS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    step = tl.atomic_add(num_loads, 1) // PROGRAMS
    inputs += step % BUFFERS * size
    width = tl.load(inputs)  # kernels see what the host wrote before their launch, so no load needs to be volatile
    end = num_numbers + num_rows * width
    for start in range(tl.program_id(0) * BLOCK, end, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(inputs + 1 + at, mask=at < end, other=0)
        tl.store(numbers + at, values, mask=at < num_numbers)
        cell = at - num_numbers
        tl.store(tables + cell // width * row_len + cell % width, values, mask=(cell >= 0) & (at < end))


@kernel
def _store_tokens(
    token_ids, slots, last_tokens, chosen, num_loads, tokens, count, stride,
    BUFFERS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    step = tl.load(num_loads) // PROGRAMS - 1
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sampled = tl.load(token_ids + row, mask=row < count, other=0)
    tl.store(last_tokens + tl.load(slots + row, mask=row < count, other=0), sampled, mask=row < count)
    tl.store(chosen + row, sampled, mask=row < count)
    tl.store(tokens + step % BUFFERS * stride + row, sampled, mask=row < count)
