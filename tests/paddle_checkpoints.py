"""Checkpoints in Paddle's format, made of small ones of transformers, after the layers of ERNIE and PaddleNLP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
from safetensors.numpy import load_file, save_file

PREFIXES = {"ernie4_5": "ernie", "ernie4_5_moe": "ernie", "llama": "llama", "qwen2": "qwen2"}
Tensors = dict[str, np.ndarray]


def make_paddle_checkpoint(checkpoint: Path, out: Path, files: str = "model.safetensors", **keys: object) -> Path:
    """Write a checkpoint with these `files`: model.safetensors, model_state.pdparams, or of the latter "shards".

    `keys` replace those of config.json; None leaves one out.
    """
    config = json.loads((checkpoint / "config.json").read_text()) | keys
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tensors = _in_paddle(load_file(checkpoint / "model.safetensors"), config)
    if files == "model.safetensors":
        save_file(tensors, out / files)
    elif files == "model_state.pdparams":
        _save(tensors, out / files)
    else:
        shards = {f"model_state-0000{i}-of-00002.pdparams": list(tensors)[i - 1 :: 2] for i in (1, 2)}
        for name, some in shards.items():
            _save({each: tensors[each] for each in some}, out / name)
        index = {each: name for name, some in shards.items() for each in some}
        (out / "model_state.pdparams.index.json").write_text(json.dumps({"weight_map": index}))
    return out


def quantize(checkpoint: Path, types: dict[str, str], **config: object) -> dict[str, np.ndarray]:
    """Quantize a checkpoint in Paddle's format as FastDeploy does. Return the new values of its matrices [K, N].

    `types` has `wint8` or `wint4` by parts of the names of layers; the first that fits counts.
    """
    tensors, values = load_file(checkpoint / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        bits = next((int(kind[-1]) for part, kind in types.items() if part in name), 0)
        if not bits:
            continue
        matrix = tensors[name].astype(np.float32)
        largest = 2 ** (bits - 1) - 1
        scale = np.abs(matrix).max(axis=0) / largest
        values[name] = np.clip(np.rint(matrix / scale), -largest - 1, largest) * scale
        given = paddle.to_tensor(values[name].astype(np.float32)).astype("float16")
        codes, scales = paddle.nn.quant.weight_quantize(given, algo=f"weight_only_int{bits}", arch=80)
        del tensors[name]
        layer = name.removesuffix("weight")
        tensors |= {f"{layer}quant_weight": codes.numpy(), f"{layer}weight_scale": scales.numpy().astype(np.float32)}
    save_file(tensors, checkpoint / "model.safetensors")
    keys = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(keys | {"quantization_config": config}))
    return values


def _save(tensors: Tensors, path: Path) -> None:
    is_bf16 = {name: array.dtype == ml_dtypes.bfloat16 for name, array in tensors.items()}
    made = {name: paddle.to_tensor(array.astype(np.float32)) for name, array in tensors.items()}
    paddle.save({name: each.astype("bfloat16") if is_bf16[name] else each for name, each in made.items()}, str(path))


def _in_paddle(tensors: Tensors, config: dict) -> Tensors:
    prefix, made = PREFIXES[config["model_type"]], {}
    for name, array in tensors.items():
        is_matrix = "_proj." in name or name.endswith("mlp.gate.weight") or name == "lm_head.weight"
        turned = np.ascontiguousarray(array.T) if is_matrix and array.ndim == 2 else array
        made[name.replace("model.", f"{prefix}.", 1) if name.startswith("model.") else name] = turned
    if prefix == "ernie":
        _fuse(made, config)
    return made


def _fuse(tensors: Tensors, config: dict) -> None:
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{each}_proj.")) for each in "qkv"]
        if config["num_attention_heads"] == config["num_key_value_heads"]:
            of_heads = [part.reshape(*part.shape[:-1], config["num_attention_heads"], -1) for part in parts]
            fused = np.concatenate(of_heads, axis=-1).reshape(*parts[0].shape[:-1], -1)
        else:
            fused = np.concatenate(parts, axis=-1)
        tensors[name.replace(".q_proj.", ".qkv_proj.")] = fused
    for name in [name for name in tensors if ".gate_proj." in name]:
        parts = [tensors.pop(name), tensors.pop(name.replace(".gate_proj.", ".up_proj."))]
        tensors[name.replace(".gate_proj.", ".up_gate_proj.")] = np.concatenate(parts, axis=-1)
