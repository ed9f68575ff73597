"""Names of tensors in checkpoints of models that read images: those of a language model, of the tower `visual` and of
the projector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.keys import an_object
from engine.models.stored import Stored, slices

READS_IMAGES = ("paddleocr_vl", "qwen2_5_vl")  # values of model_type
# The names of released checkpoints and those of transformers 5 -> the names of the networks
NAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.(visual|projector)\.", r"\1."),
    (r"^mlp_AR\.", "projector."),
)
UNUSED = ("visual.vision_model.head.", "visual.vision_model.embeddings.packing_position_embedding.")
PATCH_EMBEDDINGS = ("patch_embedding.weight", "patch_embed.proj.weight")


@dataclass(frozen=True, eq=False)
class Flattened:
    """The weight of a convolution over single patches as the matrix of a linear layer."""

    stored: Stored

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def get_shape(self) -> list[int]:
        rows, *inner = self.stored.get_shape()
        return [rows, int(np.prod(inner))]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, columns = slices(key, self.get_shape())
        return np.asarray(self.stored[rows]).reshape(rows.stop - rows.start, -1)[:, columns]


def with_tower(keys: Mapping[str, Any], tensors: dict[str, Stored]) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return config.json with the keys of the language model at the top, and the tensors by the names of the
    networks. Those of models that read no images are returned as they are."""
    if keys.get("model_type") not in READS_IMAGES:
        return dict(keys), tensors
    outer = {name: value for name, value in keys.items() if name != "text_config"}
    named = {_name_of(name): tensor for name, tensor in tensors.items()}
    kept: dict[str, Stored] = {
        name: Flattened(tensor) if name.endswith(PATCH_EMBEDDINGS) else tensor
        for name, tensor in named.items()
        if not name.startswith(UNUSED)
    }
    return {**an_object(keys, "text_config"), **outer}, kept


def _name_of(tensor: str) -> str:
    for pattern, name in NAMES:
        tensor = re.sub(pattern, name, tensor)
    return tensor
