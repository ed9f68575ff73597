"""GGUF files as llama.cpp writes them, made from small checkpoints with numpy alone."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from engine.models.gguf_blocks import BLOCK_FORMATS
from engine.models.gguf_model import IN_GEMMA_LAYER, IN_MIXTURE_LAYER, KEYS, OUTSIDE

NUMBERS = {kind.name: number for number, kind in BLOCK_FORMATS.items()}
Tensors = dict[str, tuple[str, tuple[int, ...], np.ndarray]]  # type, shape and bytes by name


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    """Return the type and the value of a metadata entry."""
    for kind, number, layout in ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f")):
        if type(item) is kind:
            return struct.pack("<I", number) + struct.pack(layout, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    elements = [value(each) for each in item]
    return struct.pack("<I", 9) + elements[0][:4] + struct.pack("<Q", len(item)) + b"".join(e[4:] for e in elements)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += string(name) + axes + struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw.tobytes() + bytes(-raw.nbytes % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows with the two halves of each head interleaved, as llama.cpp stores queries and keys of Llama."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def as_gguf(checkpoint: Path, arch: str, quantized: Mapping[str, tuple[str, np.ndarray]] | None = None) -> Path:
    """Write a checkpoint as model.gguf into a folder beside it. `quantized` has types and bytes of some matrices."""
    keys = json.loads((checkpoint / "config.json").read_text())
    metadata = {f"{arch}.{name}": keys[key] for key, name in KEYS.items() if keys.get(key) is not None}
    metadata |= {"general.architecture": arch, **tokenizer_metadata(checkpoint)}
    if keys.get("rope_theta") is None:
        metadata[f"{arch}.rope.freq_base"] = keys["rope_parameters"]["rope_theta"]
    if linear := keys.get("rope_scaling"):
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": linear["factor"]}
    in_layer = IN_GEMMA_LAYER if "gemma" in arch else IN_MIXTURE_LAYER
    names = {ours: theirs for theirs, ours in in_layer.items()}
    names |= {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for theirs, ours in OUTSIDE.items()}
    tensors: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}  # matrices of experts, by the names of the stacks
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        found = name.split(".", 3) if "layers" in name else None
        inner, _, end = (found[3] if found else name).rpartition(".")
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", inner)
        theirs = f"ffn_{expert[2]}_exps" if expert else names[inner]
        theirs = (f"blk.{found[2]}." if found else "") + f"{theirs}.{end}"
        tensor = tensor + 1 if "gemma" in arch and "norm" in name else tensor
        if arch == "llama" and inner[-6:] in ("q_proj", "k_proj"):
            heads = keys["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            tensor = interleaved(tensor, heads)
        kind, raw = (quantized or {}).get(name, ("F32", tensor.astype(np.float32)))
        if expert:
            stacks.setdefault(theirs, {})[int(expert[1])] = raw
            raw = np.stack([matrix for _, matrix in sorted(stacks[theirs].items())])
        tensors[theirs] = (kind, (len(raw), *tensor.shape) if expert else tensor.shape, raw)
    folder = checkpoint.parent / "gguf"
    folder.mkdir()
    return write_gguf(folder / "model.gguf", metadata, tensors)


def tokenizer_metadata(checkpoint: Path) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = tokenizer["model"]["vocab"] | special
    merges = tokenizer["model"]["merges"]
    made = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": sorted(tokens, key=tokens.__getitem__),
        "token_type": [3 if token in special else 1 for token in sorted(tokens, key=tokens.__getitem__)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "eos_token_id": special["<|im_end|>"],
        "eot_token_id": special["<|endoftext|>"],
    }
    named = {f"tokenizer.ggml.{key}": item for key, item in made.items()}
    return named | {"tokenizer.chat_template": config["chat_template"]}
