"""Reads a static graph that PaddleNLP has exported as if it were the checkpoint that it was exported from.

The programs are not run: a new graph is exported, and they only give the names of parameters. Supported are Llama,
Qwen2, Mixtral and Qwen2-MoE in bf16, fp16, weight_only_int8 and weight_only_int4, of one or several ranks;
paddlenlp_kinds.py refuses others. The scales of a static int8 KV cache are not used, since our cache has a scale for
each key and value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.models.checkpoint import Checkpoint
from engine.models.compressed_tensors import as_stored
from engine.models.config_fields import ModelError, read_json, whole_number
from engine.models.families import read_model
from engine.models.mixture_config import MixtureConfig
from engine.models.paddle_packed import PaddlePacked, packed
from engine.models.paddlenlp_kinds import FROM_CHECKPOINT, MIXTURES, MODEL_TYPES, kind_of, refuse
from engine.models.quantized_tensors import KEY, Quantization
from engine.models.stored_tensors import ConcatenatedTensor, StoredTensor
from engine.paddle_files import PaddleFileError, read_params, read_program

KINDS = "Llama, Qwen2, Mixtral or Qwen2-MoE in bf16, fp16, weight_only_int8 or weight_only_int4"
OLDEST_ARCH = 75  # of a GPU; from it on, quantized matrices have the same layout on all GPUs
OF_LAYER = re.compile(rf"fuse({'|'.join(MODEL_TYPES)})\.(\d+)\.(\w+?)(_weight|_weight_scale|_bias|)")
NOT_NEEDED = re.compile(r"fuse\w+\.\d+\.cache_[kv](_out)?_scale")
Leaves = Mapping[str, tuple[tuple[str, ...], int | None]]
LAYER: Leaves = {  # the checkpoint's tensors in each, and the axis of a matrix [N, K] that is divided among ranks
    "ln_scale": (("input_layernorm",), None),
    "ffn_ln_scale": (("post_attention_layernorm",), None),
    "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 0),
    "out_proj": (("self_attn.o_proj",), 1),
    "ffn1": (("mlp.gate_proj", "mlp.up_proj"), 0),
    "ffn2": (("mlp.down_proj",), 1),
}

Params = Mapping[str, np.ndarray]


def rank_files(directory: Path) -> list[Path]:
    """Return the files of parameters in the order of ranks.

    The list is empty if the folder has no static graph, or has a safetensors checkpoint as well.
    """
    if any(directory.glob("*.safetensors")):
        return []
    ranks = {int(path.name[5:]): path for path in directory.glob("rank_*") if path.name[5:].isdecimal()}
    folders = [ranks[rank] for rank in sorted(ranks)] or [directory]
    return [path for folder in folders for path in sorted(folder.glob("*.pdiparams"))]


def program_of(parameters: Path) -> Path:
    """Return the program file of a file of parameters, in the format of Paddle 3 or Paddle 2. Raises ModelError."""
    for suffix in (".json", ".pdmodel"):
        if (path := parameters.with_suffix(suffix)).exists():
            return path
    raise ModelError(f"{parameters} has neither {parameters.stem}.json nor {parameters.stem}.pdmodel beside it")


def read_export(directory: Path) -> tuple[dict[str, Any], Checkpoint]:
    """Return the config.json of an export and its weights as a checkpoint. Raises ModelError if it is not supported."""
    keys = read_json(directory / "config.json")
    refuse(directory, keys.get("model_type"), keys.get("quant_type"))
    if keys.get("use_fake_parameter"):
        raise ModelError(
            f"{directory}: config.json has use_fake_parameter, its scales stand for none: {FROM_CHECKPOINT}"
        )
    files = rank_files(directory)
    wanted = keys.get("tensor_parallel_degree")
    if isinstance(wanted, int) and wanted > 1 and wanted != len(files):
        raise ModelError(
            f"{directory} has the files of {len(files)} ranks, its config.json speaks of {wanted}; all are needed"
        )
    try:
        ranks = [_read_rank(path) for path in files]
    except PaddleFileError as error:
        raise ModelError(str(error)) from None
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise ModelError(f"{directory}: its ranks have different parameters")
    tensors: dict[str, StoredTensor] = {}
    plain = {key: value for key, value in keys.items() if key != KEY}
    mixture = read_model(plain).mixture if keys["model_type"] in MIXTURES else None
    for name in ranks[0]:
        try:
            found = _as_in_checkpoint(name, ranks, keys, mixture)
            if twice := found.keys() & tensors.keys():
                raise ModelError(f"it is a second {twice.pop()}")
            tensors |= found
        except ModelError as error:
            raise ModelError(f"{directory}: parameter {name}: {error}") from None
    plain["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return plain, Checkpoint(tensors, _quantization(directory, tensors))


def _read_rank(path: Path) -> dict[str, np.ndarray]:
    program_path = program_of(path)
    program = read_program(program_path)
    model_type, quant_type = kind_of(program.parameters)
    if model_type:
        refuse(program_path, model_type, quant_type)
    for arch in (given["arch"] for op, given in program.ops if op == "weight_only_linear" and "arch" in given):
        if arch < OLDEST_ARCH:
            what = f"its weights are laid out for GPUs of arch {arch}, supported are {OLDEST_ARCH} and above"
            raise ModelError(f"{program_path}: {what}: export it on such a GPU, or {FROM_CHECKPOINT} and QUANT_TYPE")
    if b"pre_caches_0" in program_path.read_bytes():
        raise ModelError(
            f"{program_path} begins with a prefix that lies outside of it (pre_caches), which is not supported:"
            f" {FROM_CHECKPOINT}"
        )
    return read_params(path, program.parameters)


def _as_in_checkpoint(
    name: str, ranks: list[dict[str, np.ndarray]], keys: Mapping[str, Any], mixture: MixtureConfig | None
) -> dict[str, StoredTensor]:
    """Return the checkpoint tensors that a parameter holds.

    Names of parameters outside of layers contain varying numbers.
    """
    arrays = [rank[name] for rank in ranks]
    if NOT_NEEDED.fullmatch(name):
        return {}
    if name.endswith(".w_0") and arrays[0].ndim == 1:
        return {"model.norm.weight": ConcatenatedTensor((arrays[0],))}
    if name.endswith(".w_0") and ("embedding" in name or "lm_head" in name):
        is_head = "lm_head" in name
        tables = [array.T if is_head else array for array in arrays]
        shared = tables if len(tables[0]) < whole_number(keys, "vocab_size") else tables[:1]
        return {"lm_head.weight" if is_head else "model.embed_tokens.weight": ConcatenatedTensor(tuple(shared))}
    found = OF_LAYER.fullmatch(name)
    leaves = {**LAYER, **(_of_mixture(mixture) if mixture else {})}
    if not found or found[3] not in leaves:
        raise ModelError(f"it is not one of those of a {KINDS}")
    prefix, leaf, end = f"model.layers.{found[2]}.", found[3], found[4].lstrip("_") or "weight"
    if mixture and arrays[0].ndim == (2 if end == "weight_scale" else 3):
        columns = mixture.intermediate_size // len(ranks) if leaf == "ffn2" else whole_number(keys, "hidden_size")
        made: dict[str, StoredTensor] = {}
        for expert in range(mixture.num_experts):
            names, axis = _of_expert(mixture, expert)[leaf]
            assert axis is not None, "ranks share every matrix of an expert"
            matrices = [_expert_matrix(name, rank, expert, columns) for rank in ranks]
            made |= _parts([f"{prefix}{each}.{end}" for each in names], axis, (1,) * len(names), matrices)
        return made
    names, axis = leaves[leaf]
    matrices = [rank[name][:, None] if end == "weight_scale" else _matrix(name, rank, leaf) for rank in ranks]
    if axis is None:
        return {f"{prefix}{names[0]}.{end}": ConcatenatedTensor((matrices[0],))}
    heads = whole_number(keys, "num_attention_heads")
    kv_heads = whole_number(keys, "num_key_value_heads", heads)
    shares = (heads, kv_heads, kv_heads) if leaf == "qkv" else (1,) * len(names)
    return _parts([f"{prefix}{each}.{end}" for each in names], axis, shares, matrices)


def _of_mixture(mixture: MixtureConfig) -> Leaves:
    """Return the parameters of a layer with a mixture of experts that are not stacks of its experts."""
    gate, up, down = (f"{mixture.block}.{mixture.shared}.{name}" for name in mixture.projections)
    shared: Leaves = {
        "shared_expert_ffn1": ((gate, up), 0),
        "shared_expert_ffn2": ((down,), 1),
        "shared_expert_gate": ((f"{mixture.block}.{mixture.shared_gate}",), None),
    }
    return {"gate": ((f"{mixture.block}.{mixture.router}",), None), **(shared if mixture.shared else {})}


def _of_expert(mixture: MixtureConfig, expert: int) -> Leaves:
    gate, up, down = (f"{mixture.block}.experts.{expert}.{name}" for name in mixture.projections)
    return {"ffn1": ((gate, up), 0), "ffn2": ((down,), 1)}


def _parts(names: Sequence[str], axis: int, shares: Sequence[int], matrices: list[Any]) -> dict[str, StoredTensor]:
    """Return the tensors `names` whose rows are one after another in the matrix of each rank."""
    made: dict[str, StoredTensor] = {}
    each, rest = divmod(matrices[0].shape[0], sum(shares))
    if rest:
        raise ModelError(f"{matrices[0].shape[0]} rows cannot be {len(names)} matrices in the ratio of {tuple(shares)}")
    start = 0
    for name, share in zip(names, shares, strict=True):
        stop = start + share * each
        of_ranks = tuple(m.rows(start, stop) if isinstance(m, PaddlePacked) else m[start:stop] for m in matrices)
        made[name] = ConcatenatedTensor(of_ranks, axis)
        start = stop
    return made


def _matrix(name: str, params: Params, leaf: str) -> Any:
    """Return a parameter as a matrix [N, K] with a row per output. Other arrays than matrices are not changed."""
    array = params[name]
    if array.ndim != 2:
        return array
    if array.dtype != np.int8:
        return array if leaf == "qkv" else array.T
    return packed(array, _scale(name, params), array.shape[1])


def _expert_matrix(name: str, params: Params, expert: int, columns: int) -> Any:
    """Return the matrix [N, K = `columns`] of one expert, or its scales [N, 1]."""
    array = params[name][expert]
    if name.endswith("_scale"):
        return array[:, None]
    return array.T if array.dtype != np.int8 else packed(array, _scale(name, params)[expert], columns)


def _scale(name: str, params: Params) -> np.ndarray:
    if (scale := params.get(f"{name}_scale")) is None:
        raise ModelError(f"it has 8-bit numbers without scales, which is not how a {KINDS} is stored")
    return scale


def _quantization(directory: Path, tensors: Mapping[str, StoredTensor]) -> tuple[Quantization, ...]:
    formats = {tensor.get_dtype() for tensor in tensors.values()} & {"I8", "U8"}
    if not formats:
        return ()
    if len(formats) > 1:
        raise ModelError(f"{directory} has matrices of 8 and of 4 bits, all of one kind are supported")
    name = "weight_only_int8" if formats == {"I8"} else "weight_only_int4"
    return (Quantization("PaddleNLP", name, False, 0, ("weight", "weight_scale"), as_stored),)
