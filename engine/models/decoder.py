"""The decoder that dense families share: grouped-query attention, a gated MLP, a residual between them.

A family gives its layers (`Decoder.of`), which it may put together of other parts than these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.dtypes import scale_bytes
from engine.models.config import DecoderConfig
from engine.models.formats import head_format
from engine.models.keys import ModelError
from engine.models.kv_cache import ATTENTION_AXES, CacheSpec
from engine.models.layers import (
    HIDDEN,
    LOGIT_ROWS,
    LOGITS,
    WHERE,
    Embedding,
    Head,
    Linear,
    Norm,
    Place,
    Rotary,
    Run,
    Tensor,
)
from engine.models.weights import Shard


@dataclass(frozen=True)
class Attention:
    """Query, key and value projections, optional norms of the heads, attention over the paged cache."""

    qkv_proj: Linear
    head_norms: tuple[Norm, ...]  # of queries and of keys, or none
    o_proj: Linear
    cache: CacheSpec
    num_heads: int  # of this rank
    head_dim: int

    @classmethod
    def of(
        cls, config: DecoderConfig, place: Place, qkv_bias: bool = False, o_bias: bool = False, head_norms: bool = False
    ) -> Attention:
        shard, head_dim = place.shard, config.head_dim
        heads, kv_heads = shard.heads(config.num_heads), shard.heads(config.num_kv_heads)
        queries, keys = (each.each(head_dim, config.has_rotary_pairs) for each in (heads, kv_heads))
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": kv_heads.each(head_dim)}
        norms = ("self_attn.q_norm", "self_attn.k_norm") if head_norms else ()
        cache_shape = (-1, 2, kv_heads.size, shard.block_size, head_dim + scale_bytes(shard.cache_dtype))
        return cls(
            qkv_proj=Linear.columns(place, "qkv_proj", qkv, config.hidden_size, qkv_bias),
            head_norms=tuple(Norm.of(place, name, head_dim, config.rms_norm_eps) for name in norms),
            o_proj=Linear.rows(place, "self_attn.o_proj", config.hidden_size, heads.each(head_dim), o_bias),
            cache=CacheSpec(f"kv_cache_{place.layer}", shard.cache_dtype, cache_shape, ATTENTION_AXES),
            num_heads=heads.size,
            head_dim=head_dim,
        )

    def __call__(self, run: Run, x: Tensor, cos_sin: Tensor) -> Tensor:
        """All but the output projection, which not every row needs."""
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.cache.shape[2]}
        qkv = self.qkv_proj(run, x)
        if self.head_norms:
            weights = [run.params[norm.weight.name] for norm in self.head_norms]
            qkv = run.ops.head_norm(qkv, *weights, **heads, epsilon=self.head_norms[0].epsilon)
        where = [run.inputs[name] for name in WHERE]
        cache = run.inputs[self.cache.name]
        out, _ = run.ops.paged_attention(qkv, cos_sin, cache, *where, **heads, scale=self.head_dim**-0.5)
        return out


@dataclass(frozen=True)
class GatedMlp:
    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def of(cls, config: DecoderConfig, place: Place, bias: bool = False) -> GatedMlp:
        inner = place.shard.share(config.intermediate_size)
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return cls(
            Linear.columns(place, "gate_up_proj", gate_up, config.hidden_size, bias),
            Linear.rows(place, "mlp.down_proj", config.hidden_size, inner, bias),
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down_proj(run, run.ops.swiglu(self.gate_up_proj(run, x)))


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp

    @classmethod
    def of(cls, config: DecoderConfig, place: Place, attention: Attention, mlp: GatedMlp) -> DecoderLayer:
        """With the norms before attention and MLP."""
        size, epsilon = config.hidden_size, config.rms_norm_eps
        return cls(
            Norm.of(place, "input_layernorm", size, epsilon),
            attention,
            Norm.of(place, "post_attention_layernorm", size, epsilon),
            mlp,
        )


@dataclass(frozen=True)
class Decoder:
    """From the tokens of a step to the logits of the rows that are wanted, and what these are made of."""

    rotary: Rotary
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Head

    outputs = (LOGITS, HIDDEN)  # in the order in which a call gives them

    @classmethod
    def of(cls, config: DecoderConfig, shard: Shard, layer: Callable[[Place], DecoderLayer]) -> Decoder:
        """Raises ModelError where the ranks cannot share the heads."""
        _check_ranks(config, shard.num_ranks)
        top = Place(shard)
        embedding = Embedding.of(top, config.vocab_size, config.hidden_size)
        return cls(
            rotary=Rotary.of(config.rope),
            embedding=embedding,
            layers=tuple(layer(Place(shard, i)) for i in range(config.num_layers)),
            norm=Norm.of(top, "norm", config.hidden_size, config.rms_norm_eps),
            head=Head.of(embedding, config.tied_embeddings, head_format(shard.format, shard.dtype)),
        )

    def __call__(self, run: Run) -> tuple[Tensor, ...]:
        cos_sin = self.rotary(run)
        x, residual = self.embedding(run), None
        for layer in self.layers:
            x, residual = layer.input_norm(run, x, residual)
            x = layer.attention(run, x, cos_sin)
            if layer is self.layers[-1]:  # from here on no row needs another one
                rows = run.inputs[LOGIT_ROWS]
                x, residual = run.ops.gather_rows(x, rows), run.ops.gather_rows(residual, rows)
            x, residual = layer.mlp_norm(run, layer.attention.o_proj(run, x), residual)
            x = layer.mlp(run, x)
        x, _ = self.norm(run, x, residual)
        return self.head(run, x), x


def _check_ranks(config: DecoderConfig, num_ranks: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        raise ModelError(f"num_ranks (MP_NUM) is {num_ranks}, it must divide num_attention_heads, which is {heads}")
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise ModelError(
            f"num_ranks (MP_NUM) is {num_ranks}, it must divide num_key_value_heads, which is {kv_heads}, or be a"
            " multiple of it"
        )
