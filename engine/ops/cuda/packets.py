"""What ranks tell one another in few rows: written straight into each other's memory, four bytes of it in every packet
of eight, whose other half says which call it is of. Whoever waits looks at the packets themselves, so there is no
signal beside them and nothing to be put back afterwards.

A program has places of its own in the memory of every rank, and uses two sets of them by turns: when it writes into one
anew, every other rank has begun the call after the one that used it last, and so has read all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, kernel, wait_for_inputs

ROOM = 4096  # packets a program may send at once to each rank
MAX_PROGRAMS = 256  # times the other ranks: so many rows at once are still faster than any other way


class Mailbox(NamedTuple):
    """Packets of this rank and the others. All of it is zeros at first."""

    rank: int
    num_ranks: int
    memory: list[Tensor]  # of each rank, as this one sees it
    boxes: Tensor  # i64 [num_ranks]: its addresses
    calls: Tensor  # i32 [MAX_PROGRAMS]: how many each program has had

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        return MAX_PROGRAMS * 2 * num_ranks * ROOM * 8

    def takes(self, num_programs: int, num_words: int = 0) -> bool:
        """Whether so many programs can each send so many words."""
        return num_programs * (self.num_ranks - 1) <= MAX_PROGRAMS and num_words <= ROOM


def words_of(x: Tensor) -> int:
    """Words in a row of x, which has no half ones; ROOM + 1 where it has."""
    num_bytes = x.shape[1] * x.element_size()
    return ROOM + 1 if num_bytes % 4 else num_bytes // 4


def add_up(box: Mailbox, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    """The sum of x [T, N] over all ranks, in their order, f32 or bf16. With `residual`, to which the sum is added, and
    `weight`: the norm of that instead."""
    num_words, out = words_of(x), torch.empty_like(x)
    words = [None if each is None else each.view(torch.int32) for each in (x, residual, out)]
    block = triton.next_power_of_2(num_words)
    _add_up[(len(x),)](
        *words[:2], weight, words[2], box.boxes, box.calls, num_words, epsilon,
        box.rank, box.num_ranks, x.dtype == torch.bfloat16, residual is not None, ROOM, block,
        num_warps=max(4, block // 256), **PDL,
    )  # fmt: skip
    return out


def put_together(box: Mailbox, x: Tensor, width: int) -> Tensor:
    """x f32 [S, N] of each rank side by side, in their order: [S, width]."""
    num_rows, own = x.shape
    out = x.new_empty(num_rows, width)
    grid = num_rows, triton.cdiv(own, ROOM)
    _put_together[grid](
        x.view(torch.int32), out.view(torch.int32), box.boxes, box.calls, own, width,
        box.rank, box.num_ranks, ROOM, num_warps=16, **PDL,
    )  # fmt: skip
    return out


def of_first(box: Mailbox, numbers: Tensor) -> Tensor:
    """The first rank's i32 [T]."""
    out, block = torch.empty_like(numbers), min(triton.next_power_of_2(len(numbers)), ROOM)
    grid = (triton.cdiv(len(numbers), block),)
    _of_first[grid](
        numbers, out, box.boxes, box.calls, len(numbers), box.rank, box.num_ranks, ROOM, block, num_warps=4, **PDL
    )
    return out


@triton.jit
def _place(
    boxes, owner: tl.constexpr, source: tl.constexpr, program, call, NUM_RANKS: tl.constexpr, ROOM: tl.constexpr
):
    """Where in the memory of `owner` the packets of `source` are."""
    box = tl.load(boxes + owner).to(tl.pointer_type(tl.int64))
    return box + ((program.to(tl.int64) * 2 + (call & 1)) * NUM_RANKS + source) * ROOM


@triton.jit
def _send(words, is_in, at, boxes, program, call, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, ROOM: tl.constexpr):
    packets = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, NUM_RANKS):
        place = _place(boxes, (RANK + step) % NUM_RANKS, RANK, program, call, NUM_RANKS, ROOM)
        tl.store(place + at, packets, mask=is_in)


@triton.jit
def _received(
    is_in, at, boxes, source: tl.constexpr, program, call, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    place = _place(boxes, RANK, source, program, call, NUM_RANKS, ROOM)
    packets = tl.load(place + at, mask=is_in, other=0, volatile=True)
    while tl.max((is_in & ((packets >> 32).to(tl.int32) != call)).to(tl.int32), 0) != 0:
        packets = tl.load(place + at, mask=is_in, other=0, volatile=True)
    return packets.to(tl.int32)


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(values):
    return values.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@kernel
def _add_up(
    x, residual, weight, out, boxes, calls, num_words, epsilon, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_NORM: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Of bf16 a word holds two numbers, which are added up apart."""
    begin_next()
    at = tl.arange(0, BLOCK)
    is_in = at < num_words
    if HAS_NORM:
        if IS_BF16:
            weights = tl.load(weight + 2 * at, mask=is_in, other=0)
            high_weights = tl.load(weight + 2 * at + 1, mask=is_in, other=0)
        else:
            weights = tl.load(weight + at, mask=is_in, other=0)
    wait_for_inputs()
    row = tl.program_id(0)
    call = tl.load(calls + row) + 1
    here = row.to(tl.int64) * num_words + at
    own = tl.load(x + here, mask=is_in, other=0)
    _send(own, is_in, at, boxes, row, call, RANK, NUM_RANKS, ROOM)
    sums = tl.zeros([BLOCK], tl.float32)
    high_sums = tl.zeros([BLOCK], tl.float32)
    if HAS_NORM:
        before = tl.load(residual + here, mask=is_in, other=0)
    for source in tl.static_range(NUM_RANKS):
        if source == RANK:
            words = own
        else:
            words = _received(is_in, at, boxes, source, row, call, RANK, NUM_RANKS, ROOM)
        if IS_BF16:
            sums += _low(words)
            high_sums += _high(words)
        else:
            sums += words.to(tl.float32, bitcast=True)
    tl.store(calls + row, call)
    if HAS_NORM:
        if IS_BF16:
            sums += _low(before)
            high_sums += _high(before)
            tl.store(residual + here, _bits(sums) | (_bits(high_sums) << 16), mask=is_in)
            scale = 1 / tl.sqrt(tl.sum(sums * sums + high_sums * high_sums, 0) / (2 * num_words) + epsilon)
            high_sums = high_sums * scale * high_weights
        else:
            sums += before.to(tl.float32, bitcast=True)
            tl.store(residual + here, sums.to(tl.int32, bitcast=True), mask=is_in)
            scale = 1 / tl.sqrt(tl.sum(sums * sums, 0) / num_words + epsilon)
        sums = sums * scale * weights
    if IS_BF16:
        tl.store(out + here, _bits(sums) | (_bits(high_sums) << 16), mask=is_in)
    else:
        tl.store(out + here, sums.to(tl.int32, bitcast=True), mask=is_in)


@kernel
def _put_together(
    x, out, boxes, calls, own, width, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """ROOM numbers of one row."""
    begin_next()
    wait_for_inputs()
    row, program = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    call = tl.load(calls + program) + 1
    at = tl.arange(0, ROOM)
    column = tl.program_id(1) * ROOM + at
    is_in = column < own
    words = tl.load(x + row.to(tl.int64) * own + column, mask=is_in, other=0)
    _send(words, is_in, at, boxes, program, call, RANK, NUM_RANKS, ROOM)
    for source in tl.static_range(NUM_RANKS):
        if source != RANK:
            words = _received(is_in, at, boxes, source, program, call, RANK, NUM_RANKS, ROOM)
        else:
            words = tl.load(x + row.to(tl.int64) * own + column, mask=is_in, other=0)
        there = source * own + column
        tl.store(out + row.to(tl.int64) * width + there, words, mask=is_in & (there < width))
    tl.store(calls + program, call)


@kernel
def _of_first(
    numbers, out, boxes, calls, count, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As a sum in which the others have zeros. Everybody waits for everybody, and so knows that the last call is over
    there; what comes is used on every rank, as Triton fails at a loop whose result is not."""
    begin_next()
    wait_for_inputs()
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    at = tl.arange(0, BLOCK)
    here = program * BLOCK + at
    is_in = here < count
    own = tl.load(numbers + here, mask=is_in & (RANK == 0), other=0)
    total = own
    _send(own, is_in, at, boxes, program, call, RANK, NUM_RANKS, ROOM)
    for source in tl.static_range(NUM_RANKS):
        if source != RANK:
            total += _received(is_in, at, boxes, source, program, call, RANK, NUM_RANKS, ROOM)
    tl.store(out + here, total, mask=is_in)
    tl.store(calls + program, call)
