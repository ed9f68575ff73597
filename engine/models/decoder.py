"""The network: the catalogue's ops (docs/ops.md) put together as Paddle layers, for one rank.

Imports Paddle, so only the export does import it. Knows no files: parameters come from a callable.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle
from paddle import Tensor, nn

from engine.models.config import DecoderConfig
from engine.ops.cpu.paddle_ops import register_paddle_ops as ops

# Gives a parameter by its name in the graph, None where the model has none of that name.
Parameters = Callable[[str], Tensor | None]
STEP_INPUTS = ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "logit_rows")


class Linear(nn.Layer):
    def __init__(self, name: str, parameters: Parameters):
        super().__init__()
        self.weight = parameters(f"{name}.weight")
        self.bias = parameters(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        return ops().linear(x, self.weight, self.bias)


class Norm(nn.Layer):
    """The norm of what a layer adds to the residual, and the sum."""

    def __init__(self, name: str, parameters: Parameters, epsilon: float):
        super().__init__()
        self.weight = parameters(f"{name}.weight")
        self.epsilon = epsilon

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:  # the first layer: nothing to add to
            return ops().rms_norm(x, self.weight, epsilon=self.epsilon), x
        return ops().add_rms_norm(x, residual, self.weight, epsilon=self.epsilon)


class Attention(nn.Layer):
    def __init__(self, name: str, parameters: Parameters, config: DecoderConfig, num_ranks: int):
        super().__init__()
        self.heads = {"num_heads": config.num_heads // num_ranks, "num_kv_heads": config.num_kv_heads // num_ranks}
        self.epsilon = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.qkv_proj = Linear(f"{name}.qkv_proj", parameters)
        self.q_norm = parameters(f"{name}.q_norm.weight")
        self.k_norm = parameters(f"{name}.k_norm.weight")

    def forward(self, x: Tensor, cos_sin: Tensor, kv_cache: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """`where`: query_starts, context_lens and block_tables say which rows read and write which blocks."""
        qkv = self.qkv_proj(x)
        if self.q_norm is not None:
            qkv = ops().head_norm(qkv, self.q_norm, self.k_norm, **self.heads, epsilon=self.epsilon)
        out, _ = ops().paged_attention(qkv, cos_sin, kv_cache, *where, **self.heads, scale=self.scale)
        return out


class Mlp(nn.Layer):
    def __init__(self, name: str, parameters: Parameters):
        super().__init__()
        self.gate_up_proj = Linear(f"{name}.gate_up_proj", parameters)
        self.down_proj = Linear(f"{name}.down_proj", parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops().swiglu(self.gate_up_proj(x)))


class DecoderLayer(nn.Layer):
    def __init__(self, name: str, parameters: Parameters, config: DecoderConfig, num_ranks: int):
        super().__init__()
        self.input_layernorm = Norm(f"{name}.input_layernorm", parameters, config.rms_norm_eps)
        self.attention = Attention(name, parameters, config, num_ranks)
        self.o_proj = Linear(f"{name}.o_proj", parameters)
        self.post_attention_layernorm = Norm(f"{name}.post_attention_layernorm", parameters, config.rms_norm_eps)
        self.mlp = Mlp(name, parameters)


class Decoder(nn.Layer):
    """From the tokens of a step to the logits of the rows that are wanted."""

    def __init__(self, config: DecoderConfig, parameters: Parameters, num_ranks: int = 1):
        super().__init__()
        self.inv_freq = parameters("inv_freq")
        self.attention_scaling = config.rope.attention_scaling
        self.embed_tokens = parameters("embed_tokens.weight")
        self.layers = nn.LayerList(
            [DecoderLayer(f"layers.{i}", parameters, config, num_ranks) for i in range(config.num_layers)]
        )
        self.norm = Norm("norm", parameters, config.rms_norm_eps)
        self.lm_head = None if config.tied_embeddings else parameters("lm_head.weight")

    @paddle.jit.not_to_static  # traced as it stands: no branch depends on values
    def forward(self, step: list[Tensor], kv_caches: list[Tensor]) -> Tensor:
        token_ids, positions, query_starts, context_lens, block_tables, logit_rows = step
        where = (query_starts, context_lens, block_tables)
        cos_sin = ops().rotary_angles(positions, self.inv_freq, attention_scaling=self.attention_scaling)
        x, residual = ops().embedding(token_ids, self.embed_tokens, first_id=0), None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer.input_layernorm(x, residual)
            x = layer.attention(x, cos_sin, kv_cache, where)
            if layer is self.layers[-1]:  # from here on no row needs another one
                x, residual = ops().gather_rows(x, logit_rows), ops().gather_rows(residual, logit_rows)
            x, residual = layer.post_attention_layernorm(layer.o_proj(x), residual)
            x = layer.mlp(x)
        x, _ = self.norm(x, residual)
        return ops().linear(x, self.embed_tokens if self.lm_head is None else self.lm_head)


def input_specs(config: DecoderConfig, dtype: str, block_size: int, num_ranks: int = 1) -> list:
    """What the graph takes: [the step's ids and positions, the KV cache of each layer]."""
    step = [
        paddle.static.InputSpec([None, None] if name == "block_tables" else [None], "int32", name)
        for name in STEP_INPUTS
    ]
    cache_shape = [None, 2, config.num_kv_heads // num_ranks, block_size, config.head_dim]
    caches = [paddle.static.InputSpec(cache_shape, dtype, f"kv_cache_{i}") for i in range(config.num_layers)]
    return [step, caches]
