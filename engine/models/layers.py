"""The layers that families are built of. Each defines its parameters and its computation in one place.

A layer is a description that can be called with a `Run`. It is independent of Paddle and of files: the export calls it
with Paddle's ops and records the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from engine.core.cache_groups import table_name
from engine.models.formats import FLOAT32, FORMATS, Dense, Format, expert_format
from engine.models.rope import Rope
from engine.models.weights import AxisShard, Constant, Shard, TensorShard, Weight

if TYPE_CHECKING:
    from engine.models.config import DecoderConfig  # needed for annotations only
    from engine.models.kv_cache import CacheLayout

Tensor = Any  # the array type of the ops that are used
TOKEN_IDS, POSITIONS, LOGIT_ROWS = "token_ids", "positions", "logit_rows"
EMBEDDING_ROWS = "embedding_rows"  # i32 [T]: row of SPAN_EMBEDDINGS that replaces a token's embedding; -1: none
# f32 [E, H], or [E, (1 + n) H]: behind each embedding what is added behind the first n layers (DeepStack)
SPAN_EMBEDDINGS = "span_embeddings"
ROWS = ("query_starts", "context_lens")  # the tokens of each request, and how many it has in the cache
LOGITS, HIDDEN = "logits", "hidden"  # names of outputs
STATES = "states"  # output f32 [T, H]: the last hidden states of all tokens, if a layer drafts from them
PREVIOUS_STATES = "previous_states"  # input f32 [T, H] of such a layer: the state of the token before each token


def step_inputs(num_groups: int, takes_spans: bool = False) -> tuple[str, ...]:
    """Return the names of the inputs, except for the caches, of a graph with `num_groups` cache groups."""
    of_spans = (EMBEDDING_ROWS, SPAN_EMBEDDINGS) if takes_spans else ()
    return (TOKEN_IDS, POSITIONS, *ROWS, *map(table_name, range(num_groups)), LOGIT_ROWS, *of_spans)


@dataclass(frozen=True)
class Run:
    """Ops, parameters and inputs of one step, by their names in the graph."""

    ops: Any  # has the functions of engine.ops.reference, for any device
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    caches: Mapping[int, tuple[str, str]]  # layer -> names of the inputs that are its cache and its block table
    angles: dict[str, Tensor] = field(default_factory=dict)  # by the name of their frequencies; each computed once

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cache and the block table of a layer."""
        cache, table = self.caches[layer]
        return self.inputs[cache], self.inputs[table]

    def stored(self, weight: Weight) -> list[Tensor]:
        """Return the parameters that store a weight, in the order of its format."""
        return [self.params[name] for name in weight.format.parameters(weight.name)]


class Network(Protocol):
    """A network that is exported as a graph: the decoder of one rank, or one beside it."""

    @property
    def inputs(self) -> tuple[str, ...]: ...  # except for the caches

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def cache_layout(self) -> CacheLayout: ...

    @property
    def input_shapes(self) -> dict[str, tuple[int | None, ...]]: ...

    def __call__(self, run: Run) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class LayerScope:
    """Prefix of the names of a layer's weights, and the shard that the layer is built for."""

    shard: Shard
    layer: int | None = None  # index of the decoder layer; None: outside of the decoder layers
    prefix: str | None = None  # of the names of its tensors and weights; None: that of the decoder layer

    @property
    def of_experts(self) -> LayerScope:
        """Return the scope with the format that matrices of experts have."""
        return replace(self, shard=replace(self.shard, format=expert_format(self.shard.format)))

    def weight(self, name: str, parts: Iterable[tuple[str, tuple[AxisShard, ...]]], format: Format = FLOAT32) -> Weight:
        """Return the weight `name`. `parts` are names of checkpoint tensors, each with the shares of its axes."""
        prefix = "" if self.layer is None else f"layers.{self.layer}."
        of_tensors = f"model.{prefix}"
        if self.prefix is not None:
            prefix = of_tensors = self.prefix
        made_of = tuple(TensorShard(f"{of_tensors}{tensor}", axes) for tensor, axes in parts)
        is_quantized = not isinstance(format, Dense)  # else its op needs floats, also of a quantized tensor
        own = self.shard.format_of([part.tensor for part in made_of]) if is_quantized else None
        return Weight(f"{prefix}{name}", made_of, own or format)


@dataclass(frozen=True)
class Norm:
    """RMS norm of the residual, after adding the output of the layer before. Every rank has the whole weight."""

    weight: Weight
    epsilon: float

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope, name: str, size: int = 0) -> Norm:
        """Build the checkpoint's norm `name`. `size` is the length of the normalized rows; 0: the hidden size."""
        weight = scope.weight(
            f"{_short(name)}.weight", [(f"{name}.weight", (AxisShard.whole(size or config.hidden_size),))]
        )
        return cls(replace(weight, offset=config.norm_offset), config.rms_norm_eps)

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of `x` [T, H] and the residual [T, H], and the sum."""
        if residual is None:  # in the first layer, `x` is the residual
            return self.alone(run, x), x
        [weight] = run.stored(self.weight)
        return run.ops.add_rms_norm(x, residual, weight, epsilon=self.epsilon)

    def alone(self, run: Run, x: Tensor) -> Tensor:
        """Return the norm of the rows of `x`."""
        [weight] = run.stored(self.weight)
        return run.ops.rms_norm(x, weight, epsilon=self.epsilon)


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Layer norm: it also subtracts the mean of each row and adds a bias."""

    bias: Weight

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope, name: str, size: int = 0) -> LayerNorm:
        scale, size = Norm.of(config, scope, name, size), size or config.hidden_size
        bias = scope.weight(f"{_short(name)}.bias", [(f"{name}.bias", (AxisShard.whole(size),))])
        return cls(scale.weight, scale.epsilon, bias)

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else run.ops.add(x, residual)
        return self.alone(run, total), total

    def alone(self, run: Run, x: Tensor) -> Tensor:
        [weight], [bias] = run.stored(self.weight), run.stored(self.bias)
        return run.ops.layer_norm(x, weight, bias, epsilon=self.epsilon)


@dataclass(frozen=True)
class Linear:
    """Linear layer, divided among the ranks by outputs (`columns`) or by inputs (`rows`)."""

    weight: Weight
    bias: Weight | None
    is_partial: bool = False  # each rank computes a part of the sum over the inputs

    @classmethod
    def columns(
        cls, scope: LayerScope, name: str, outputs: Sequence[tuple[str, AxisShard]], num_inputs: int, bias: bool
    ) -> Linear:
        """Build a column-parallel layer of one or several stacked linear layers that have the same input.

        A rank computes its share of the outputs of each. `outputs` are their names in the checkpoint and these shares.
        """
        axes = [(f"{tensor}.weight", (share, AxisShard.whole(num_inputs))) for tensor, share in outputs]
        biases = [(f"{tensor}.bias", (share,)) for tensor, share in outputs]
        weight = scope.weight(f"{name}.weight", axes, scope.shard.format)
        return cls(weight, scope.weight(f"{name}.bias", biases) if bias else None)

    @classmethod
    def rows(cls, scope: LayerScope, name: str, num_outputs: int, inputs: AxisShard, bias: bool) -> Linear:
        """Build a row-parallel layer: ranks share the inputs, and partial sums are added. Rank 0 adds the bias."""
        outputs, shard = AxisShard.whole(num_outputs), scope.shard
        weight = scope.weight(f"{_short(name)}.weight", [(f"{name}.weight", (outputs, inputs))], shard.format)
        has_bias = bias and shard.rank == 0
        bias_weight = scope.weight(f"{_short(name)}.bias", [(f"{name}.bias", (outputs,))]) if has_bias else None
        return cls(weight, bias_weight, is_partial=shard.num_ranks > 1)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        [bias] = [None] if self.bias is None else run.stored(self.bias)
        y = self.weight.format.linear(run.ops, x, run.stored(self.weight), bias)
        return run.ops.all_reduce(y) if self.is_partial else y


@dataclass(frozen=True)
class Embedding:
    """Vocabulary-parallel embedding: a rank has the rows of its share of the token ids. With `takes_spans`, every rank
    gets the embeddings of prompt spans, which replace those of their tokens unchanged."""

    table: Weight
    ids: AxisShard
    num_ranks: int
    multiplier: float
    takes_spans: bool

    @classmethod
    def of(cls, config: DecoderConfig, scope: LayerScope) -> Embedding:
        ids = scope.shard.share(config.vocab_size)
        axes = [("embed_tokens.weight", (ids, AxisShard.whole(config.hidden_size)))]
        table = scope.weight("embed_tokens.weight", axes, FORMATS[scope.shard.dtype])
        return cls(table, ids, scope.shard.num_ranks, config.embedding_multiplier, config.takes_spans)

    def __call__(self, run: Run) -> Tensor:
        [table] = run.stored(self.table)
        x = run.ops.embedding(run.inputs[TOKEN_IDS], table, first_id=self.ids.start)
        x = scaled(run, x if self.num_ranks == 1 else run.ops.all_reduce(x), self.multiplier)
        if not self.takes_spans:
            return x
        return run.ops.replace_rows(x, run.inputs[EMBEDDING_ROWS], run.inputs[SPAN_EMBEDDINGS])


@dataclass(frozen=True)
class Head:
    """Vocabulary-parallel output projection, from the last hidden states to logits. Every rank gets all logits."""

    table: Weight
    vocab_size: int
    num_ranks: int
    multiplier: float
    softcap: float

    @classmethod
    def of(cls, config: DecoderConfig, embedding: Embedding, format: Format) -> Head:
        """Build the output projection. Its shape and share are those of the embedding.

        If the embeddings are tied, it has the values of the embedding's table, and is the same parameter if `format`
        is the table's format, too.
        """
        [of_table] = embedding.table.parts
        table, tied = embedding.table, config.tied_embeddings
        if not tied or format != table.format:
            table = Weight(
                "lm_head.weight", (of_table if tied else TensorShard("lm_head.weight", of_table.axes),), format
            )
        return cls(table, config.vocab_size, embedding.num_ranks, config.logit_multiplier, config.logit_softcap)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        logits = self.table.format.linear(run.ops, x, run.stored(self.table), None)
        if self.num_ranks > 1:
            logits = run.ops.all_gather(logits, num_ranks=self.num_ranks, width=self.vocab_size)
        logits = scaled(run, logits, self.multiplier)
        return run.ops.softcap(logits, cap=self.softcap) if self.softcap else logits


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: computes the cosines and sines of a step's positions.

    `axes` selects, for each angle, one of the three positions of a token; None if a token has one position.
    """

    inv_freq: Constant
    attention_scaling: float
    axes: Constant | None = None

    @classmethod
    def of(cls, rope: Rope, may_be_3d: bool = False) -> Rotary:
        """Build it from a rope. Without `may_be_3d`, M-RoPE needs one position only: in text, all three are equal."""
        axes = None if rope.axes is None or not may_be_3d else Constant(f"{rope.name}_axes", rope.axes)
        return cls(Constant(rope.name, rope.inv_freq), rope.attention_scaling, axes)

    def __call__(self, run: Run) -> Tensor:
        name = self.inv_freq.name
        if name not in run.angles:
            positions, scaling = run.inputs[POSITIONS], {"attention_scaling": self.attention_scaling}
            if self.axes:
                arrays = (positions, run.params[name], run.params[self.axes.name])
                run.angles[name] = run.ops.mrope_angles(*arrays, **scaling)
            else:
                run.angles[name] = run.ops.rotary_angles(positions, run.params[name], **scaling)
        return run.angles[name]


def scaled(run: Run, x: Tensor, factor: float) -> Tensor:
    """Return `x` multiplied by a constant factor, without an op if that is 1."""
    return x if factor == 1 else run.ops.scale(x, factor=factor)


def _short(name: str) -> str:
    """Return the graph's name for a layer of the checkpoint, which omits the redundant name of the module around it."""
    return name.replace("self_attn.", "").replace("mlp.", "")
