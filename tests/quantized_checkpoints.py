"""Small checkpoints as others quantize them: the tensors of GPTQ, AWQ, compressed-tensors and of 8-bit floats, made
with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_bf16
from engine.ops.reference import int4_values
from tests import family_checkpoints
from tests.checkpoints import make_checkpoint

Tensors = dict[str, np.ndarray]
GROUP = 128
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "head_dim": 32}


def numbers_of(params: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the numbers of an exported matrix, or those that its codes stand for."""
    if f"{name}_scale" not in params:
        return params[name]
    codes, scale = params[name], params[f"{name}_scale"]
    if codes.dtype == np.int8:
        return codes * scale[:, None]
    return from_bf16(int4_values(codes, scale, params.get(f"{name}_zero")))


def pack(numbers: np.ndarray, axis: int, bits: int = 4, order: list[int] | None = None) -> np.ndarray:
    """Pack numbers into int32 words, the first in the lowest bits, or in another order."""
    per_word = 32 // bits
    words = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    words = words.reshape(*words.shape[:-1], -1, per_word)[..., order or range(per_word)]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(np.bitwise_or.reduce(words << shifts, axis=-1), -1, axis).view(np.int32))


def gptq(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Tensors:
    g_idx = np.arange(codes.shape[1], dtype=np.int32) // (codes.shape[1] // scale.shape[1])
    zeros = pack(zero.T - 1, axis=1)
    return {"qweight": pack(codes.T, 0), "qzeros": zeros, "scales": half(scale.T), "g_idx": g_idx}


def gptq8(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Tensors:
    """Return the tensors of GPTQ with 8 bits, which stores codes plus 128, and zero points plus 127."""
    tensors = gptq(codes, scale, zero)
    packed = pack(codes.T.astype(np.int16) + 128, 0, bits=8), pack(zero.T.astype(np.int16) + 127, 1, bits=8)
    return tensors | dict(zip(("qweight", "qzeros"), packed, strict=True))


def awq(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = (pack(numbers.T, 1, order=order) for numbers in (codes, zero))
    return dict(zip(("qweight", "qzeros"), packed, strict=True)) | {"scales": half(scale.T)}


def awq_gemv(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Tensors:
    """Return the tensors of AWQ for its GEMV kernel, which pads zero points and scales to multiples of eight."""
    padded = [np.pad(each, ((0, 0), (0, -scale.shape[1] % 8))) for each in (zero, scale)]
    return {"qweight": pack(codes, 1), "qzeros": pack(padded[0], 1), "scales": padded[1].astype(np.float16)}


def w4a16(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Tensors:
    shape = np.array(codes.shape, np.int64)
    packed = {"weight_packed": pack(codes, 1), "weight_scale": scale, "weight_shape": shape}
    return packed if (zero == 8).all() else packed | {"weight_zero_point": pack(zero, 0)}


def w8a16(codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> Tensors:
    packed = pack(codes.astype(np.int16) + 128, 1, bits=8)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": np.array(codes.shape, np.int64)}


def w8a8(codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> Tensors:
    return {"weight": codes, "weight_scale": scale}


def half(scale: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scale.astype(np.float16))


def compressed(
    bits: int, format: str, symmetric: bool = True, inputs: dict | None = None, group_size: int = GROUP
) -> dict:
    how = {"strategy": "group", "group_size": group_size} if bits == 4 else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **how}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": []}


BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
# What config.json says, who writes the tensors, and as what it is exported.
KINDS: dict[str, tuple[dict, Callable[..., Tensors], str]] = {
    "gptq": ({**GPTQ, "sym": True}, gptq, "weight_only_int4"),
    "gptq with zeros": ({**GPTQ, "sym": False}, gptq, "weight_only_int4"),
    "gptq of 32": ({**GPTQ, "group_size": 32, "sym": True}, gptq, "weight_only_int4_g32"),
    "gptq of 8 bits": ({**GPTQ, "bits": 8, "group_size": -1}, gptq8, "weight_only_int8"),
    "awq of 32": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq, "weight_only_int4_g32"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, "weight_only_int4"),
    "awq for gemv": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv"},
        awq_gemv,
        "weight_only_int4",
    ),
    "w4a16": (compressed(4, "pack-quantized"), w4a16, "weight_only_int4"),
    "w4a16 with zeros": (compressed(4, "pack-quantized", symmetric=False), w4a16, "weight_only_int4"),
    "w4a16 of 32": (compressed(4, "pack-quantized", group_size=32), w4a16, "weight_only_int4_g32"),
    "w4a16 of 32 with zeros": (
        compressed(4, "pack-quantized", symmetric=False, group_size=32),
        w4a16,
        "weight_only_int4_g32",
    ),
    "w8a16": (compressed(8, "pack-quantized"), w8a16, "weight_only_int8"),
    "w8a8": (compressed(8, "int-quantized", inputs=BY_TOKEN), w8a8, "a8w8"),
}


def random_codes(kind: str, matrix: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and zeros of numbers of the same size as the matrix's."""
    rng = np.random.default_rng(seed)
    group_size = {"weight_only_int4": GROUP, "weight_only_int4_g32": 32}.get(KINDS[kind][2], matrix.shape[1])
    groups = (len(matrix), matrix.shape[1] // group_size)
    size = (matrix.std() * rng.uniform(0.5, 1.5, groups)).astype(np.float16).astype(np.float32)
    if groups[1] == 1:
        return rng.integers(-127, 128, matrix.shape, np.int8), size / np.float32(64), np.zeros(groups, np.uint8)
    zero = rng.integers(5, 11, groups, np.uint8) if "zeros" in kind or "awq" in kind else np.full(groups, 8, np.uint8)
    return rng.integers(0, 16, matrix.shape, np.uint8), size / np.float32(4), zero


def values_of(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    each = codes.shape[1] // scale.shape[1]
    return ((codes - np.repeat(zero, each, 1).astype(np.float32)) * np.repeat(scale, each, 1)).astype(np.float32)


def make_quantized(directory: Path, kind: str, family: str = "qwen2", **sizes: int) -> tuple[Path, Path]:
    """Make a quantized checkpoint, and one with the same numbers as float32."""
    config, write, _ = KINDS[kind]
    make = family_checkpoints.make_checkpoint if family in family_checkpoints.ALL else make_checkpoint
    plain = make(directory / "plain", family, **SIZES, **sizes)
    quantized = make(directory / "quantized", family, **SIZES, **sizes, quantization_config=config)
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(sorted(numbers.items())):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        codes = random_codes(kind, tensor, seed)
        numbers[name] = values_of(*codes)
        stored |= {name.removesuffix("weight") + end: array for end, array in write(*codes).items()}
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    return quantized, plain


def floats(strategy: str, **how) -> dict:
    """Return the quantization_config of compressed-tensors with 8-bit floats."""
    config = compressed(8, "float-quantized")
    weights = config["config_groups"]["group_0"]["weights"]
    config["config_groups"]["group_0"]["weights"] = {**weights, "type": "float", "strategy": strategy, **how}
    return config


# What config.json says, the end of the scales' names, and how many rows and columns share one; 0: all.
FP8_KINDS: dict[str, tuple[dict, str, tuple[int, int]]] = {
    "a tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", (0, 0)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (0, 0)),
    "a row": ({"quant_method": "fbgemm_fp8"}, "_scale", (1, 0)),
    "a block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "_scale_inv", (128, 128)),
    "compressed rows": (floats("channel"), "_scale", (1, 0)),
    "compressed blocks": (floats("block", block_structure=[128, 128]), "_scale", (128, 128)),
}


def make_fp8(
    directory: Path,
    kind: str,
    change: Callable[[Tensors], object] = lambda stored: None,
    family: str = "qwen2",
    **others: int,
) -> tuple[Path, Path]:
    """Make a checkpoint of 8-bit floats, none of whose sides is a multiple of 128, and one with the same numbers."""
    config, end, sides = FP8_KINDS[kind]
    sizes = {"hidden_size": 264, "intermediate_size": 300, "num_attention_heads": 6, "num_key_value_heads": 2, **others}
    make = family_checkpoints.make_checkpoint if family in family_checkpoints.ALL else make_checkpoint
    plain = make(directory / "plain", family, **sizes)
    quantized = make(directory / "quantized", family, **sizes, quantization_config=config)
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in numbers.items():
        stored[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight", "_proj_qkvz.weight")):
            rows, columns = (np.arange(size) // (side or size) for size, side in zip(tensor.shape, sides, strict=True))
            shape = (rows[-1] + 1, columns[-1] + 1)
            scale = np.random.default_rng(len(stored)).uniform(0.001, 0.01, shape).astype(np.float32)
            each = scale[rows[:, None], columns]
            stored[name] = (tensor / each).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            numbers[name] = stored[name].astype(np.float32) * each
            stored[f"{name}{end}"] = scale.reshape(()) if sides == (0, 0) else scale
            stored[f"{name.removesuffix('.weight')}.input_scale"] = np.ones(1, np.float32)
    change(stored)
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    return quantized, plain


def change_tensors(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def change_quantization(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Change what config.json says of the weights."""
    path = checkpoint / "config.json"
    keys = json.loads(path.read_text())
    config = keys["quantization_config"]
    change(config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config)
    path.write_text(json.dumps(keys))
