"""The layers that families are made of. Each says once what its parameters are and what it computes with them.

A layer is a description and a function of a `Run`. It knows neither Paddle nor files: the export runs it with Paddle's
ops to make a graph of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.core.cache_groups import table_name
from engine.models.formats import FLOAT32, FORMATS, Format
from engine.models.rope import Rope
from engine.models.weights import Constant, Part, Shard, Share, Weight

if TYPE_CHECKING:
    from engine.models.config import DecoderConfig  # made into layers

Tensor = Any  # of whoever's ops run
TOKEN_IDS, POSITIONS, LOGIT_ROWS = "token_ids", "positions", "logit_rows"
EMBEDDING_ROWS = "embedding_rows"  # i32 [T]: of a token of a prompt span, its row of SPAN_EMBEDDINGS; -1: it has none
SPAN_EMBEDDINGS = "span_embeddings"  # f32 [E, H]
ROWS = ("query_starts", "context_lens")  # which tokens belong to which request, and what it has in the cache
LOGITS, HIDDEN = "logits", "hidden"  # outputs


def step_inputs(num_groups: int, takes_spans: bool = False) -> tuple[str, ...]:
    """Return the names of the inputs of a graph with so many cache groups, but for the caches."""
    of_spans = (EMBEDDING_ROWS, SPAN_EMBEDDINGS) if takes_spans else ()
    return (TOKEN_IDS, POSITIONS, *ROWS, *map(table_name, range(num_groups)), LOGIT_ROWS, *of_spans)


@dataclass(frozen=True)
class Run:
    """What a step is computed with. Everything is found by its name in the graph."""

    ops: Any  # the functions of engine.ops.reference, of any device
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    caches: Mapping[int, tuple[str, str]]  # of each layer: its cache and its block table, by their names as inputs
    angles: dict[str, Tensor] = field(default_factory=dict)  # by the names of their frequencies, each computed once

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cache and the block table of a layer."""
        cache, table = self.caches[layer]
        return self.inputs[cache], self.inputs[table]

    def stored(self, weight: Weight) -> list[Tensor]:
        return [self.params[name] for name in weight.format.parameters(weight.name)]


@dataclass(frozen=True)
class Place:
    """Where in the model a layer is, for the names of its weights, and the shard it is made for."""

    shard: Shard
    layer: int | None = None  # None: before or after the layers

    def weight(self, name: str, parts: Iterable[tuple[str, tuple[Share, ...]]], format: Format = FLOAT32) -> Weight:
        """`parts`: the checkpoint's names and shares of the axes."""
        prefix = "" if self.layer is None else f"layers.{self.layer}."
        made_of = tuple(Part(f"model.{prefix}{tensor}", axes) for tensor, axes in parts)
        if any(part.tensor in self.shard.plain for part in made_of):
            format = FORMATS[self.shard.dtype]
        return Weight(f"{prefix}{name}", made_of, format)


@dataclass(frozen=True)
class Norm:
    """The RMS norm of what a layer adds to the residual, and the sum. Whole on every rank."""

    weight: Weight
    epsilon: float

    @classmethod
    def of(cls, config: DecoderConfig, place: Place, name: str, size: int = 0) -> Norm:
        """`size`: of what it normalizes, if that is not the residual."""
        weight = place.weight(
            f"{_short(name)}.weight", [(f"{name}.weight", (Share.whole(size or config.hidden_size),))]
        )
        return cls(replace(weight, offset=config.norm_offset), config.rms_norm_eps)

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of `x` added to the residual, and the sum."""
        if residual is None:  # the first layer: nothing to add to
            return self.alone(run, x), x
        [weight] = run.stored(self.weight)
        return run.ops.add_rms_norm(x, residual, weight, epsilon=self.epsilon)

    def alone(self, run: Run, x: Tensor) -> Tensor:
        """Return the norm of `x`."""
        [weight] = run.stored(self.weight)
        return run.ops.rms_norm(x, weight, epsilon=self.epsilon)


@dataclass(frozen=True)
class LayerNorm(Norm):
    """The same with a mean that is taken away, and a bias."""

    bias: Weight

    @classmethod
    def of(cls, config: DecoderConfig, place: Place, name: str, size: int = 0) -> LayerNorm:
        scale, size = Norm.of(config, place, name, size), size or config.hidden_size
        bias = place.weight(f"{_short(name)}.bias", [(f"{name}.bias", (Share.whole(size),))])
        return cls(scale.weight, scale.epsilon, bias)

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else run.ops.add(x, residual)
        return self.alone(run, total), total

    def alone(self, run: Run, x: Tensor) -> Tensor:
        [weight], [bias] = run.stored(self.weight), run.stored(self.bias)
        return run.ops.layer_norm(x, weight, bias, epsilon=self.epsilon)


@dataclass(frozen=True)
class Linear:
    weight: Weight
    bias: Weight | None
    is_partial: bool = False  # each rank has a part of the sum

    @classmethod
    def columns(
        cls, place: Place, name: str, outputs: Sequence[tuple[str, Share]], num_inputs: int, bias: bool
    ) -> Linear:
        """Column-parallel: linear layers with the same input, stacked. A rank makes its share of each one's outputs."""
        axes = [(f"{tensor}.weight", (share, Share.whole(num_inputs))) for tensor, share in outputs]
        biases = [(f"{tensor}.bias", (share,)) for tensor, share in outputs]
        weight = place.weight(f"{name}.weight", axes, place.shard.format)
        return cls(weight, place.weight(f"{name}.bias", biases) if bias else None)

    @classmethod
    def rows(cls, place: Place, name: str, num_outputs: int, inputs: Share, bias: bool) -> Linear:
        """Row-parallel: the input is spread over the ranks; their partial sums are added up, and a bias by one."""
        outputs, shard = Share.whole(num_outputs), place.shard
        weight = place.weight(f"{_short(name)}.weight", [(f"{name}.weight", (outputs, inputs))], shard.format)
        has_bias = bias and shard.rank == 0
        bias_weight = place.weight(f"{_short(name)}.bias", [(f"{name}.bias", (outputs,))]) if has_bias else None
        return cls(weight, bias_weight, is_partial=shard.num_ranks > 1)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        [bias] = [None] if self.bias is None else run.stored(self.bias)
        y = self.weight.format.linear(run.ops, x, run.stored(self.weight), bias)
        return run.ops.all_reduce(y) if self.is_partial else y


@dataclass(frozen=True)
class Embedding:
    """Vocabulary-parallel: a rank knows the rows of its share of the ids. With `takes_spans`, every rank gets the
    embeddings of prompt spans, which are used as they come."""

    table: Weight
    ids: Share
    num_ranks: int
    multiplier: float
    takes_spans: bool

    @classmethod
    def of(cls, config: DecoderConfig, place: Place) -> Embedding:
        ids = place.shard.share(config.vocab_size)
        axes = [("embed_tokens.weight", (ids, Share.whole(config.hidden_size)))]
        table = place.weight("embed_tokens.weight", axes, FORMATS[place.shard.dtype])
        return cls(table, ids, place.shard.num_ranks, config.embedding_multiplier, config.takes_spans)

    def __call__(self, run: Run) -> Tensor:
        [table] = run.stored(self.table)
        x = run.ops.embedding(run.inputs[TOKEN_IDS], table, first_id=self.ids.start)
        x = scaled(run, x if self.num_ranks == 1 else run.ops.all_reduce(x), self.multiplier)
        if not self.takes_spans:
            return x
        return run.ops.replace_rows(x, run.inputs[EMBEDDING_ROWS], run.inputs[SPAN_EMBEDDINGS])


@dataclass(frozen=True)
class Head:
    """From the last hidden states to logits. Vocabulary-parallel: every rank gets those of all."""

    table: Weight
    vocab_size: int
    num_ranks: int
    multiplier: float
    softcap: float

    @classmethod
    def of(cls, config: DecoderConfig, embedding: Embedding, format: Format) -> Head:
        """With the numbers of the embedding's table where these are tied, else with those of one of the same shape and
        share. A format that the embedding does not have is stored apart."""
        [of_table] = embedding.table.parts
        table, tied = embedding.table, config.tied_embeddings
        if not tied or format != table.format:
            table = Weight("lm_head.weight", (of_table if tied else Part("lm_head.weight", of_table.axes),), format)
        return cls(table, config.vocab_size, embedding.num_ranks, config.logit_multiplier, config.logit_softcap)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        logits = self.table.format.linear(run.ops, x, run.stored(self.table), None)
        if self.num_ranks > 1:
            logits = run.ops.all_gather(logits, num_ranks=self.num_ranks, width=self.vocab_size)
        logits = scaled(run, logits, self.multiplier)
        return run.ops.softcap(logits, cap=self.softcap) if self.softcap else logits


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the step's positions. `axes`: which of the three positions of a token makes an angle; None:
    a token has one position."""

    inv_freq: Constant
    attention_scaling: float
    axes: Constant | None = None

    @classmethod
    def of(cls, rope: Rope, may_be_3d: bool = False) -> Rotary:
        """`may_be_3d`: where all three positions are equal, as in text, one is enough."""
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
    return x if factor == 1 else run.ops.scale(x, factor=factor)


def _short(name: str) -> str:
    """The graph's name of a checkpoint's layer: the module it sits in says nothing the rest does not."""
    return name.replace("self_attn.", "").replace("mlp.", "")
