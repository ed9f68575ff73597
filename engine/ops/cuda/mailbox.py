"""What a recorded step is told, and the tokens that it answers with, in memory of the host which its own kernels read
and write: each copy between host and device would cost the host a call and the device a pause of microseconds.

There is one for each step in flight, taken by turns, as a step is told its numbers while the one before it runs. A
recorded kernel has the same arguments every time, so the device counts for itself whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, kernel, wait_for_inputs

PROGRAMS = 16  # that take a step's numbers, which is how the device counts steps
BLOCK = 512


class Mailbox:
    """`num_turns`: of steps that were launched and are not known to have ended, the most. `num_numbers`: i32, the most
    that a step is told, its tables included; `num_tokens`: the most that it chooses."""

    def __init__(self, num_turns: int, num_numbers: int, num_tokens: int, device: torch.device):
        self._num_turns, is_gpu = num_turns, device.type == "cuda"
        # Each time the width of the tables, then the numbers, then the tables, row by row.
        self._told = torch.empty(num_turns, 1 + num_numbers, dtype=torch.int32, pin_memory=is_gpu)
        self._answers = torch.empty(num_turns, num_tokens, dtype=torch.int32, pin_memory=is_gpu)
        self._hosts = self._told.numpy()
        self._taken = torch.zeros(1, dtype=torch.int64, device=device)  # by how many programs
        self._turn = -1  # of the last step that was told anything

    def tell(self, numbers: Sequence[np.ndarray], tables: np.ndarray) -> None:
        """The step that is launched next: i32, `numbers` one after another, and a row of blocks for each request."""
        self._turn = (self._turn + 1) % self._num_turns
        host, parts = self._hosts[self._turn], [*numbers, tables.reshape(-1)]
        host[0] = tables.shape[1]
        np.concatenate(parts, out=host[1 : 1 + sum([len(part) for part in parts])])

    def take(self, numbers: Tensor, tables: Tensor) -> None:
        """What the step was told. `tables` may have longer rows, whose rest stays as it is."""
        _take[(PROGRAMS,)](
            self._told, self._taken, numbers, tables, self._told.stride(0), len(numbers), *tables.shape,
            self._num_turns, PROGRAMS, BLOCK, **PDL,
        )  # fmt: skip

    def answer(self, token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
        """The tokens that the step has chosen; also into `last_tokens` at its slots, i64."""
        _answer[(triton.cdiv(len(token_ids), BLOCK),)](
            token_ids, slots, last_tokens, self._taken, self._answers, len(token_ids), self._answers.stride(0),
            self._num_turns, PROGRAMS, BLOCK, **PDL,
        )  # fmt: skip

    def answers(self, count: int) -> Tensor:
        """Of the step that was told last, when it has ended; overwritten by the one after the next."""
        return self._answers[self._turn, :count]


@kernel
def _take(
    told, taken, numbers, tables, size, num_numbers, num_rows, row_len,
    TURNS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    step = tl.atomic_add(taken, 1) // PROGRAMS
    told += step % TURNS * size
    width = tl.load(told)  # what the host wrote before a launch its kernels see, so no load needs to be volatile
    end = num_numbers + num_rows * width
    for start in range(tl.program_id(0) * BLOCK, end, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(told + 1 + at, mask=at < end, other=0)
        tl.store(numbers + at, values, mask=at < num_numbers)
        cell = at - num_numbers
        tl.store(tables + cell // width * row_len + cell % width, values, mask=(cell >= 0) & (at < end))


@kernel
def _answer(
    token_ids, slots, last_tokens, taken, answers, count, most,
    TURNS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_next()
    wait_for_inputs()
    step = tl.load(taken) // PROGRAMS - 1
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(token_ids + row, mask=row < count, other=0)
    tl.store(last_tokens + tl.load(slots + row, mask=row < count, other=0), chosen, mask=row < count)
    tl.store(answers + step % TURNS * most + row, chosen, mask=row < count)
