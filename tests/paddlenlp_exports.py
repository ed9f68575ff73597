"""Static graphs as PaddleNLP exports them, made of small checkpoints: names, layouts and files after its code, weights
quantized and saved by Paddle. PaddleNLP's own ops need a GPU, so that the program only mentions the parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.base.proto import framework_pb2
from safetensors.numpy import load_file

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
HEADS = {
    "llama": "llama_lm_head_0.w_0",
    "qwen2": "qwen2lm_head_0.w_0",
    "mixtral": "mixtral_lm_head_0.w_0",
    "qwen2_moe": "qwen2_moe_lm_head_0.w_0",
}
EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen2_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
TYPES = {"float32": 5, "float16": 4, "bfloat16": 22, "int8": 21}
Tensors = dict[str, np.ndarray]


def make_export(checkpoint: Path, out: Path, num_ranks: int = 1, quant: str | None = None, **how) -> Path:
    """Write the export of a checkpoint as PaddleNLP does. `how` may have dtype, arch (of the GPU), static_cache, and
    suffix (of the program)."""
    config = json.loads((checkpoint / "config.json").read_text())
    dtype, static_cache = how.get("dtype", "float16"), how.get("static_cache", False)
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors"))
    added = {
        "infer_model_block_size": 64,
        "infer_model_max_seq_len": 512,
        "infer_model_cachekv_int8_type": "static" if static_cache else None,
        "infer_model_dtype": dtype,
        "infer_model_paddle_commit": "0" * 40,
        "quant_type": quant or "",
        "quantization_config": {"quant_type": quant},  # not the hub's
        "tensor_parallel_degree": num_ranks,
    }
    config.pop("tie_word_embeddings", None)  # as its default
    (out / "config.json").write_text(json.dumps(config | added))
    tensors = load_file(checkpoint / "model.safetensors")
    for rank in range(num_ranks):
        params = dict(_top(config, tensors, rank, num_ranks, dtype))
        for layer in range(config["num_hidden_layers"]):
            cut = _Rank(config, tensors, f"model.layers.{layer}.", rank, num_ranks)
            prefix = f"fuse{config['model_type']}.{layer}."
            for leaf, array in cut.parameters().items():
                is_router = leaf in ("gate_weight", "shared_expert_gate_weight")
                if array.ndim > 1 and quant and not is_router:
                    made = _quantized(leaf, array, quant, how.get("arch", 80))
                else:
                    made = {leaf: _tensor(array, "float32" if leaf == "gate_weight" else dtype)}
                params |= {prefix + name: tensor for name, tensor in made.items()}
            if static_cache:
                scales = [f"{prefix}cache_{which}_scale" for which in ("k", "v", "k_out", "v_out")]
                params |= {name: paddle.ones([cut.kv_heads // num_ranks]) for name in scales}
        _save(out / f"rank_{rank}", params, how.get("arch", 80) if quant else None, how.get("suffix", ".json"))
    return out


class _Rank:
    """The fused parameters of a layer, of one rank: in and out as PaddleNLP has them, not as linear layers do."""

    def __init__(self, config: dict, tensors: Tensors, prefix: str, rank: int, num_ranks: int):  # noqa: PLR0913
        self._tensors, self._prefix, self._rank, self._num_ranks = tensors, prefix, rank, num_ranks
        self._model_type = config["model_type"]
        self.kv_heads = config["num_key_value_heads"]

    def parameters(self) -> Tensors:
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        made = {
            "ln_scale": self._tensors[f"{self._prefix}input_layernorm.weight"],
            "ffn_ln_scale": self._tensors[f"{self._prefix}post_attention_layernorm.weight"],
            "qkv_weight": np.concatenate([self._share(name, 0) for name in qkv]),
            "out_proj_weight": self._share("self_attn.o_proj", 1).T,
        }
        made |= self._mixture() if self._has_experts() else self._mlp("mlp")
        if f"{self._prefix}{qkv[0]}.bias" in self._tensors:
            made["qkv_bias"] = np.concatenate([self._share(name, 0, "bias") for name in qkv])
        return made

    def _has_experts(self) -> bool:
        return any(name.startswith(self._prefix) and ".experts." in name for name in self._tensors)

    def _mlp(self, block: str, leaf: str = "") -> Tensors:
        gate_up, down = EXPERTS.get(self._model_type, EXPERTS["qwen2_moe"])[1:]
        return {
            f"{leaf}ffn1_weight": np.concatenate([self._share(f"{block}.{name}", 0) for name in gate_up]).T,
            f"{leaf}ffn2_weight": self._share(f"{block}.{down}", 1).T,
        }

    def _mixture(self) -> Tensors:
        block = EXPERTS[self._model_type][0]
        router = self._tensors[f"{self._prefix}{block}.gate.weight"]
        experts = [self._mlp(f"{block}.experts.{expert}") for expert in range(len(router))]
        made = {name: np.stack([expert[name] for expert in experts]) for name in experts[0]}
        if self._model_type == "qwen2_moe":
            gate = self._tensors[f"{self._prefix}{block}.shared_expert_gate.weight"]
            made |= self._mlp(f"{block}.shared_expert", "shared_expert_") | {"shared_expert_gate_weight": gate.T}
        return made | {"gate_weight": router.T}

    def _share(self, name: str, axis: int, end: str = "weight") -> np.ndarray:
        return np.split(self._tensors[f"{self._prefix}{name}.{end}"], self._num_ranks, axis)[self._rank]


def _top(config: dict, tensors: Tensors, rank: int, num_ranks: int, dtype: str):
    table, head = tensors["model.embed_tokens.weight"], tensors.get("lm_head.weight")
    is_shared = num_ranks > 1 and len(table) % num_ranks == 0

    def share(array: np.ndarray) -> np.ndarray:
        return np.split(array, num_ranks)[rank] if is_shared else array

    yield ("vocab_parallel_" if is_shared else "") + "embedding_0.w_0", _tensor(share(table), dtype)
    yield "create_parameter_0.w_0", _tensor(tensors["model.norm.weight"], dtype)
    if head is not None:
        yield HEADS[config["model_type"]], _tensor(share(head).T, dtype)


def _tensor(array: np.ndarray, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(array.astype(np.float32, order="C")).astype(dtype)


def _quantized(leaf: str, array: np.ndarray, quant: str, arch: int) -> dict[str, paddle.Tensor]:
    """Return codes and scales of a matrix. PaddleNLP transposes qkv_weight first, so that all are [K, N]. The bytes of
    an expert have a shape of their own: [K, N] with 8 bits, [K, N / 2] with 4."""
    if array.ndim == 3:
        made = [_quantized(leaf, each, quant, arch) for each in array]
        codes, scales = (paddle.stack([each[name] for each in made]) for name in (leaf, f"{leaf}_scale"))
        return {leaf: codes.reshape([len(array), array.shape[1], -1]), f"{leaf}_scale": scales}
    matrix = _tensor(array.T if leaf == "qkv_weight" else array, "float16")
    codes, scale = paddle.nn.quant.weight_quantize(matrix, algo=quant, arch=arch)
    return {leaf: codes, f"{leaf}_scale": scale}


class _Mentions(paddle.nn.Layer):
    def __init__(self, params: dict[str, paddle.Tensor]):
        super().__init__()
        for name, tensor in params.items():
            self.add_parameter(name.replace(".", "/"), EagerParamBase.from_tensor(tensor, name=name, trainable=False))

    @paddle.jit.not_to_static
    def forward(self, x):
        for parameter in self._parameters.values():
            x = x + parameter.cast("float32").sum()
        return x


def _save(folder: Path, params: dict[str, paddle.Tensor], arch: int | None, suffix: str) -> None:
    layer = _Mentions(params)
    layer.eval()
    paddle.jit.save(layer, str(folder / "model"), input_spec=[paddle.static.InputSpec([None], "float32", "x")])
    program = folder / "model.json"
    if suffix == ".pdmodel":
        program.unlink()
        program.with_suffix(suffix).write_bytes(_paddle_2(params, arch))
    elif arch:
        document = json.loads(program.read_text())
        numbers = [
            {"N": "arch", "AT": {"#": "0.a_i32", "D": arch}},
            {"N": "group_size", "AT": {"#": "0.a_i32", "D": -1}},
        ]
        [region] = document["program"]["regions"]
        region["blocks"][0]["ops"].append({"#": "1.weight_only_linear", "A": numbers, "I": [], "O": []})
        program.write_text(json.dumps(document))


def _paddle_2(params: dict[str, paddle.Tensor], arch: int | None) -> bytes:
    program = framework_pb2.ProgramDesc()
    block = program.blocks.add(idx=0, parent_idx=-1)
    for name, kind in (("feed", framework_pb2.VarType.FEED_MINIBATCH), ("fetch", framework_pb2.VarType.FETCH_LIST)):
        block.vars.add(name=name, persistable=True).type.type = kind
    for name, tensor in params.items():
        variable = block.vars.add(name=name, persistable=True)
        variable.type.type = framework_pb2.VarType.DENSE_TENSOR
        variable.type.dense_tensor.tensor.data_type = TYPES[tensor.dtype.name.lower()]
        variable.type.dense_tensor.tensor.dims.extend(tensor.shape)
    block.vars.add(name="x").type.type = framework_pb2.VarType.DENSE_TENSOR  # no parameter
    if arch:
        block.ops.add(type="weight_only_linear").attrs.add(name="arch", type=framework_pb2.INT, i=arch)
    return program.SerializeToString()
