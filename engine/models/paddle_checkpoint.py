"""Reads checkpoints in Paddle's format: ERNIE 4.5 with and without experts, Llama and Qwen2.

Paddle stores linear layers as [in, out]. ERNIE stores query, key and value in one matrix, and gate and up in another.
This module converts names and matrices to those of transformers. The files are safetensors or pickled *.pdparams.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np

from engine.models.config_fields import ModelError, whole_number
from engine.models.fastdeploy import CODES, SCALE, FastDeployMatrix, matrix_of
from engine.models.stored_tensors import SAFETENSORS_DTYPES, ConcatenatedTensor, StoredTensor, slices

PREFIXES = {  # model_type -> prefix of the names of tensors
    "ernie4_5": "ernie.",
    "ernie4_5_moe": "ernie.",
    "llama": "llama.",
    "qwen2": "qwen2.",
}
ERNIE = ("ernie4_5", "ernie4_5_moe")
# Keys of mixtures of experts for which Paddle and transformers have different defaults
MIXTURE_KEYS = tuple(f"moe_{name}" for name in ("k", "num_experts", "num_shared_experts", "intermediate_size"))
MIXTURE_KEYS += ("moe_layer_start_index", "moe_layer_interval")
# Ends of the names of linear layers, with the router of a mixture of experts and the projection of an MTP layer.
TURNED = ("_proj", ".mlp.gate", ".mtp_linear_proj.0")
LM_HEAD = "lm_head.weight"
ERNIE_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}  # Paddle's, for keys that are missing
LOADABLE = {  # all that unpickling an array needs; other names could run code
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
    ("builtins", "tuple"),
    ("collections", "OrderedDict"),
}
PARAMETER_NAMES, CUT_ARRAYS = "StructuredToParameterName@@", "UnpackBigParamInfor@@"  # keys that are no tensors


@dataclass(frozen=True, eq=False)
class TransposedTensor:
    """View of Paddle's linear layer [in, out], or of its bias, as a tensor [out, in] of the outputs in `spans`."""

    stored: StoredTensor
    spans: Sequence[tuple[int, int]]

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def get_shape(self) -> list[int]:
        return [sum(stop - start for start, stop in self.spans), *self.stored.get_shape()[:-1]]

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, *columns = slices(key, self.get_shape())
        found, offset = [], 0
        for start, stop in self.spans:
            first, last = max(rows.start - offset, 0), min(rows.stop - offset, stop - start)
            if first < last:
                found.append(self._outputs(columns, start + first, start + last))
            offset += stop - start
        return np.concatenate(found) if found else self._outputs(columns, 0, 1)[:0]

    def _outputs(self, inputs: Sequence[slice], start: int, stop: int) -> np.ndarray:
        key = (*inputs, slice(start, stop))
        return self.stored[key].T


def as_in_transformers(
    keys: dict[str, Any], tensors: dict[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return config.json and the tensors with the names of transformers. Other formats than Paddle's are not changed.

    Raises ModelError for options that are not supported.
    """
    model_type = keys.get("model_type")
    prefix = PREFIXES.get(model_type, "") if isinstance(model_type, str) else ""
    if f"{prefix}embed_tokens.weight" not in tensors or not prefix:
        return keys, tensors
    if keys.get("compression_ratio", 1) != 1:
        raise ModelError(f"config.json: compression_ratio is {keys['compression_ratio']!r}, supported is 1")
    heads = whole_number(keys, "num_attention_heads")
    if model_type == "ernie4_5_moe" and (missing := [name for name in MIXTURE_KEYS if keys.get(name) is None]):
        raise ModelError(f"config.json: {missing[0]} is missing, which checkpoints in Paddle's format need")
    if model_type in ERNIE:
        widths = {"head_dim": whole_number(keys, "hidden_size") // heads, "num_key_value_heads": heads}
        keys = ERNIE_DEFAULTS | widths | {key: value for key, value in keys.items() if value is not None}
    is_tied = LM_HEAD not in tensors or bool(keys.get("tie_word_embeddings"))
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        ours = f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        layer, _, end = ours.rpartition(".")
        if end in (CODES, SCALE):
            made |= _quantized(name, layer, keys, tensors)
        elif layer.endswith(TURNED):
            for part, spans in _parts(layer, stored.get_shape()[-1], keys).items():
                made[f"{part}.{end}"] = TransposedTensor(stored, spans)
        elif ours == LM_HEAD and not is_tied:
            made[ours] = TransposedTensor(stored, ((0, stored.get_shape()[-1]),))
        else:
            made[ours] = stored
    return keys | {"tie_word_embeddings": is_tied}, made


def _quantized(
    name: str, layer: str, keys: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, FastDeployMatrix]:
    """Return the matrices of transformers in a layer that FastDeploy has quantized, once for its two tensors."""
    matrix = matrix_of(name.rpartition(".")[0], tensors)
    parts = _parts(layer, matrix.get_shape()[0], keys)
    return {f"{part}.weight": replace(matrix, spans=spans) for part, spans in parts.items()}


def _parts(layer: str, width: int, keys: Mapping[str, Any]) -> dict[str, Sequence[tuple[int, int]]]:
    """Return the linear layers of transformers that a layer of Paddle holds, with the spans of its `width` outputs."""
    block, _, name = layer.rpartition(".")
    if name == "up_gate_proj":
        return {f"{block}.gate_proj": ((0, width // 2),), f"{block}.up_proj": ((width // 2, width),)}
    if name != "qkv_proj":
        return {layer: ((0, width),)}
    if keys["model_type"] not in ERNIE:
        raise ModelError(f"tensor {layer} is fused: save the checkpoint with fuse_attention_qkv=False")
    heads, kv_heads = (whole_number(keys, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    size, rest = divmod(width, heads + 2 * kv_heads)
    if rest:
        raise ModelError(f"tensor {layer}: {width} outputs are not the queries, keys and values of {heads} heads")
    names = [f"{block}.{each}_proj" for each in "qkv"]
    if heads == kv_heads:  # heads are stored one after another, each as query, key and value
        return {each: _every(3 * size, i * size, size, width) for i, each in enumerate(names)}
    bounds = np.cumsum([0, heads, kv_heads, kv_heads]) * size
    return {each: ((int(bounds[i]), int(bounds[i + 1])),) for i, each in enumerate(names)}


def _every(step: int, first: int, size: int, width: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, start + size) for start in range(first, width, step))


def read_pdparams(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file that `paddle.save` has written. All are read into memory. Raises ModelError."""
    try:
        with path.open("rb") as file:
            state = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(state, dict) or CUT_ARRAYS in state:
        raise ModelError(f"{path} is no dictionary of whole tensors: save it with paddle.save(..., protocol=4)")
    found: dict[str, StoredTensor] = {}
    for name, value in state.items():
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value  # a tuple is (name, array)
        if name == PARAMETER_NAMES:
            continue
        if not isinstance(array, np.ndarray):
            raise ModelError(f"{path}: {name} is a {type(array).__name__}, tensors are supported")
        array = array.view("bfloat16") if array.dtype == np.uint16 else array
        if array.dtype.name not in SAFETENSORS_DTYPES:
            raise ModelError(f"{path}: {name} has dtype {array.dtype}, supported are {', '.join(SAFETENSORS_DTYPES)}")
        found[str(name)] = ConcatenatedTensor((array,))
    return found


class _Unpickler(pickle.Unpickler):
    """Unpickler that loads arrays only, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in LOADABLE:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, only arrays are loaded")
        return super().find_class(module, name)
