"""Products of up to eight rows with weights of 16 bits, on the tensor cores: the weights are the first operand, of
which an instruction takes 16 rows; of the second it takes eight.

Every output is one chain of sums along k, as those of `engine.ops.cuda.invariant` are.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, fetch_ahead, kernel, num_sms, shared_memory, wait_for_inputs

# As measured in the layers of a model on an H200, where a kernel begins while the one before it ends.
FEW = 8  # rows
WEIGHTS, DEPTH = 16, 256  # rows of weights that a program of one warp has, and columns at a time
AHEAD = 5  # tiles that are read ahead
MOST_AHEAD, CROWD = 7, 4  # where there are no more than so many programs for an SM, whose memory they then fill
EARLY = 8  # lines of each row of weights that are fetched before the inputs are there
LINE = 64  # columns


def are_few(x: Tensor) -> bool:
    return 0 < len(x) <= FEW and x.dtype != torch.float32


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_gated: bool = False) -> Tensor:
    """Write x [T, K] times weight [N, K], plus the bias, to `out` [T, N]; with `is_gated`, its `swiglu`, rounded as if
    the product had been stored in between.
    """
    (num_rows, width), columns = x.shape, out.shape[1]
    num_programs = cdiv(columns, WEIGHTS // (1 + is_gated))
    _multiply[(num_programs,)](
        x, weight, x if bias is None else bias, out, num_rows, columns, width, bias is not None, is_gated,
        width % DEPTH == 0, WEIGHTS, DEPTH, FEW, EARLY, LINE, num_warps=1, num_stages=1 + _num_ahead(num_programs),
        **PDL,
    )  # fmt: skip
    return out


def _num_ahead(num_programs: int) -> int:
    """Return the number of tiles to read ahead, so that all programs run at once if they can."""
    per_sm = cdiv(num_programs, num_sms())
    room = shared_memory() // ((WEIGHTS + FEW) * DEPTH * 2)
    return min(room // per_sm, MOST_AHEAD) if per_sm <= CROWD else AHEAD


@kernel
def _multiply(
    x, weight, bias, out, num_rows, columns, width,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHTS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Compute WEIGHTS outputs of each row. With IS_GATED, half of them belong to the gate and half to the gated values,
    whose weights follow all of the gate's. IS_WHOLE says that DEPTH divides the width.
    """
    begin_next()
    OWN: tl.constexpr = WEIGHTS // (1 + IS_GATED)
    first = tl.program_id(0) * OWN
    i = tl.arange(0, WEIGHTS)
    n = (
        tl.minimum(first + i % OWN, columns - 1) + i // OWN * columns
    )  # rows behind the end repeat the last one and are discarded
    at_column = weight + n.to(tl.int64)[:, None] * width
    fetch_ahead(at_column + tl.minimum(tl.arange(0, EARLY) * LINE, width - 1)[None, :])
    wait_for_inputs()
    m, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    at_row = x + m[:, None] * width + k[None, :]
    is_row = (m < num_rows)[:, None]
    sums = tl.zeros([WEIGHTS, ROWS], tl.float32)
    for start in range(0, width, DEPTH):
        is_in = IS_WHOLE | (start + k < width)[None, :]
        weights = tl.load(at_column + start + k[None, :], mask=is_in, other=0)
        rows = tl.load(at_row + start, mask=is_row & is_in, other=0)
        sums = tl.dot(weights, tl.trans(rows), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, OWN, ROWS)), (1, 2, 0)))
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        sums = gate / (1 + tl.exp(-gate)) * up.to(out.dtype.element_ty).to(tl.float32)
    own = first + tl.arange(0, OWN)
    tl.store(out + m[None, :] * columns + own[:, None], sums, mask=(m < num_rows)[None, :] & (own < columns)[:, None])
