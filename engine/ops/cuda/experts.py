"""Products of tokens with the matrices of their experts, which are stacked along their rows.

One token: each slot reads the rows of its expert (experts_few.py, experts_few_packed.py, experts_gemv.py). More: slots
are sorted by expert, and a program multiplies a tile of an expert's matrix by a tile of the slots of this expert. Grids
follow from shapes alone: programs without slots end at once. The products of a token's experts are stored and then
added up in the order of its slots. Slots whose ids are not from 0 to below the number of experts belong to experts of
other ranks: they are not multiplied, and add nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.cuda import experts_few, experts_few_packed, experts_fp8, experts_gemv, fp8, lowbit, mxfp4
from engine.ops.cuda.experts_kernels import DENSE, FP8, INT4, INT8, MXFP4, combine, grouped
from engine.ops.cuda.experts_tiles import Tile, num_stages, tile_for
from engine.ops.cuda.launch import PDL, cdiv, next_power_of_2
from engine.ops.cuda.offloaded_experts import OffloadedMatrix
from engine.ops.cuda.one_shot_all_reduce import PeerBuffers
from engine.ops.cuda.routing import are_written, num_experts_of, order_of, set_written

FEW = 1  # tokens up to which slots are not sorted
ADDED = 1024  # columns of a program that adds up slots
GROUP_SIZE_M = 8  # tiles of slots that go over the same weights at a time
LARGE = 4096  # slots from which products are stored in the type of the activations until they are added up
PACKED_BY = {
    f"expert_{product}_{name}": pack
    for product in ("gate_up", "down")
    for name, pack in (
        ("fp8", fp8.pack),
        ("mxfp4", mxfp4.pack),
        ("int4", lowbit.pack_int4),
        ("int8", lowbit.pack_int8),
        ("a8w8", lowbit.pack_int8),  # activations keep all of their bits
    )
}


class ExpertWeights(NamedTuple):
    """The matrices of all experts, as the kernels read them."""

    kind: int  # DENSE, FP8, INT4, INT8 or MXFP4
    weight: Tensor  # [E * N, K], or packed words; of offloaded experts, the rows that are on the device
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    num_rows: int  # E * N
    table: Tensor  # of offloaded experts, see offloaded_experts.py; otherwise it is not read
    unit: int  # of the table

    @classmethod
    def of(cls, kind: int, arrays: tuple[Tensor | OffloadedMatrix | None, ...], topk_ids: Tensor) -> ExpertWeights:
        """Take the arrays in the order of the catalogue. A device without 8-bit floats has bf16 in their place."""
        weight, *others, bias = (*arrays, None) if len(arrays) == (1, 2, 3, 2, 2)[kind] else arrays
        if isinstance(weight, OffloadedMatrix):
            place, weight = (weight.num_rows, weight.table_for(topk_ids), weight.unit), weight.tensor
        else:
            assert weight is not None
            place = len(weight), weight, 0
        if kind in (FP8, MXFP4) and weight.dim() == 2:
            return cls(DENSE, weight, None, None, bias, *place)
        scale, zero, *_ = (*others, None, None)
        return cls(kind, weight, scale, zero, bias, *place)


def gate_up(
    kind: int, x: Tensor, topk_ids: Tensor, *arrays: Tensor | None, num_experts: int, is_invariant: bool, **act: Any
) -> Tensor:
    """Return the activations [T, top_k * F] of the experts of each row of x [T, K]."""
    stored, (num_rows, top_k) = ExpertWeights.of(kind, arrays, topk_ids), topk_ids.shape
    width = stored.num_rows // num_experts // 2
    out = x.new_empty(num_rows, top_k * width)
    if num_rows > FEW or is_invariant or stored.kind == MXFP4:
        _grouped(x, topk_ids, stored, out.view(-1, width), num_experts, is_invariant, **act)
    elif stored.kind == DENSE:
        experts_few.gate_up(x, topk_ids, stored, out, num_experts, **act)
    elif experts_gemv.can_multiply(stored, 1):
        experts_gemv.gate_up(x, topk_ids, stored, out, **act)
        set_written(topk_ids)
    else:
        experts_few_packed.gate_up(x, topk_ids, stored, out, **act)
    return out


def down(
    kind: int,
    h: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *arrays: Tensor | None,
    num_experts: int,
    is_invariant: bool,
    to: PeerBuffers | None = None,
) -> Tensor:
    """Return the weighted sums [T, N] of the products of h [T, top_k * K] by the experts of each row. Those of one row
    are also sent to the ranks of `to`."""
    stored, (num_rows, top_k) = ExpertWeights.of(kind, arrays, topk_ids), topk_ids.shape
    columns = stored.num_rows // num_experts
    out = h.new_empty(num_rows, columns)
    if num_rows <= FEW and not is_invariant and stored.kind != MXFP4:
        if stored.kind == DENSE:
            experts_few.down(h, topk_ids, topk_weights, stored, out, num_experts, to)
        elif experts_gemv.can_multiply(stored, top_k):
            ids_are_written = are_written(topk_ids)
            experts_gemv.down(h, topk_ids, topk_weights, stored, out, ids_are_written=ids_are_written)
        else:
            experts_few_packed.down(h, topk_ids, topk_weights, stored, out)
    elif num_rows:
        is_large = num_rows * top_k >= LARGE and not is_invariant
        each = h.new_empty(num_rows * top_k, columns, dtype=h.dtype if is_large else torch.float32)
        rows = h.view(num_rows * top_k, -1)
        _grouped(rows, topk_ids, stored, each, num_experts, is_invariant, weights=topk_weights)
        grid = num_rows, cdiv(columns, ADDED)
        has_all = num_experts == num_experts_of(topk_ids)
        combine[grid](each, topk_ids, out, columns, num_experts, has_all, top_k, ADDED, num_warps=4, **PDL)
    return out


def _grouped(
    x: Tensor,
    topk_ids: Tensor,
    stored: ExpertWeights,
    out: Tensor,
    num_experts: int,
    is_invariant: bool,
    weights: Tensor | None = None,
    **act: Any,
) -> None:
    """Multiply the row of each slot, or with `weights` a row per slot, by the matrix of its expert: [slots, N]."""
    num_slots, of_all_ranks = topk_ids.numel(), max(num_experts, num_experts_of(topk_ids))
    if not num_slots:
        return
    if not is_invariant and experts_fp8.can_multiply(stored, num_slots, of_all_ranks):
        experts_fp8.launch(x, topk_ids, stored, out, weights, act)
    else:
        given = {"is_gated": weights is None, "has_zero": stored.zero is not None}
        tile = tile_for(num_slots, of_all_ranks, stored.kind, x.dtype, **given)
        launch(x, topk_ids, stored, out, tile, weights, act)


def launch(
    x: Tensor,
    topk_ids: Tensor,
    stored: ExpertWeights,
    out: Tensor,
    tile: Tile,
    weights: Tensor | None,
    act: dict[str, Any],
) -> None:
    """Launch the kernel with a tile. `act`: num_experts is not among them, the attributes of the activation are."""
    num_slots, is_gated = topk_ids.numel(), weights is None
    columns = out.shape[1]
    num_experts = stored.num_rows // (columns * (1 + is_gated))
    is_sorted = len(topk_ids) > FEW or stored.kind != MXFP4
    slots, starts = order_of(topk_ids, num_experts) if is_sorted else (topk_ids, topk_ids)
    num_blocks = num_slots // tile.slots + min(num_slots, num_experts) if is_sorted else num_slots
    across = cdiv(columns, tile.columns // (1 + is_gated))
    scale = stored.weight if stored.scale is None else stored.scale
    words = 0 if stored.kind == DENSE else stored.weight.shape[2]
    depth = words * (4 if stored.kind in (INT4, MXFP4) else 2) or tile.depth
    is_blocked = stored.kind == FP8 and len(scale) > 1
    activation = (act["activation"], act["limit"] > 0) if is_gated else (0, False)
    numbers = (act["limit"], act["alpha"], act["offset"]) if is_gated else (0.0, 0.0, 0.0)
    grouped[(num_blocks * across,)](
        x, slots, starts, stored.weight, stored.table, scale, scale if stored.zero is None else stored.zero,
        scale if stored.bias is None else stored.bias, x if weights is None else weights, out, *numbers,
        num_blocks, columns, x.shape[1], stored.weight.shape[1], num_experts, next_power_of_2(num_experts + 1),
        topk_ids.shape[1] if is_gated else 1, stored.kind, is_blocked, stored.zero is not None,
        stored.bias is not None, is_gated, *activation, x.shape[1] % depth == 0, tile.slots, tile.columns,
        depth, words, GROUP_SIZE_M, stored.unit, is_sorted, num_warps=tile.warps,
        num_stages=num_stages(tile, words), **PDL,
    )  # fmt: skip


expert_gate_up = partial(gate_up, DENSE, is_invariant=False)
expert_gate_up_fp8 = partial(gate_up, FP8, is_invariant=False)
expert_gate_up_int4 = partial(gate_up, INT4, is_invariant=False)
expert_gate_up_mxfp4 = partial(gate_up, MXFP4, is_invariant=False)
expert_gate_up_int8 = expert_gate_up_a8w8 = partial(gate_up, INT8, is_invariant=False)
expert_down = partial(down, DENSE, is_invariant=False)
expert_down_fp8 = partial(down, FP8, is_invariant=False)
expert_down_int4 = partial(down, INT4, is_invariant=False)
expert_down_mxfp4 = partial(down, MXFP4, is_invariant=False)
expert_down_int8 = expert_down_a8w8 = partial(down, INT8, is_invariant=False)
invariant_expert_gate_up = partial(gate_up, DENSE, is_invariant=True)
invariant_expert_gate_up_fp8 = partial(gate_up, FP8, is_invariant=True)
invariant_expert_down = partial(down, DENSE, is_invariant=True)
invariant_expert_down_fp8 = partial(down, FP8, is_invariant=True)
