"""One-shot (low-latency) collectives for few rows: each rank writes its data directly into the memory of all others.

Every 8-byte word carries four bytes of data and the number of the call, and is written at once. A receiver polls the
words themselves, so there are no separate flags and nothing has to be reset.

Each program has buffers of its own in the memory of every rank and alternates between two sets. When it writes to a set
again, every other rank has begun the call after the one that last used it, and so has read all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, collective, kernel, next_power_of_2, wait_for_inputs

CAPACITY = 4096  # words that a program can send to each rank in one call
MAX_PROGRAMS = 256  # programs times other ranks, up to which this is faster than any other way


class PeerBuffers(NamedTuple):
    """Buffers of this rank and of the others. They are zeros at first."""

    rank: int
    num_ranks: int
    memory: list[Tensor]  # of each rank, as mapped here
    addresses: Tensor  # i64 [num_ranks]: addresses of `memory`
    calls: Tensor  # i32 [MAX_PROGRAMS]: number of calls of each program

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        return MAX_PROGRAMS * 2 * num_ranks * CAPACITY * 8

    def fits(self, num_programs: int, num_words: int = 0) -> bool:
        """Return whether `num_programs` programs can send `num_words` words each."""
        return num_programs * (self.num_ranks - 1) <= MAX_PROGRAMS and num_words <= CAPACITY


def recipients(to: PeerBuffers | None, anything: Tensor) -> tuple[Tensor, Tensor]:
    """Return addresses and calls for a kernel that sends its results to the ranks of `to`, if there are any."""
    return (to.addresses, to.calls) if to else (anything, anything)


def ranks_of(to: PeerBuffers | None) -> tuple[int, int]:
    """Return this rank and the number of ranks for such a kernel, or (0, 1)."""
    return (to.rank, to.num_ranks) if to else (0, 1)


def words_of(x: Tensor) -> int:
    """Return the number of 4-byte words in a row of `x`, or CAPACITY + 1 if a row does not consist of whole words."""
    num_bytes = x.shape[1] * x.element_size()
    return CAPACITY + 1 if num_bytes % 4 else num_bytes // 4


def all_reduce(
    buffers: PeerBuffers,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    *,
    is_sent: bool = False,
) -> Tensor:
    """Return the sum of x [T, N] over all ranks, in rank order, f32 or bf16. With `residual` and `weight`, add the sum
    to `residual` in place and return the RMSNorm of the result. `is_sent`: the kernel that computed x has sent it."""
    num_words, out = words_of(x), torch.empty_like(x)
    words = [None if each is None else each.view(torch.int32) for each in (x, residual, out)]
    block = next_power_of_2(num_words)
    collective(_all_reduce, (len(x),))(
        *words[:2], weight, words[2], buffers.addresses, buffers.calls, num_words, epsilon,
        buffers.rank, buffers.num_ranks, x.dtype == torch.bfloat16, residual is not None, is_sent, CAPACITY, block,
        num_warps=max(4, block // 256), **PDL,
    )  # fmt: skip
    return out


def all_gather(buffers: PeerBuffers, x: Tensor, width: int) -> Tensor:
    """Return x f32 [S, N] of all ranks side by side, in rank order: [S, width]."""
    num_rows, own = x.shape
    out = x.new_empty(num_rows, width)
    grid = num_rows, cdiv(own, CAPACITY)
    collective(_all_gather, grid)(
        x.view(torch.int32), out.view(torch.int32), buffers.addresses, buffers.calls, own, width,
        buffers.rank, buffers.num_ranks, CAPACITY, num_warps=16, **PDL,
    )  # fmt: skip
    return out


def broadcast(buffers: PeerBuffers, numbers: Tensor) -> Tensor:
    """Return the first rank's `numbers`, i32 [T]."""
    out, block = torch.empty_like(numbers), min(next_power_of_2(len(numbers)), CAPACITY)
    grid = (cdiv(len(numbers), block),)
    collective(_broadcast, grid)(
        numbers,
        out,
        buffers.addresses,
        buffers.calls,
        len(numbers),
        buffers.rank,
        buffers.num_ranks,
        CAPACITY,
        block,
        num_warps=4,
        **PDL,
    )
    return out


@triton.jit
def _address(
    addresses, owner: tl.constexpr, source: tl.constexpr, program, call, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr
):
    """Return the address of the words from `source` in the memory of `owner`."""
    buffer = tl.load(addresses + owner).to(tl.pointer_type(tl.int64))
    return buffer + ((program.to(tl.int64) * 2 + (call & 1)) * NUM_RANKS + source) * CAPACITY


@triton.jit
def _send(
    words, is_in, at, addresses, program, call, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr
):
    tagged = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, NUM_RANKS):
        address = _address(addresses, (RANK + step) % NUM_RANKS, RANK, program, call, NUM_RANKS, CAPACITY)
        tl.store(address + at, tagged, mask=is_in)


@triton.jit
def send_columns(
    values, first, columns, addresses, calls, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr,
    IS_BF16: tl.constexpr,
):  # fmt: skip
    """Send the columns of a single row that begin with `first` to all other ranks, for an `all_reduce` with IS_SENT.
    There are a power of two of them, at least two."""
    count: tl.constexpr = values.shape[0] // (1 + IS_BF16)
    at = first // (1 + IS_BF16) + tl.arange(0, count)
    if IS_BF16:
        low, high = tl.split(tl.reshape(values, (count, 2)))
        words = _bits(low) | (_bits(high) << 16)
    else:
        words = values.to(tl.int32, bitcast=True)
    call = tl.load(calls) + 1
    _send(words, at < columns // (1 + IS_BF16), at, addresses, tl.program_id(0) * 0, call, RANK, NUM_RANKS, CAPACITY)


@triton.jit
def _received(
    is_in, at, addresses, source: tl.constexpr, program, call, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    address = _address(addresses, RANK, source, program, call, NUM_RANKS, CAPACITY)
    tagged = tl.load(address + at, mask=is_in, other=0, volatile=True)
    while tl.max((is_in & ((tagged >> 32).to(tl.int32) != call)).to(tl.int32), 0) != 0:
        tagged = tl.load(address + at, mask=is_in, other=0, volatile=True)
    return tagged.to(tl.int32)


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
def _all_reduce(
    x, residual, weight, out, addresses, calls, num_words, epsilon, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_NORM: tl.constexpr, IS_SENT: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one row. A word of bf16 holds two numbers, which are summed separately."""
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
    _send(own, is_in, at, addresses, row, call, RANK, 1 if IS_SENT else NUM_RANKS, CAPACITY)
    sums = tl.zeros([BLOCK], tl.float32)
    high_sums = tl.zeros([BLOCK], tl.float32)
    if HAS_NORM:
        before = tl.load(residual + here, mask=is_in, other=0)
    for source in tl.static_range(NUM_RANKS):
        if source == RANK:
            words = own
        else:
            words = _received(is_in, at, addresses, source, row, call, RANK, NUM_RANKS, CAPACITY)
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
def _all_gather(
    x, out, addresses, calls, own, width, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """Gather CAPACITY columns of one row."""
    begin_next()
    wait_for_inputs()
    row, program = tl.program_id(0), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    call = tl.load(calls + program) + 1
    at = tl.arange(0, CAPACITY)
    column = tl.program_id(1) * CAPACITY + at
    is_in = column < own
    words = tl.load(x + row.to(tl.int64) * own + column, mask=is_in, other=0)
    _send(words, is_in, at, addresses, program, call, RANK, NUM_RANKS, CAPACITY)
    for source in tl.static_range(NUM_RANKS):
        if source != RANK:
            words = _received(is_in, at, addresses, source, program, call, RANK, NUM_RANKS, CAPACITY)
        else:
            words = tl.load(x + row.to(tl.int64) * own + column, mask=is_in, other=0)
        there = source * own + column
        tl.store(out + row.to(tl.int64) * width + there, words, mask=is_in & (there < width))
    tl.store(calls + program, call)


@kernel
def _broadcast(
    numbers, out, addresses, calls, count, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Broadcast as a sum to which the other ranks contribute zeros. Every rank waits for all others and so knows that
    they have finished the previous call. Every rank uses what it receives, because Triton fails to compile a polling
    loop whose result is unused."""
    begin_next()
    wait_for_inputs()
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    at = tl.arange(0, BLOCK)
    here = program * BLOCK + at
    is_in = here < count
    own = tl.load(numbers + here, mask=is_in & (RANK == 0), other=0)
    total = own
    _send(own, is_in, at, addresses, program, call, RANK, NUM_RANKS, CAPACITY)
    for source in tl.static_range(NUM_RANKS):
        if source != RANK:
            total += _received(is_in, at, addresses, source, program, call, RANK, NUM_RANKS, CAPACITY)
    tl.store(out + here, total, mask=is_in)
    tl.store(calls + program, call)
