"""The list of a decoder's parameters: name in the graph, shape, and the checkpoint tensors each is made from.

Also the only place that knows how tensor parallelism cuts them. Plain data: neither files nor Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import DecoderConfig
from engine.models.keys import ModelError


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor that goes into a parameter."""

    tensor: str
    shape: tuple[int, ...]  # whole, before the ranks cut it
    cut_axis: int | None = None  # ranks hold equal slices along it; None: every rank holds all

    def rank_shape(self, num_ranks: int) -> tuple[int, ...]:
        return tuple(n // num_ranks if axis == self.cut_axis else n for axis, n in enumerate(self.shape))


@dataclass(frozen=True)
class Weight:
    """One parameter of the graph: its parts stacked along the first axis."""

    name: str
    parts: tuple[Part, ...]
    is_matrix: bool = False  # has the graph's dtype; norms and biases are always float32

    def rank_shape(self, num_ranks: int) -> tuple[int, ...]:
        shapes = [part.rank_shape(num_ranks) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def list_weights(config: DecoderConfig, rank: int = 0, num_ranks: int = 1) -> list[Weight]:
    """Every parameter of one rank but `inv_freq`, in the order of their use."""
    _check_ranks(config, num_ranks)
    table = (config.vocab_size, config.hidden_size)
    weights = [_whole("embed_tokens.weight", table, is_matrix=True)]
    for layer in range(config.num_layers):
        # The partial sums of row-parallel layers are added up, so one rank alone adds the bias.
        weights += _layer_weights(config, f"layers.{layer}", has_row_bias=rank == 0)
    weights.append(_whole("norm.weight", (config.hidden_size,)))
    if not config.tied_embeddings:
        weights.append(Weight("lm_head.weight", (Part("lm_head.weight", table),), is_matrix=True))
    return weights


def _layer_weights(config: DecoderConfig, layer: str, has_row_bias: bool) -> list[Weight]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    o_bias, down_bias = config.o_bias and has_row_bias, config.mlp_bias and has_row_bias
    head_norms = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
    return [
        _whole(f"{layer}.input_layernorm.weight", (hidden,)),
        *_column_parallel(layer, "qkv_proj", qkv, hidden, config.qkv_bias),
        *(_whole(f"{layer}.{norm}.weight", (config.head_dim,)) for norm in head_norms),
        *_row_parallel(layer, "self_attn.o_proj", (hidden, heads), o_bias),
        _whole(f"{layer}.post_attention_layernorm.weight", (hidden,)),
        *_column_parallel(layer, "gate_up_proj", gate_up, hidden, config.mlp_bias),
        *_row_parallel(layer, "mlp.down_proj", (hidden, inner), down_bias),
    ]


def _short(name: str) -> str:
    """The graph's name of a checkpoint's tensor: the module it sits in says nothing the rest does not."""
    return name.replace("self_attn.", "").replace("mlp.", "")


def _whole(name: str, shape: tuple[int, ...], is_matrix: bool = False) -> Weight:
    return Weight(_short(name), (Part(f"model.{name}", shape),), is_matrix)


def _column_parallel(layer: str, name: str, rows: dict[str, int], num_inputs: int, bias: bool) -> list[Weight]:
    """Linear layers with the same input, stacked. A rank holds its heads' rows of each."""
    parts = tuple(Part(f"model.{layer}.{part}.weight", (n, num_inputs), cut_axis=0) for part, n in rows.items())
    weights = [Weight(f"{layer}.{name}.weight", parts, is_matrix=True)]
    if bias:
        parts = tuple(Part(f"model.{layer}.{part}.bias", (n,), cut_axis=0) for part, n in rows.items())
        weights.append(Weight(f"{layer}.{name}.bias", parts))
    return weights


def _row_parallel(layer: str, name: str, shape: tuple[int, int], bias: bool) -> list[Weight]:
    """A linear layer whose input is spread over the ranks: a rank holds the matching columns."""
    part = Part(f"model.{layer}.{name}.weight", shape, cut_axis=1)
    weights = [Weight(f"{layer}.{_short(name)}.weight", (part,), is_matrix=True)]
    if bias:
        weights.append(_whole(f"{layer}.{name}.bias", (shape[0],)))
    return weights


def _check_ranks(config: DecoderConfig, num_ranks: int) -> None:
    for name in ("num_kv_heads", "intermediate_size"):
        if getattr(config, name) % num_ranks:
            raise ModelError(f"num_ranks is {num_ranks}, it must divide {name}, which is {getattr(config, name)}")
