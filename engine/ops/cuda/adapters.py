"""Contributions of LoRA adapters to a product whose rows have different adapters: y += B (A x).

Rows with the same adapter are processed a few at a time, in groups that the host has formed (`groups_of`). The order of
each sum depends on positions only, so a row has the same result in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs

ROWS = 16  # of a group
WIDTH = 1024  # columns of A that a program multiplies with
COLUMNS = 128  # outputs of a program
DEPTH = 128
NO_ADAPTER = -1
SMALLEST_RANK = 16  # that the tensor cores take


class Layer(NamedTuple):
    """Matrices of all adapters for one product, by slot. If several layers are stacked into one, each has an A of its
    own and a part of the outputs.
    """

    a: Tensor  # [slots, parts, R, K]
    b: Tensor  # [slots, N, R]
    blocks: Tensor  # i32 [blocks of outputs, 3]: the part, the first output and the one after the part's last

    @classmethod
    def empty(cls, sizes: list[int], width: int, room: tuple[int, int], like: Tensor) -> Layer:
        """Return a layer of zeros. `sizes` are the numbers of outputs of the parts; `room` is the number of slots and
        the maximum rank.
        """
        num_slots, rank = room[0], max(SMALLEST_RANK, next_power_of_2(room[1]))
        ends = np.cumsum(sizes).tolist()
        blocks = [
            (part, first, end)
            for part, (end, size) in enumerate(zip(ends, sizes, strict=True))
            for first in range(end - size, end, COLUMNS)
        ]
        return cls(
            like.new_zeros(num_slots, len(sizes), rank, width),
            like.new_zeros(num_slots, ends[-1], rank),
            torch.tensor(blocks, dtype=torch.int32, device=like.device).view(-1, 3),
        )


def num_groups(num_rows: int, num_slots: int) -> int:
    """Return the maximum number of groups of `num_rows` rows, however the adapters are distributed."""
    return num_rows // ROWS + min(num_rows, num_slots)


def groups_of(slot_of_row: np.ndarray, num_rows: int, num_slots: int) -> np.ndarray:
    """Return the groups as i32: the slot of each group, then ROWS rows of each, padded with NO_ADAPTER. `num_rows`
    includes the padding rows behind those of `slot_of_row`.
    """
    count, at = num_groups(num_rows, num_slots), 0
    slots, rows = np.full(count, NO_ADAPTER, np.int32), np.full((count, ROWS), NO_ADAPTER, np.int32)
    for slot in np.unique(slot_of_row[slot_of_row >= 0]):
        those = np.flatnonzero(slot_of_row == slot)
        taken = -(-len(those) // ROWS)
        slots[at : at + taken] = slot
        rows[at : at + taken].reshape(-1)[: len(those)] = those
        at += taken
    return np.concatenate([slots, rows.reshape(-1)])


def add_adapters(y: Tensor, x: Tensor, layer: Layer, groups: Tensor) -> None:
    """Add the adapters' contribution to y [T, N] in place, for x [T, K]. `groups` is the result of `groups_of`."""
    (_, parts, rank, width), count = layer.a.shape, len(groups) // (ROWS + 1)
    if not count:
        return
    splits = cdiv(width, WIDTH)
    inner = x.new_empty(splits, count, parts, ROWS, rank, dtype=torch.float32)
    rows = groups[count:]
    _shrink[(count, parts, splits)](x, layer.a, groups, rows, inner, width, ROWS, rank, WIDTH, DEPTH, **PDL)
    _expand[(count, len(layer.blocks))](
        inner, layer.b, layer.blocks, groups, rows, y, y.shape[1], parts, ROWS, rank, COLUMNS, splits, **PDL
    )


@kernel
def _shrink(
    x, a, slots, rows, inner, width,
    ROWS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute A x of one group, for one part, from WIDTH columns."""
    begin_next()
    wait_for_inputs()
    group, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + group)
    if slot >= 0:
        m, r, k = tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, DEPTH)
        row = tl.load(rows + group * ROWS + m).to(tl.int64)
        matrix = a + ((slot.to(tl.int64) * tl.num_programs(1) + part) * RANK + r)[:, None] * width
        sums = tl.zeros([ROWS, RANK], tl.float32)
        for start in range(split * WIDTH, tl.minimum(split * WIDTH + WIDTH, width), DEPTH):
            is_in = (start + k < width)[None, :]
            values = tl.load(x + row[:, None] * width + start + k[None, :], mask=(row >= 0)[:, None] & is_in, other=0)
            weights = tl.load(matrix + start + k[None, :], mask=is_in, other=0)
            sums = tl.dot(values, tl.trans(weights), sums, input_precision="ieee")
        at = ((split * tl.num_programs(0) + group) * tl.num_programs(1) + part) * ROWS + m
        tl.store(inner + at[:, None] * RANK + r[None, :], sums)


@kernel
def _expand(
    inner, b, blocks, slots, rows, y, num_out, num_parts,
    ROWS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add B times the result of `_shrink` for one group to y, for a block of outputs."""
    begin_next()
    wait_for_inputs()
    group, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + group)
    if slot >= 0:
        m, r = tl.arange(0, ROWS), tl.arange(0, RANK)
        part, first, end = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
        n = first + tl.arange(0, COLUMNS)
        row = tl.load(rows + group * ROWS + m).to(tl.int64)
        weights = tl.load(b + (slot.to(tl.int64) * num_out + n)[:, None] * RANK + r, mask=(n < end)[:, None], other=0)
        hidden = tl.zeros([ROWS, RANK], tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((split * tl.num_programs(0) + group) * num_parts + part) * ROWS + m
            hidden += tl.load(inner + at[:, None] * RANK + r[None, :])
        at = y + row[:, None] * num_out + n[None, :]
        is_in = (row >= 0)[:, None] & (n < end)[None, :]
        added = tl.dot(hidden.to(weights.dtype), tl.trans(weights), input_precision="ieee")
        tl.store(at, tl.load(at, mask=is_in, other=0).to(tl.float32) + added, mask=is_in)
