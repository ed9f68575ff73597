"""Attention over the paged KV cache, with the options in which families of models differ."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.cache_groups import PAGED, SLIDING_WINDOW, CacheGroup
from engine.dtypes import scale_bytes
from engine.models.config import DecoderConfig
from engine.models.kv_cache import LayerCache
from engine.models.layers import ROWS, LayerScope, Linear, Norm, Rotary, Run, Tensor
from engine.models.rope import Rope, no_rotation
from engine.models.weights import AxisShard, Weight

HEADS = "heads"  # each head is normalized, before the rotation
ROTATED_HEADS = "rotated heads"  # each head is normalized, after the rotation
WIDE = "wide"  # all query heads are normalized together, and all key heads together


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a family's attention."""

    qkv_bias: bool = False
    o_bias: bool = False
    packed: str = ""  # name of the tensor that holds q, k and v together; empty: each has its own tensor
    norms: str = ""  # which norms queries and keys have: HEADS, ROTATED_HEADS or WIDE; empty: none
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    rope: Rope | None = None  # None: the rope of the config
    scale: float = 0.0  # attention scores are multiplied by it; 0: by 1 / sqrt(head_dim)
    window: int = 0  # number of positions that a query attends to, including its own; 0: all
    has_sinks: bool = False  # a learned logit per head takes part in the softmax without a value
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: no cap
    has_gate: bool = False  # the output is multiplied by the sigmoid of a gate, behind the query of each head in q_proj


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of one layer on one rank: projections, optional norms, rotary embedding and KV cache."""

    qkv_proj: Linear
    norms: tuple[Norm, ...]  # the norm of queries and the norm of keys, or none
    rotary: Rotary
    unrotated: Rotary | None  # zero angles for the attention op, if the heads are rotated before it
    gate_proj: Linear | None
    o_proj: Linear
    cache: LayerCache
    num_heads: int  # query heads of this rank
    num_ranks: int
    head_dim: int
    options: AttentionOptions
    sinks: Weight | None = None  # one per query head

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope, options: AttentionOptions | None = None) -> Attention:
        """Build the attention of the layer in `scope`."""
        assert scope.layer is not None, "attention belongs to a layer"
        options = options or AttentionOptions()
        shard, head_dim = scope.shard, config.head_dim
        heads, kv_heads = shard.heads(config.num_heads), shard.heads(config.num_kv_heads)
        rope = options.rope or config.rope
        pairs = 2 * len(rope.inv_freq) if config.has_rotary_pairs else 0
        parts = heads.each(head_dim, pairs), kv_heads.each(head_dim, pairs), kv_heads.each(head_dim)
        cache_shape = (-1, 2, kv_heads.size, shard.block_size, head_dim + scale_bytes(shard.cache_dtype))
        group = CacheGroup(SLIDING_WINDOW, options.window) if options.window else CacheGroup(PAGED)
        qkv = _named(parts, options.packed)
        gates = [("self_attn.q_proj", heads.each(2 * head_dim).part(head_dim, 2 * head_dim))] * options.has_gate
        if options.has_gate:
            qkv[0] = "self_attn.q_proj", heads.each(2 * head_dim).part(0, head_dim)
        return cls(
            qkv_proj=Linear.columns(scope, "qkv_proj", qkv, config.hidden_size, options.qkv_bias),
            norms=_norms(config, scope, options, parts),
            rotary=Rotary.of(rope, config.takes_spans),
            unrotated=Rotary.of(no_rotation()) if options.norms == ROTATED_HEADS else None,
            gate_proj=Linear.columns(scope, "gate_proj", gates, config.hidden_size, False) if gates else None,
            o_proj=Linear.rows(scope, "self_attn.o_proj", config.hidden_size, heads.each(head_dim), options.o_bias),
            cache=LayerCache(scope.layer, shard.cache_dtype, cache_shape, group=group),
            num_heads=heads.size,
            num_ranks=shard.num_ranks,
            head_dim=head_dim,
            options=options,
            sinks=scope.weight("sinks", [("self_attn.sinks", (heads,))]) if options.has_sinks else None,
        )

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        """Compute the attention of the rows [T, hidden] without the output projection, which not every row needs."""
        options, heads = self.options, {"num_heads": self.num_heads, "num_kv_heads": self.cache.shape[2]}
        qkv, angles = self.qkv_proj(run, x), self.rotary(run)
        if options.norms == WIDE:
            qkv = self._wide_norm(run, qkv, heads)
        elif options.norms:
            if self.unrotated:
                qkv = run.ops.rotate_heads(qkv, angles, **heads, head_dim=self.head_dim)
                angles = self.unrotated(run)
            weights = [run.params[norm.weight.name] for norm in self.norms]
            qkv = run.ops.head_norm(qkv, *weights, **heads, epsilon=self.norms[0].epsilon)
        cache, table = run.cache_of(self.cache.layer)
        rows = [run.inputs[name] for name in ROWS]
        scale = options.scale or self.head_dim**-0.5
        limits = {"window": options.window, "softcap": options.softcap}
        sinks = run.stored(self.sinks)[0] if self.sinks else None
        out, _ = run.ops.paged_attention(qkv, angles, cache, *rows, table, sinks, **heads, scale=scale, **limits)
        return run.ops.sigmoid_gate(out, self.gate_proj(run, x)) if self.gate_proj else out

    def _wide_norm(self, run: Run, qkv: Tensor, heads: dict[str, int]) -> Tensor:
        """Normalize all queries together and all keys together. The sums of squares are added up over the ranks."""
        sums = run.ops.square_sums(qkv, **heads, head_dim=self.head_dim)
        if self.num_ranks > 1:
            sums = run.ops.all_reduce(sums)
        # Key heads that are replicated on several ranks are counted once for each rank.
        sizes = [count * self.head_dim * self.num_ranks for count in heads.values()]
        weights = [run.params[norm.weight.name] for norm in self.norms]
        given = {"head_dim": self.head_dim, "q_size": sizes[0], "k_size": sizes[1], "epsilon": self.norms[0].epsilon}
        return run.ops.wide_norm(qkv, sums, *weights, **heads, **given)


def _norms(
    config: DecoderConfig, scope: LayerScope, options: AttentionOptions, parts: tuple[AxisShard, ...]
) -> tuple[Norm, ...]:
    names = [f"self_attn.{name}" for name in options.norm_names] if options.norms else []
    if options.norms != WIDE:
        return tuple(Norm.of(config, scope, name, config.head_dim) for name in names)
    shares = zip(names, parts, strict=False)
    weights = [scope.weight(f"{name.split('.')[1]}.weight", [(f"{name}.weight", (share,))]) for name, share in shares]
    return tuple(Norm(weight, config.rms_norm_eps) for weight in weights)


def _named(parts: tuple[AxisShard, AxisShard, AxisShard], packed: str) -> list[tuple[str, AxisShard]]:
    """Return the names of the tensors that hold queries, keys and values, each with the rank's share."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return side_by_side(packed, parts) if packed else list(zip(names, parts, strict=True))


def side_by_side(name: str, parts: tuple[AxisShard, ...]) -> list[tuple[str, AxisShard]]:
    """Return, for each part, the name of the tensor that stacks all parts, and the rank's share in that tensor."""
    total, named = sum(part.count for part in parts), []
    start = 0
    for part in parts:
        named.append((name, part.within(total, start)))
        start += part.count
    return named
