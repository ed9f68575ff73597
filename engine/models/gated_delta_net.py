"""Gated DeltaNet (Yang et al., 2024): the mixer of layers that keep a state of fixed size per request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from engine.core.cache_groups import STATE, CacheGroup
from engine.models.attention import side_by_side
from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError, whole_number
from engine.models.formats import FORMATS
from engine.models.kv_cache import LayerCache
from engine.models.layers import ROWS, LayerScope, Linear, Run, Tensor
from engine.models.weights import AxisShard, Weight
from engine.ops.catalogue_states import conv_lines, delta_lines

Parts = list[tuple[str, AxisShard]]


@dataclass(frozen=True)
class DeltaNetOptions:
    """Sizes of a family's Gated DeltaNet."""

    num_k_heads: int  # each is shared by num_v_heads / num_k_heads value heads
    num_v_heads: int
    head_dim: int
    num_taps: int  # positions that the convolution reads
    is_grouped: bool = False  # the checkpoint stores the rows of each key head and its value heads together

    @classmethod
    def read(cls, keys: Mapping[str, Any], is_grouped: bool) -> DeltaNetOptions:
        """Read the sizes from config.json. Raises ModelError for sizes that are not supported."""
        dims = [whole_number(keys, f"linear_{kind}_head_dim", 128) for kind in ("key", "value")]
        if dims[0] != dims[1] or dims[0] % 16:
            raise ModelError(
                "config.json: linear_key_head_dim and linear_value_head_dim must be the same multiple of 16, they are"
                f" {dims[0]} and {dims[1]}"
            )
        k_heads, v_heads = (whole_number(keys, f"linear_num_{kind}_heads") for kind in ("key", "value"))
        return cls(k_heads, v_heads, dims[0], whole_number(keys, "linear_conv_kernel_dim", 4), is_grouped)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated DeltaNet of one layer on one rank: projections, convolution, gated delta rule and gated norm."""

    qkv_proj: Linear
    z_proj: Linear  # gates of the norm
    ba_proj: Linear  # beta and decay of each value head
    conv: Weight
    a_log: Weight
    dt_bias: Weight
    norm: Weight
    epsilon: float
    o_proj: Linear
    cache: LayerCache
    sizes: DeltaNetOptions  # of this rank

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope, options: DeltaNetOptions) -> GatedDeltaNet:
        """Build the mixer of the layer in `scope`. Raises ModelError if the heads cannot be divided among the ranks."""
        assert scope.layer is not None, "a mixer belongs to a layer"
        shard, dim, hidden = scope.shard, options.head_dim, config.hidden_size
        if options.num_k_heads % shard.num_ranks:
            raise ModelError(
                f"num_ranks (MP_NUM) is {shard.num_ranks}, it must divide linear_num_key_heads, which is"
                f" {options.num_k_heads}"
            )
        k_heads, v_heads = shard.heads(options.num_k_heads), shard.heads(options.num_v_heads)
        parts = k_heads.each(dim), k_heads.each(dim), v_heads.each(dim)
        plain = replace(scope, shard=replace(shard, format=FORMATS[shard.dtype]))  # decays need more than a few bits
        qkv, z, gates = (_in_groups if options.is_grouped else _in_parts)(dim, k_heads, v_heads)
        taps = AxisShard.whole(1), AxisShard.whole(options.num_taps)
        conv = [(f"{name}.weight", (rows, *taps)) for name, rows in side_by_side("linear_attn.conv1d", parts)]
        num_lines = conv_lines(sum(part.size for part in parts), dim) + delta_lines(k_heads.size, v_heads.size, dim)
        return cls(
            Linear.columns(scope, "qkv_proj", qkv, hidden, False),
            Linear.columns(scope, "z_proj", z, hidden, False),
            Linear.columns(plain, "ba_proj", gates, hidden, False),
            scope.weight("conv1d.weight", conv),
            scope.weight("A_log", [("linear_attn.A_log", (v_heads.each(1),))]),
            scope.weight("dt_bias", [("linear_attn.dt_bias", (v_heads.each(1),))]),
            scope.weight("delta_norm.weight", [("linear_attn.norm.weight", (AxisShard.whole(dim),))]),
            config.rms_norm_eps,
            Linear.rows(scope, "linear_attn.out_proj", hidden, v_heads.each(dim), False),
            LayerCache(scope.layer, "float32", (num_lines, dim), ("line", "element"), CacheGroup(STATE)),
            replace(options, num_k_heads=k_heads.size, num_v_heads=v_heads.size),
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        """Compute the rows [T, hidden] without the output projection, which not every row needs."""
        sizes, (cache, table) = self.sizes, run.cache_of(self.cache.layer)
        rows = [run.inputs[name] for name in ROWS]
        weights = [run.params[each.name] for each in (self.a_log, self.dt_bias)]
        qkv, conv, dim = self.qkv_proj(run, x), run.params[self.conv.name], sizes.head_dim
        qkv, cache = run.ops.causal_conv(qkv, conv, cache, *rows, table, head_dim=dim)
        heads = {"num_k_heads": sizes.num_k_heads, "num_v_heads": sizes.num_v_heads, "head_dim": dim}
        first = conv_lines((2 * sizes.num_k_heads + sizes.num_v_heads) * dim, dim)
        out, _ = run.ops.gated_delta_rule(
            qkv, self.ba_proj(run, x), *weights, cache, *rows, table, **heads, first_line=first
        )
        return run.ops.gated_rms_norm(out, self.z_proj(run, x), run.params[self.norm.name], epsilon=self.epsilon)


def _in_parts(dim: int, k_heads: AxisShard, v_heads: AxisShard) -> tuple[Parts, Parts, Parts]:
    """Return the tensors of the projections qkv, z and ba of Qwen3.5, each with the rank's share."""
    parts = k_heads.each(dim), k_heads.each(dim), v_heads.each(dim)
    gates = [(f"linear_attn.in_proj_{name}", v_heads.each(1)) for name in "ba"]
    return side_by_side("linear_attn.in_proj_qkv", parts), [("linear_attn.in_proj_z", v_heads.each(dim))], gates


def _in_groups(dim: int, k_heads: AxisShard, v_heads: AxisShard) -> tuple[Parts, Parts, Parts]:
    """Return the same of Qwen3-Next: for each key head, the rows of q, k, v and z, and those of b and a, follow one
    another."""
    each = v_heads.size // k_heads.size  # value heads of a key head

    def cut(name: str, sizes: tuple[int, ...]) -> Parts:
        group = k_heads.each(sum(sizes))
        return [(name, group.part(*bounds)) for bounds in pairwise(accumulate(sizes, initial=0))]

    qkvz = cut("linear_attn.in_proj_qkvz", (dim, dim, each * dim, each * dim))
    return qkvz[:3], qkvz[3:], cut("linear_attn.in_proj_ba", (each, each))
