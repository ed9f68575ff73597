"""Checkpoints that store the matrices of all experts in one tensor, read as one matrix per expert. The tensors may be
transposed, have rows of gates and of `up` by turns, or hold 4-bit floats (MXFP4). Independent of files and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.dtypes import from_mxfp4
from engine.models.config_fields import ModelError, an_object, whole_number
from engine.models.stored_tensors import StoredTensor, slices

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class ExpertSlice:
    """View of some rows of one expert's matrix or bias in a tensor [experts, ..] as a tensor of its own."""

    stored: StoredTensor
    expert: int
    rows: tuple[int, int, int]  # first, number, step
    is_transposed: bool = False

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def get_shape(self) -> list[int]:
        _, *shape = self.stored.get_shape()
        return [self.rows[1], *(shape[:1] if self.is_transposed else shape[1:])]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, *columns = slices(key, self.get_shape())
        first, _, step = self.rows
        span = slice(first + rows.start * step, first + max(rows.start, rows.stop - 1) * step + 1)
        axes = [*columns, span] if self.is_transposed else [span, *columns]
        key_of_all = (slice(self.expert, self.expert + 1), *axes)
        found = self.stored[key_of_all][0]
        return (found.T if self.is_transposed else found)[::step][: rows.stop - rows.start]


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """Stacked matrices [experts, N, K] of 4-bit floats, each 32 of which share a power of two; they read as float32."""

    blocks: StoredTensor  # u8 [experts, N, K / 32, 16]: two codes a byte, the first in the lower half
    scales: StoredTensor  # u8 [experts, N, K / 32]

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        *shape, num_blocks, _ = self.blocks.get_shape()
        return [*shape, 32 * num_blocks]

    def __getitem__(self, key: Any) -> np.ndarray:
        experts, rows, columns = slices(key, self.get_shape())
        return from_mxfp4(self.blocks[experts, rows], self.scales[experts, rows])[..., columns]


def with_single_experts(keys: Mapping[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with those that stack experts replaced by one tensor per expert and projection, as most
    families have them. Raises ModelError for shapes that do not fit."""
    if keys.get("model_type") == "qwen3_vl_moe":
        return _gates_first(tensors, whole_number({**an_object(keys, "text_config"), **keys}, "hidden_size"))
    layout = LAYOUTS.get(keys.get("model_type") or "")
    return layout(tensors) if layout else tensors


def _granite(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Read `input_linear` [E, 2 F, H], gates first, and `output_linear` [E, H, F]."""
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        block, _, end = name.rpartition(".block_sparse_moe.")
        if end in ("input_linear.weight", "output_linear.weight"):
            projections = PROJECTIONS[:2] if end.startswith("input") else PROJECTIONS[2:]
            made |= dict(_unstacked(f"{block}.block_sparse_moe", stored, projections, "weight"))
        else:
            made[name] = stored
    return made


def _gates_first(tensors: dict[str, StoredTensor], hidden_size: int = 0) -> dict[str, StoredTensor]:
    """Read `gate_up_proj` [E, 2 F, H], gates first, and `down_proj` [E, H, F]. With `hidden_size` they may also be
    transposed, as the released Qwen3-VL has them: transformers 5 reads both, and writes them as they are named here."""
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        block, _, end = name.rpartition(".experts.")
        if end in ("gate_up_proj", "down_proj"):
            projections = PROJECTIONS[:2] if "gate" in end else PROJECTIONS[2:]
            is_transposed = hidden_size not in (0, stored.get_shape()[-1 if "gate" in end else 1])
            made |= dict(_unstacked(block, stored, projections, "weight", is_transposed=is_transposed))
        else:
            made[name] = stored
    return made


def _gpt_oss(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Read `gate_up_proj` [E, H, 2 F], gates and `up` by turns, and `down_proj` [E, F, H], or both as MXFP4."""
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        block, _, end = name.rpartition(".experts.")
        kind, _, suffix = end.removesuffix("_proj").rpartition("_proj_")
        projections = PROJECTIONS[:2] if end.startswith("gate_up_proj") else PROJECTIONS[2:]
        if not block or not end.startswith(("gate_up_proj", "down_proj")):
            made[name] = stored
        elif end in ("gate_up_proj", "down_proj"):
            made |= dict(_unstacked(block, stored, projections, "weight", is_interleaved=True, is_transposed=True))
        elif suffix == "bias":
            made |= dict(_unstacked(block, stored, projections, "bias", is_interleaved=True))
        elif suffix == "blocks":
            if f"{block}.experts.{kind}_proj_scales" not in tensors:
                raise ModelError(f"tensor {block}.experts.{kind}_proj_scales is missing in the checkpoint")
            values = Mxfp4(stored, tensors[f"{block}.experts.{kind}_proj_scales"])
            made |= dict(_unstacked(block, values, projections, "weight", is_interleaved=True))
    return made


def _ernie(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Read the bias [1, E] of the choice of experts as [E]."""
    end = "moe_statics.e_score_correction_bias"
    return {
        name: ExpertSlice(stored, 0, (0, stored.get_shape()[1], 1))
        if name.endswith(end) and len(stored.get_shape()) == 2  # noqa: PLR2004 - [1, E]
        else stored
        for name, stored in tensors.items()
    }


def _unstacked(  # noqa: PLR0913 - describes one tensor
    block: str,
    stored: StoredTensor,
    projections: tuple[str, ...],
    end: str,
    *,
    is_interleaved: bool = False,
    is_transposed: bool = False,
) -> Iterator[tuple[str, StoredTensor]]:
    num_experts, *shape = stored.get_shape()
    num_rows, rest = divmod(shape[-1] if is_transposed else shape[0], len(projections))
    if rest:
        raise ModelError(f"{block}: a tensor of shape {stored.get_shape()} has no two projections of equal size")
    for expert in range(num_experts):
        for index, projection in enumerate(projections):
            rows = (index, num_rows, len(projections)) if is_interleaved else (index * num_rows, num_rows, 1)
            yield f"{block}.experts.{expert}.{projection}.{end}", ExpertSlice(stored, expert, rows, is_transposed)


LAYOUTS: dict[str, Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]]] = {
    "granitemoe": _granite,
    "gpt_oss": _gpt_oss,
    "ernie4_5_moe": _ernie,
    **dict.fromkeys(("mistral4", "qwen3_5_moe", "qwen3_5_moe_text"), _gates_first),
}
