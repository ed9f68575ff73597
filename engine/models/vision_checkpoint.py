"""Names of tensors in checkpoints of models that read images: those of a language model, of the tower `visual` and of
the projector."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.config_fields import ModelError, an_object
from engine.models.stored_tensors import StoredTensor, slices

log = logging.getLogger(__name__)

# Values of model_type; checkpoints of the second ones may have no tower, or one that config.json does not describe
READS_IMAGES = ("paddleocr_vl", "qwen2_5_vl")
MAY_READ_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
# Values of model_type whose language model is served without the tower -> those of the language model
TEXT_PARTS = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
# The names of released checkpoints and those of transformers 5 -> the names of the networks
NAMES = (
    (r"^(model\.language_model|language_model\.model)\.", "model."),
    (r"^language_model\.", ""),
    (r"^model\.(visual|projector)\.", r"\1."),
    (r"^mlp_AR\.", "projector."),
)
TOWER = "visual."
NOT_SERVED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
UNUSED: tuple[str, ...] = ("visual.vision_model.head.", "visual.vision_model.embeddings.packing_position_embedding.")
PATCH_EMBEDDINGS = ("patch_embedding.weight", "patch_embed.proj.weight")


@dataclass(frozen=True, eq=False)
class Flattened:
    """The weight of a convolution over single patches as the matrix of a linear layer."""

    stored: StoredTensor

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def get_shape(self) -> list[int]:
        rows, *inner = self.stored.get_shape()
        return [rows, int(np.prod(inner))]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, columns = slices(key, self.get_shape())
        return np.asarray(self.stored[rows]).reshape(rows.stop - rows.start, -1)[:, columns]


def text_part(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of the language model at the top, of a model that is served without its tower.
    Others are returned as they are. Raises ModelError if the language model is not of the family that it should be."""
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_PARTS:
        return dict(keys)
    outer = {name: value for name, value in keys.items() if name not in ("text_config", "vision_config")}
    text, known = an_object(keys, "text_config"), TEXT_PARTS[model_type]
    found = text.get("model_type", known[0])
    if found not in known:
        raise ModelError(f"config.json: text_config.model_type is {found!r}, supported is {' or '.join(known)}")
    made = {**outer, **text, "model_type": found}
    if "tie_word_embeddings" in outer:  # it decides, as in transformers 5
        made["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return made


def with_tower(
    keys: Mapping[str, Any], tensors: dict[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return config.json with the keys of the language model at the top, and the tensors by the names of the
    networks. Those of models that read no images are returned as they are. A tower that config.json does not describe
    is left out, and so is the description of a tower without tensors, if the language model can do without."""
    model_type = keys.get("model_type")
    if model_type in TEXT_PARTS:
        log.info("config.json: model_type is %r: its language model is served, and images are refused", model_type)
        return text_part(keys), {_name_of(each): tensors[each] for each in tensors if not each.startswith(NOT_SERVED)}
    if model_type not in READS_IMAGES + MAY_READ_IMAGES:
        return dict(keys), tensors
    outer = {name: value for name, value in keys.items() if name != "text_config"}
    named = {_name_of(name): tensor for name, tensor in tensors.items()}
    unused = UNUSED
    if model_type in MAY_READ_IMAGES and not ("vision_config" in keys and any(map(_is_of_tower, named))):
        outer.pop("vision_config", None)
        unused = (TOWER,)
    kept: dict[str, StoredTensor] = {
        name: Flattened(tensor) if name.endswith(PATCH_EMBEDDINGS) else tensor
        for name, tensor in named.items()
        if not name.startswith(unused)
    }
    return {**an_object(keys, "text_config"), **outer}, kept


def _is_of_tower(tensor: str) -> bool:
    return tensor.startswith(TOWER)


def _name_of(tensor: str) -> str:
    for pattern, name in NAMES:
        tensor = re.sub(pattern, name, tensor)
    return tensor
