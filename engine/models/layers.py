"""The layers that families are made of. Each says once what its parameters are and what it computes with them.

A layer is a description and a function of a `Run`. It knows neither Paddle nor files: the export runs it with Paddle's
ops to make a graph of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.formats import FLOAT32, FORMATS, Format
from engine.models.rope import Rope
from engine.models.weights import Constant, Part, Shard, Share, Weight

Tensor = Any  # of whoever's ops run
TOKEN_IDS, POSITIONS, LOGIT_ROWS = "token_ids", "positions", "logit_rows"
WHERE = ("query_starts", "context_lens", "block_tables")  # which rows read and write which blocks
LOGITS, HIDDEN = "logits", "hidden"  # outputs
STEP_INPUTS = (TOKEN_IDS, POSITIONS, *WHERE, LOGIT_ROWS)


@dataclass(frozen=True)
class Run:
    """What a step is computed with. Everything is found by its name in the graph."""

    ops: Any  # the functions of engine.ops.reference, of any device
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    def stored(self, weight: Weight) -> list[Tensor]:
        return [self.params[name] for name in weight.format.parameters(weight.name)]


@dataclass(frozen=True)
class Place:
    """Where in the model a layer is, for the names of its weights, and the shard it is made for."""

    shard: Shard
    layer: int | None = None  # None: before or after the layers

    def weight(self, name: str, parts: Mapping[str, tuple[Share, ...]], format: Format = FLOAT32) -> Weight:
        """`parts`: shares of the axes by the checkpoint's names."""
        prefix = "" if self.layer is None else f"layers.{self.layer}."
        made_of = tuple(Part(f"model.{prefix}{tensor}", axes) for tensor, axes in parts.items())
        if any(part.tensor in self.shard.plain for part in made_of):
            format = FORMATS[self.shard.dtype]
        return Weight(f"{prefix}{name}", made_of, format)


@dataclass(frozen=True)
class Norm:
    """The norm of what a layer adds to the residual, and the sum. Whole on every rank."""

    weight: Weight
    epsilon: float

    @classmethod
    def of(cls, place: Place, name: str, size: int, epsilon: float) -> Norm:
        weight = place.weight(f"{_short(name)}.weight", {f"{name}.weight": (Share.whole(size),)})
        return cls(weight, epsilon)

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        [weight] = run.stored(self.weight)
        if residual is None:  # the first layer: nothing to add to
            return run.ops.rms_norm(x, weight, epsilon=self.epsilon), x
        return run.ops.add_rms_norm(x, residual, weight, epsilon=self.epsilon)


@dataclass(frozen=True)
class Linear:
    weight: Weight
    bias: Weight | None
    is_partial: bool = False  # each rank has a part of the sum

    @classmethod
    def columns(cls, place: Place, name: str, outputs: Mapping[str, Share], num_inputs: int, bias: bool) -> Linear:
        """Column-parallel: linear layers with the same input, stacked. A rank makes its share of each one's outputs."""
        axes = {f"{tensor}.weight": (share, Share.whole(num_inputs)) for tensor, share in outputs.items()}
        biases = {f"{tensor}.bias": (share,) for tensor, share in outputs.items()}
        weight = place.weight(f"{name}.weight", axes, place.shard.format)
        return cls(weight, place.weight(f"{name}.bias", biases) if bias else None)

    @classmethod
    def rows(cls, place: Place, name: str, num_outputs: int, inputs: Share, bias: bool) -> Linear:
        """Row-parallel: the input is spread over the ranks; their partial sums are added up, and a bias by one."""
        outputs, shard = Share.whole(num_outputs), place.shard
        weight = place.weight(f"{_short(name)}.weight", {f"{name}.weight": (outputs, inputs)}, shard.format)
        has_bias = bias and shard.rank == 0
        bias_weight = place.weight(f"{_short(name)}.bias", {f"{name}.bias": (outputs,)}) if has_bias else None
        return cls(weight, bias_weight, is_partial=shard.num_ranks > 1)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        [bias] = [None] if self.bias is None else run.stored(self.bias)
        y = self.weight.format.linear(run.ops, x, run.stored(self.weight), bias)
        return run.ops.all_reduce(y) if self.is_partial else y


@dataclass(frozen=True)
class Embedding:
    """Vocabulary-parallel: a rank knows the rows of its share of the ids."""

    table: Weight
    ids: Share
    num_ranks: int

    @classmethod
    def of(cls, place: Place, vocab_size: int, hidden_size: int) -> Embedding:
        ids = place.shard.share(vocab_size)
        axes = {"embed_tokens.weight": (ids, Share.whole(hidden_size))}
        table = place.weight("embed_tokens.weight", axes, FORMATS[place.shard.dtype])
        return cls(table, ids, place.shard.num_ranks)

    def __call__(self, run: Run) -> Tensor:
        [table] = run.stored(self.table)
        x = run.ops.embedding(run.inputs[TOKEN_IDS], table, first_id=self.ids.start)
        return x if self.num_ranks == 1 else run.ops.all_reduce(x)


@dataclass(frozen=True)
class Head:
    """From the last hidden states to logits. Vocabulary-parallel: every rank gets those of all."""

    table: Weight
    vocab_size: int
    num_ranks: int

    @classmethod
    def of(cls, embedding: Embedding, tied: bool, format: Format) -> Head:
        """`tied`: with the numbers of the embedding's table, else with those of one of the same shape and share.
        A format that the embedding does not have is stored apart."""
        [of_table] = embedding.table.parts
        if tied and format == embedding.table.format:
            return cls(embedding.table, embedding.ids.count, embedding.num_ranks)
        part = of_table if tied else Part("lm_head.weight", of_table.axes)
        return cls(Weight("lm_head.weight", (part,), format), embedding.ids.count, embedding.num_ranks)

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        logits = self.table.format.linear(run.ops, x, run.stored(self.table), None)
        if self.num_ranks == 1:
            return logits
        return run.ops.all_gather(logits, num_ranks=self.num_ranks, width=self.vocab_size)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the step's positions."""

    inv_freq: Constant
    attention_scaling: float

    @classmethod
    def of(cls, rope: Rope) -> Rotary:
        return cls(Constant("inv_freq", rope.inv_freq), rope.attention_scaling)

    def __call__(self, run: Run) -> Tensor:
        inv_freq = run.params[self.inv_freq.name]
        return run.ops.rotary_angles(run.inputs[POSITIONS], inv_freq, attention_scaling=self.attention_scaling)


def _short(name: str) -> str:
    """The graph's name of a checkpoint's layer: the module it sits in says nothing the rest does not."""
    return name.replace("self_attn.", "").replace("mlp.", "")
