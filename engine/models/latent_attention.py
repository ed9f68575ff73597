"""Multi-head latent attention (DeepSeek-V2): all heads share one cached row per position.

The op works in absorbed form. The part of `kv_b_proj` that makes keys of the cached rows is applied to the queries, and
the part that makes values to the sums over cached rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.core.cache_groups import CacheGroup
from engine.dtypes import latent_groups
from engine.models.config_fields import ModelError, an_object, number, whole_number
from engine.models.formats import FORMATS
from engine.models.kv_cache import BLOCK, POSITION, LayerCache
from engine.models.layers import ROWS, LayerScope, Linear, Norm, Rotary, Run, Tensor
from engine.models.weights import AxisShard, HeadSlice, Weight

if TYPE_CHECKING:
    from engine.models.config import DecoderConfig  # needed for annotations only

NORM_EPSILON = 1e-6  # of the norms between projections, whatever rms_norm_eps is, as in transformers
AXES = (BLOCK, POSITION, "element")


@dataclass(frozen=True)
class LatentOptions:
    """Sizes and options of a family's latent attention."""

    q_rank: int  # width between the two projections of the queries; 0: there is one projection
    kv_rank: int  # elements of a cached row that keys and values are made of
    nope_dim: int  # elements of a head that are not rotated
    rope_dim: int
    v_dim: int
    scale: float  # attention scores are multiplied by it
    has_bias: bool = False  # biases of q_a_proj, kv_a_proj and o_proj
    log_scale: float = 0.0  # scores at position p are multiplied by 1 + log_scale * ln(1 + p // log_scale_from)
    log_scale_from: int = 1


def read_latent(keys: Mapping[str, Any]) -> LatentOptions:
    """Read the keys of config.json that describe latent attention. Raises ModelError."""
    nope_dim, rope_dim = whole_number(keys, "qk_nope_head_dim"), whole_number(keys, "qk_rope_head_dim")
    kv_rank = whole_number(keys, "kv_lora_rank")
    for name, size in (("kv_lora_rank", kv_rank), ("qk_rope_head_dim", rope_dim)):
        if size % 2:
            raise ModelError(f"config.json: {name} is {size}, it must be even")
    scaling = {**an_object(keys, "rope_scaling"), **an_object(keys, "rope_parameters")}
    magnitude = 1.0
    if scaling.get("rope_type", scaling.get("type", "default")) != "default" and scaling.get("mscale_all_dim"):
        factor = number(scaling, "factor")
        magnitude += 0.1 * number(scaling, "mscale_all_dim") * math.log(factor) if factor > 1 else 0.0
    beta = number(scaling, "llama_4_scaling_beta") if scaling.get("llama_4_scaling_beta") else 0.0
    return LatentOptions(
        q_rank=whole_number(keys, "q_lora_rank") if keys.get("q_lora_rank") else 0,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=whole_number(keys, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * magnitude**2,
        has_bias=bool(keys.get("attention_bias")),
        log_scale=beta,
        log_scale_from=whole_number(scaling, "original_max_position_embeddings") if beta else 1,
    )


def with_rotated_dim(keys: Mapping[str, Any], options: LatentOptions) -> dict[str, Any]:
    """Return the keys of config.json as decoders read them: the rope is that of heads of `rope_dim` elements."""
    scaling = {**an_object(keys, "rope_scaling"), **an_object(keys, "rope_parameters"), "partial_rotary_factor": 1.0}
    rope = {"rope_scaling": None, "rope_parameters": scaling, "head_dim": options.rope_dim}
    return {**keys, **rope, "num_key_value_heads": keys.get("num_attention_heads")}


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention of one layer on one rank. Ranks divide the heads, and each has the whole cache."""

    q_a_proj: Linear | None
    q_a_norm: Norm | None
    q_proj: Linear  # from the hidden states, or from the output of q_a_norm
    kv_a_proj: Linear
    kv_a_norm: Norm
    key_weight: Weight  # [heads * kv_rank, nope_dim]: from queries to what is multiplied with cached rows
    value_weight: Weight  # [heads * v_dim, kv_rank]
    rotary: Rotary
    o_proj: Linear
    cache: LayerCache
    num_heads: int  # of this rank
    options: LatentOptions

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope, options: LatentOptions) -> LatentAttention:
        """Build the attention of the layer in `scope`. Raises ModelError for sizes that an int8 cache cannot have."""
        assert scope.layer is not None, "attention belongs to a layer"
        shard, sizes = scope.shard, options
        heads, pairs = shard.heads(config.num_heads), sizes.rope_dim if config.has_rotary_pairs else 0
        query = heads.each(sizes.nope_dim + sizes.rope_dim, pairs, sizes.nope_dim)
        width = sizes.kv_rank + sizes.rope_dim
        row_width = width + (_scale_bytes(sizes) if shard.has_int8_cache else 0)
        latent = AxisShard.whole(1).each(width, pairs, sizes.kv_rank)
        hidden, has_bias = config.hidden_size, sizes.has_bias
        q_a = [("self_attn.q_a_proj", AxisShard.whole(sizes.q_rank))]
        query_name, num_inputs = ("q_b_proj", sizes.q_rank) if sizes.q_rank else ("q_proj", hidden)
        latent_name = "kv_a_proj_with_mqa"
        keys, values = _key_and_value(scope, heads, sizes)
        return cls(
            q_a_proj=Linear.columns(scope, "q_a_proj", q_a, hidden, has_bias) if sizes.q_rank else None,
            q_a_norm=_norm(config, scope, "q_a_layernorm", sizes.q_rank) if sizes.q_rank else None,
            q_proj=Linear.columns(scope, query_name, [(f"self_attn.{query_name}", query)], num_inputs, False),
            kv_a_proj=Linear.columns(scope, latent_name, [(f"self_attn.{latent_name}", latent)], hidden, has_bias),
            kv_a_norm=_norm(config, scope, "kv_a_layernorm", sizes.kv_rank),
            key_weight=keys,
            value_weight=values,
            rotary=Rotary.of(config.rope),
            o_proj=Linear.rows(scope, "self_attn.o_proj", hidden, heads.each(sizes.v_dim), has_bias),
            cache=LayerCache(scope.layer, shard.cache_dtype, (-1, shard.block_size, row_width), AXES, CacheGroup()),
            num_heads=heads.size,
            options=options,
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        """Compute the attention of the rows [T, hidden] without the output projection, which not every row needs."""
        options, heads = self.options, {"num_heads": self.num_heads}
        q = x if self.q_a_proj is None or self.q_a_norm is None else self.q_a_norm.alone(run, self.q_a_proj(run, x))
        q, latent = self.q_proj(run, q), self.kv_a_proj(run, x)
        [keys], [values], [norm] = (
            run.stored(each) for each in (self.key_weight, self.value_weight, self.kv_a_norm.weight)
        )
        cache, table = run.cache_of(self.cache.layer)
        batch = [run.inputs[name] for name in ROWS]
        absorbed = run.ops.head_linear(q, keys, **heads)
        given = {"epsilon": self.kv_a_norm.epsilon, "scale": options.scale}
        log_scale = {"log_scale": options.log_scale, "log_scale_from": options.log_scale_from}
        arrays = (absorbed, q, latent, norm, self.rotary(run), cache, *batch, table)
        out, _ = run.ops.latent_attention(*arrays, **heads, **given, **log_scale)
        return run.ops.head_linear(out, values, **heads)


def _scale_bytes(sizes: LatentOptions) -> int:
    """Return the size in bytes of the scales of a position in an int8 cache. Raises ModelError."""
    for name, size in (("kv_lora_rank", sizes.kv_rank), ("qk_rope_head_dim", sizes.rope_dim)):
        if size % 4:
            raise ModelError(
                f"config.json: {name} is {size}, with an int8 KV cache (USE_CACHE_KV_INT8) it must be a multiple of 4"
            )
    return 2 * len(latent_groups(sizes.kv_rank, sizes.rope_dim))


def _norm(config: DecoderConfig, scope: LayerScope, name: str, size: int) -> Norm:
    return replace(Norm.of(config, scope, f"self_attn.{name}", size), epsilon=NORM_EPSILON)


def _key_and_value(scope: LayerScope, heads: AxisShard, sizes: LatentOptions) -> tuple[Weight, Weight]:
    """Return the parts of kv_b_proj that make keys and values of cached rows, which are never quantized."""
    width = sizes.nope_dim + sizes.v_dim
    parts = [("self_attn.kv_b_proj.weight", (heads.each(width), AxisShard.whole(sizes.kv_rank)))]
    keys, values = (scope.weight(name, parts, FORMATS[scope.shard.dtype]) for name in ("key_weight", "value_weight"))
    of_keys, of_values = HeadSlice(width, 0, sizes.nope_dim, is_turned=True), HeadSlice(width, sizes.nope_dim, width)
    return replace(keys, of_heads=of_keys), replace(values, of_heads=of_values)
