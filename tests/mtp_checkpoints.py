"""Small random checkpoints with an MTP layer, under the names of released ones. The layer has the shapes and the
distributions of a decoder layer of the same checkpoint, with its own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints import write_tensors
from tests.family_checkpoints import make_checkpoint


class Names(NamedTuple):
    """Names of the tensors of an MTP layer; `source` is the decoder layer that has the same kind."""

    source: int
    block: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str


def _like_deepseek(layer: int) -> Names:
    block = f"model.layers.{layer}"
    return Names(layer - 1, block, f"{block}.enorm", f"{block}.hnorm", f"{block}.eh_proj", f"{block}.shared_head.norm")


_LIKE_QWEN = Names(3, "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NAMES = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _like_deepseek(3)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LIKE_QWEN),
    "ernie4_5_moe": Names(
        0,
        "model.mtp_block.0",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        "model.mtp_linear_proj.0",
        "model.norm",
    ),
}
OWN_NORM = 1.0  # mean of the weights of norms; Qwen's checkpoints store them without it


def make_mtp_checkpoint(directory: Path, family: str, **overrides: Any) -> Path:
    """Write the checkpoint of the family with an MTP layer. `overrides` are keys of config.json."""
    make_checkpoint(directory, family, **overrides)
    keys = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
    tensors = load_file(directory / "model.safetensors")
    write_tensors(directory / "model.safetensors", tensors | mtp_tensors(family, tensors))
    return directory


def make_right(checkpoint: Path, family: str) -> Path:
    """Change the weights so that the next token depends on the last one alone, and the layer drafts what follows."""
    names, tensors = NAMES[family], load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0.0
    norm = tensors["model.norm.weight"]
    tensors[f"{names.norm}.weight"] = norm
    tensors[f"{names.embedding_norm}.weight"] = np.ones_like(norm)
    tensors[f"{names.projection}.weight"] = np.eye(len(norm), 2 * len(norm), dtype=np.float32)
    write_tensors(checkpoint / "model.safetensors", tensors)
    return checkpoint


def mtp_tensors(family: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of the MTP layer, and copies of the tables where released checkpoints have them."""
    names, rng = NAMES[family], np.random.default_rng(11)
    made = {}
    for name, tensor in sorted(tensors.items()):
        if name.startswith(source := f"model.layers.{names.source}."):
            made[f"{names.block}.{name.removeprefix(source)}"] = rng.permuted(tensor)
    hidden = len(tensors["model.norm.weight"])
    mean = 0.0 if names is _LIKE_QWEN else OWN_NORM
    for norm in (names.embedding_norm, names.hidden_norm, *({names.norm} - {"model.norm"})):
        made[f"{norm}.weight"] = (mean + 0.1 * rng.standard_normal(hidden)).astype(np.float32)
    scale = 1 / (2 * hidden) ** 0.5
    made[f"{names.projection}.weight"] = (scale * rng.standard_normal((hidden, 2 * hidden))).astype(np.float32)
    if names.norm.endswith("shared_head.norm"):
        made[f"{names.block}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        made[f"{names.block}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return made
