"""MTP layers: a decoder layer of the checkpoint that drafts the token after next, from the embedding of the next token
and the last hidden state of the decoder.

A family whose checkpoints have such a layer extends `MtpFamily` and says how its tensors are named.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from engine.models.checkpoint import LM_HEAD, TABLE, Checkpoint
from engine.models.config import DECODER, MTP_GRAPH, DecoderConfig
from engine.models.config_fields import ModelError
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.formats import head_format
from engine.models.layers import (
    LOGIT_ROWS,
    PREVIOUS_STATES,
    Embedding,
    Head,
    LayerScope,
    Linear,
    Network,
    Norm,
    Run,
    Tensor,
)
from engine.models.weights import AxisShard, Shard, TensorShard, Weight

Family = TypeVar("Family", bound="MtpFamily")


@dataclass(frozen=True)
class MtpLayout:
    """Names of the tensors of an MTP layer. `{layer}` stands for the number of decoder layers."""

    block: str  # prefix of the decoder layer
    embedding_norm: str
    hidden_norm: str
    projection: str  # of the two normed vectors, that of the embedding first
    norm: str  # before the output projection
    has_mixture: bool  # the layer has a mixture of experts if the model has any

    def of(self, num_layers: int) -> MtpLayout:
        """Return the names in a model with so many decoder layers."""
        return MtpLayout(
            self.block.format(layer=num_layers),
            self.embedding_norm.format(layer=num_layers),
            self.hidden_norm.format(layer=num_layers),
            self.projection.format(layer=num_layers),
            self.norm.format(layer=num_layers),
            self.has_mixture,
        )

    @property
    def tables(self) -> tuple[str, str]:
        """Return the names of the embedding and of the output projection, if the layer has its own."""
        return f"{self.block}embed_tokens.weight", f"{self.block}shared_head.head.weight"


DEEPSEEK = MtpLayout(
    "model.layers.{layer}.",
    "model.layers.{layer}.enorm",
    "model.layers.{layer}.hnorm",
    "model.layers.{layer}.eh_proj",
    "model.layers.{layer}.shared_head.norm",
    has_mixture=True,
)
ERNIE = MtpLayout(
    "model.mtp_block.0.",
    "model.mtp_emb_norm.0",
    "model.mtp_hidden_norm.0",
    "model.mtp_linear_proj.0",
    "model.norm",  # the norm of the model itself
    has_mixture=False,
)
QWEN = MtpLayout(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
    has_mixture=True,
)


@dataclass(frozen=True, kw_only=True)
class MtpFamily(DecoderConfig):
    """Configuration of a family whose checkpoints may have an MTP layer."""

    mtp_layout: ClassVar[MtpLayout | None] = None
    has_mtp: bool = False  # the MTP layer is exported as well
    mtp_tables: tuple[str, str] = ("", "")  # tables of the MTP layer that differ from those of the model

    @abstractmethod
    def layer(self, scope: LayerScope) -> DecoderLayer:
        """Return the decoder layer in a scope."""

    def with_mtp_layer(self: Family) -> Family:
        """Return the configuration with one more layer, the one that drafts. It reads the placeholders of images, whose
        embeddings would only make drafts better."""
        mixture = self.mixture and replace(self.mixture, layers=(*self.mixture.layers, self._layout.has_mixture))
        return replace(self, mixture=mixture, windows=(), slides=(), takes_spans=False)

    @property
    def _layout(self) -> MtpLayout:
        assert self.mtp_layout, "with_mtp checks it"
        return self.mtp_layout.of(self.num_layers)

    def networks(self, shard: Shard) -> dict[str, Network]:
        if not self.has_mtp:
            return super().networks(shard)
        return {DECODER: replace(self.network(shard), has_states=True), MTP_GRAPH: MtpDecoder.of_family(self, shard)}

    def ignores(self, tensor: str) -> bool:
        """Return whether the networks leave out this tensor: of other MTP layers, or a copy of a table of the model."""
        if not self.has_mtp:
            return super().ignores(tensor)
        names = self._layout
        if tensor in names.tables:
            return tensor not in self.mtp_tables
        used = (names.embedding_norm, names.hidden_norm, names.projection, names.norm)
        return super().ignores(tensor) and not tensor.startswith((names.block, *(f"{name}." for name in used)))


def with_mtp(model_type: str, model: DecoderConfig, checkpoint: Checkpoint | None) -> DecoderConfig:
    """Return the configuration with the MTP layer of the checkpoint. Raises ModelError if there is none."""
    if not isinstance(model, MtpFamily) or not model.mtp_layout:
        raise ModelError(f"config.json: model_type {model_type!r} has no layer that drafts (SPECULATE_METHOD=mtp)")
    names = model.mtp_layout.of(model.num_layers)
    if checkpoint is None:
        return replace(model, has_mtp=True)
    if not any(name.startswith(f"{names.projection}.") for name in checkpoint):
        raise ModelError(
            f"the checkpoint has no layer that drafts (SPECULATE_METHOD=mtp): {names.projection}.weight is missing"
        )
    shared = (TABLE, TABLE if model.tied_embeddings else LM_HEAD)
    tables = [
        own if own in checkpoint and not checkpoint.are_equal(own, of_model) else ""
        for own, of_model in zip(names.tables, shared, strict=True)
    ]
    return replace(model, has_mtp=True, mtp_tables=(tables[0], tables[1]))


@dataclass(frozen=True, kw_only=True)
class DraftDecoder(Decoder):
    """A network that drafts: it reads tokens, and a hidden state for the token before each of them."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, PREVIOUS_STATES)

    @property
    def input_shapes(self) -> dict[str, tuple[int | None, ...]]:
        return super().input_shapes | {PREVIOUS_STATES: (None, self.embedding.table.shape[1])}


@dataclass(frozen=True, kw_only=True)
class MtpDecoder(DraftDecoder):
    """The MTP layer of one rank with the norms and projections around it.

    It computes, from tokens and from the last hidden states of the tokens before them, the logits of the tokens behind
    and the hidden states from which it can go on.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    from_embedding: Linear  # the two halves of the projection
    from_hidden: Linear

    @classmethod
    def of_family(cls, config: MtpFamily, shard: Shard) -> MtpDecoder:
        """Build the network of a rank."""
        config = config.with_mtp_layer()
        assert config.mtp_layout
        names, num_layers = config.mtp_layout.of(config.num_layers), config.num_layers
        block, top = LayerScope(shard, num_layers, names.block), LayerScope(shard, prefix="")
        of_embedding, of_head = config.mtp_tables
        embedding = Embedding.of(config, block if of_embedding else LayerScope(shard))
        head = Head.of(config, Embedding.of(config, LayerScope(shard)), head_format(shard.format, shard.dtype))
        if of_head:
            table = Weight(of_head, (TensorShard(of_head, embedding.table.parts[0].axes),), head.table.format)
            head = replace(head, table=table)
        return cls(
            embedding=embedding,
            layers=(config.layer(block),),
            norm=Norm.of(config, top, names.norm),
            head=head,
            embedding_norm=Norm.of(config, top, names.embedding_norm),
            hidden_norm=Norm.of(config, top, names.hidden_norm),
            from_embedding=input_part(top, names.projection, config.hidden_size, (2, 0)),
            from_hidden=input_part(top, names.projection, config.hidden_size, (2, 1)),
        )

    def __call__(self, run: Run) -> tuple[Tensor, ...]:
        embedded = self.embedding_norm.alone(run, self.embedding(run))
        hidden = self.hidden_norm.alone(run, run.inputs[PREVIOUS_STATES])
        x = run.ops.add(self.from_embedding(run, embedded), self.from_hidden(run, hidden))
        [layer] = self.layers
        x, residual = layer(run, x, None, run.inputs[LOGIT_ROWS])
        x, _ = self.norm(run, x, residual)
        return self.head(run, x), x


def input_part(scope: LayerScope, name: str, size: int, part: tuple[int, int]) -> Linear:
    """Return a square linear layer that reads one of several equal parts of the input of the checkpoint's layer.
    `part` is the number of parts and the index of this one."""
    count, index = part
    axes = AxisShard.whole(size), AxisShard.whole(size).within(count * size, index * size)
    return Linear(scope.weight(f"{name}.{index}.weight", [(f"{name}.weight", axes)], scope.shard.format), None)
