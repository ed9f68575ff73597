"""Programmatic dependent launch: a kernel may begin while the one before it ends, up to where it needs what that makes.

Every kernel calls `begin_next` first and, on every path, `wait_for_inputs` before it touches what others read or write.
The products of experts of one token are an exception (experts_few.py): the first calls `begin_next` behind
`wait_for_inputs`, so that the second may read what was there for the first, the ids, before it waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NEEDED = (9, 0)  # compute capability
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run on the CPU
CAN_BE = not INTERPRETED and torch.cuda.is_available()
IS_USED = tl.constexpr(CAN_BE and torch.cuda.get_device_capability() >= NEEDED)
# The Triton language compiles a kernel anew for an integer that is 1 or a multiple of 16 and for a pointer that is
# aligned to 16 bytes. These arguments differ from step to step, and no kernel gains from knowing more about them.
STEP_SIZES = [
    *("num_rows", "num_tokens", "num_requests", "table_width", "count", "num_numbers", "row_len", "max_logprobs"),
    *("num_blocks", "num_parts", "first_head", "num_programs"),
]
STEP_ARRAYS = [
    *("token_ids", "positions", "query_starts", "context_lens", "block_tables", "rows", "slots", "numbers", "tables"),
    *("embeddings", "query_tiles", "num_real", "verified"),
    *("temperatures", "min_ps", "wanted", "seeds", "counters", "num_wanted", "mask"),
    *("starts", "ends", "ids", "biases", "seen_counts", "repetitions", "frequencies", "presences"),
    *("probabilities", "thresholds"),
]
PDL = {"launch_pdl": True} if IS_USED else {}  # keywords of a launch
HAS_COPY_ENGINE = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= NEEDED  # TMA


@functools.cache
def num_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4


@functools.cache
def shared_memory() -> int:
    """Return the bytes of shared memory of an SM. One program can have 1 KB less."""
    if not torch.cuda.is_available():
        return 1 << 17
    return torch.cuda.get_device_properties().shared_memory_per_multiprocessor - 1024


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up. `triton.cdiv` can also be called in kernels and takes 3 us on the host, in which
    a step that is not captured launches thousands of kernels."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()


def kernel(function: Callable) -> Any:
    """Declare a kernel of the Triton language that is compiled once for all sizes of a step."""
    return triton.jit(function, do_not_specialize=STEP_SIZES, do_not_specialize_on_alignment=STEP_ARRAYS)


_is_recording = False


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let `new_indices` return zeros inside the context, in which launches are left out."""
    global _is_recording
    _is_recording = True
    try:
        yield
    finally:
        _is_recording = False


def collective(function: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Return the launch of a kernel that waits for data of other ranks. Inside `recording` such a kernel is never
    launched: that which sends the data may be left out because it is not compiled yet, and the wait would not end.
    """
    return functools.partial(function.warmup, grid=grid) if _is_recording else function[grid]


def new_indices(like: Tensor, *shape: int) -> Tensor:
    """Return i32 memory for indices, by which a later kernel finds what it reads. The kernel that fills it may be left
    out because it is not compiled yet: the indices are zeros then, so that later kernels stay inside of their arrays.
    """
    make = like.new_zeros if _is_recording else like.new_empty
    return make(shape, dtype=torch.int32)


@triton.jit
def begin_next():
    if IS_USED:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs():
    if IS_USED:
        gdc_wait()


@triton.jit
def fetch_ahead(pointers):
    """Prefetch the cache lines of these addresses into the L2 cache. Constant data may be fetched before the inputs
    arrive.
    """
    if IS_USED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
