"""EAGLE-3 heads: a decoder layer from a checkpoint of its own that drafts tokens, from their embeddings and from the
hidden states that enter three layers of the model, which a projection `fc` makes one vector of.

The projection belongs to the graph of the model, so that the layer reads vectors of one size: those of the model, and
its own when it goes on from its drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.models.attention import Attention, AttentionOptions
from engine.models.checkpoint import TABLE, Checkpoint, open_tensors
from engine.models.config import DECODER, EAGLE3_GRAPH, DecoderConfig
from engine.models.config_fields import ModelError, an_object, read_json, whole_number
from engine.models.decoder import Decoder, DecoderLayer, check_ranks
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
from engine.models.llama import Llama
from engine.models.mlp import GatedMlp
from engine.models.mtp import DraftDecoder, input_part
from engine.models.stored_tensors import StoredTensor
from engine.models.weights import AxisShard, Shard, TensorShard, Weight

FILE = "eagle3.npy"  # i32 [draft_vocab_size]: the token of the model for each token of the head
PREFIX = "eagle3."  # of the names of the head's tensors, beside those of the model
TO_TARGET, FROM_TARGET = "d2t", "t2d"  # maps between the vocabularies; the second one follows from the first
NEEDED = ("fc.weight", "lm_head.weight", "norm.weight", "layers.0.hidden_norm.weight")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NUM_STATES = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Head:
    """Configuration of a head for a model."""

    config: Llama
    draft_vocab_size: int
    layer_ids: tuple[int, ...]  # of the layers of the model whose inputs the head reads
    norms_residual: bool  # the residual of the layer begins with the normed hidden states
    has_table: bool = False  # the head has an embedding of its own

    @classmethod
    def read(cls, keys: Mapping[str, Any], model: DecoderConfig) -> Eagle3Head:
        """Read config.json in the layout of SpecForge or of the package `speculators`. Raises ModelError if the head
        does not fit the model."""
        layer = an_object(keys, "transformer_layer_config") or keys
        kind = keys.get("speculators_model_type", EAGLE3_GRAPH)
        if kind != EAGLE3_GRAPH:
            raise ModelError(f"config.json: speculators_model_type is {kind!r}, supported is {EAGLE3_GRAPH!r}")
        if layer.get("model_type", "llama") != "llama":
            raise ModelError(f"config.json: model_type is {layer['model_type']!r}, supported are heads like 'llama'")
        config = Llama.read({"num_hidden_layers": 1, **layer})
        eagle = an_object(keys, "eagle_config")
        expected = {
            "num_hidden_layers": (config.num_layers, 1),
            "hidden_size": (config.hidden_size, model.hidden_size),
            "target_hidden_size": (keys.get("target_hidden_size") or model.hidden_size, model.hidden_size),
            "vocab_size": (config.vocab_size, model.vocab_size),
            "use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), True),
            "norm_before_fc": (keys.get("norm_before_fc") or False, False),
        }
        for name, (found, fits) in expected.items():
            if found != fits:
                raise ModelError(f"config.json: {name} is {found}, it must be {fits}")
        is_whole = keys.get("draft_vocab_size") is None
        draft_vocab_size = config.vocab_size if is_whole else whole_number(keys, "draft_vocab_size")
        if draft_vocab_size > config.vocab_size:
            raise ModelError(
                f"config.json: draft_vocab_size is {draft_vocab_size}, it must be at most {config.vocab_size}"
            )
        return cls(
            config=config,
            draft_vocab_size=draft_vocab_size,
            layer_ids=_layer_ids(keys, model.num_layers),
            norms_residual=bool(keys.get("norm_before_residual", False)),
        )

    def for_length(self, max_seq_len: int) -> Eagle3Head:
        """Return the head for sequences of at most `max_seq_len` tokens."""
        return replace(self, config=self.config.for_length(max_seq_len))

    def networks(self, network: Decoder, shard: Shard) -> dict[str, Network]:
        """Return the network of the model, which also returns what the head reads, and that of the head."""
        top, size = LayerScope(shard, prefix=PREFIX), self.config.hidden_size
        projections = tuple(
            (layer, input_part(top, "fc", size, (NUM_STATES, index))) for index, layer in enumerate(self.layer_ids)
        )
        return {
            DECODER: replace(network, projections=projections),
            EAGLE3_GRAPH: Eagle3Decoder.of_head(self, network.embedding, shard),
        }


def _layer_ids(keys: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads. The key at the top counts like this, as vLLM does, the one in
    `eagle_config` names the layers before them, as SGLang does."""
    of_outputs = an_object(keys, "eagle_config").get(LAYER_IDS)
    found = keys.get(LAYER_IDS) or of_outputs or [2, num_layers // 2, num_layers - 3]
    first = -1 if found is of_outputs else 0
    possible = range(first, num_layers + first)
    if not isinstance(found, list) or len(found) != NUM_STATES or not all(layer in possible for layer in found):
        raise ModelError(
            f"config.json: {LAYER_IDS} is {found!r}, it must be three layers from {possible[0]} to {possible[-1]}"
        )
    return tuple(int(layer) - first for layer in found)


class WithHead(NamedTuple):
    """A model with a head, the tensors of both, and the token of the model for each token of the head."""

    model: DecoderConfig
    checkpoint: Checkpoint | None
    draft_ids: np.ndarray | None


def with_eagle3(model: DecoderConfig, checkpoint: Checkpoint | None, directory: Path) -> WithHead:
    """Return the model with the head in a folder. Raises ModelError if they do not fit together."""
    try:
        head = Eagle3Head.read(read_json(directory / "config.json"), model)
        if checkpoint is None:
            return WithHead(replace(model, eagle3=head), None, None)
        tensors = _named(open_tensors(directory))
        for name in NEEDED:
            if name not in tensors:
                raise ModelError(f"tensor {name} is missing")
        draft_ids = _draft_ids(tensors.pop(TO_TARGET, None), head)
        tensors.pop(FROM_TARGET, None)
    except ModelError as error:
        raise ModelError(f"{directory} is no EAGLE-3 head for this model: {error}") from None
    own = f"{PREFIX}embed_tokens.weight"
    both = checkpoint.extended({f"{PREFIX}{name}": tensor for name, tensor in tensors.items()})
    has_table = own in both
    if has_table and both.are_equal(own, TABLE):
        has_table, both = False, both.extended({}, without=own)
    return WithHead(replace(model, eagle3=replace(head, has_table=has_table)), both, draft_ids)


def _named(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a head by the names of `speculators`."""
    named = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        named[f"layers.0.{short.removeprefix('midlayer.')}" if short.startswith("midlayer.") else short] = tensor
    return named


def _draft_ids(offsets: StoredTensor | None, head: Eagle3Head) -> np.ndarray:
    """Return the token of the model for each token of the head, from how far they lie apart."""
    ids = np.arange(head.draft_vocab_size)
    if offsets is None:
        if head.draft_vocab_size != head.config.vocab_size:
            raise ModelError(
                f"tensor {TO_TARGET} is missing, and draft_vocab_size is {head.draft_vocab_size}, vocab_size"
                f" {head.config.vocab_size}"
            )
        return ids.astype(np.int32)
    if tuple(offsets.get_shape()) != ids.shape:
        raise ModelError(f"tensor {TO_TARGET} has shape {tuple(offsets.get_shape())}, config.json asks for {ids.shape}")
    ids = ids + offsets[:]
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= head.config.vocab_size:
        raise ModelError(
            f"tensor {TO_TARGET} must give each of the {len(ids)} tokens another one below {head.config.vocab_size}"
        )
    return ids.astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class TwoInputLinear(Linear):
    """Linear layer whose input is two vectors side by side: the sum of a layer for each."""

    second: Linear

    def __call__(self, run: Run, x: tuple[Tensor, Tensor]) -> Tensor:
        return run.ops.add(super().__call__(run, x[0]), self.second(run, x[1]))


@dataclass(frozen=True, kw_only=True)
class Eagle3Decoder(DraftDecoder):
    """The network of a head.

    It computes, from tokens and from a vector for each of the tokens before them, the logits of the tokens behind, in
    its own vocabulary, and the vectors from which it can go on.
    """

    hidden_norm: Norm
    norms_residual: bool

    @classmethod
    def of_head(cls, head: Eagle3Head, embedding: Embedding, shard: Shard) -> Eagle3Decoder:
        """Build the network of a rank. `embedding` is that of the model. Raises ModelError if the attention heads
        cannot be divided among the ranks."""
        check_ranks(head.config, shard.num_ranks, " of the EAGLE-3 head")
        config, top = head.config, LayerScope(shard, prefix=PREFIX)
        block = LayerScope(shard, 0, f"{PREFIX}layers.0.")
        options = AttentionOptions(qkv_bias=config.attention_bias, o_bias=config.output_bias)
        attention = Attention.of(config, block, options)
        rotary = attention.rotary.inv_freq  # another one than the model's, with which the graph shares its parameters
        attention = replace(
            attention,
            qkv_proj=_of_two_inputs(attention.qkv_proj, config.hidden_size),
            rotary=replace(attention.rotary, inv_freq=replace(rotary, name=f"{PREFIX}{rotary.name}")),
        )
        embedding = replace(embedding, multiplier=1.0, takes_spans=False)  # as the MTP layer, without those of images
        embedding = Embedding.of(config, top) if head.has_table else embedding
        vocab = (shard.share(head.draft_vocab_size), AxisShard.whole(config.hidden_size))
        table = Weight(
            f"{PREFIX}lm_head.weight",
            (TensorShard(f"{PREFIX}lm_head.weight", vocab),),
            head_format(shard.format, shard.dtype),
        )
        return cls(
            embedding=embedding,
            layers=(DecoderLayer.of(config, block, (attention, GatedMlp.of(config, block, config.mlp_bias))),),
            norm=Norm.of(config, top, "norm"),
            head=Head(table, head.draft_vocab_size, shard.num_ranks, config.logit_multiplier, config.logit_softcap),
            hidden_norm=Norm.of(config, block, "hidden_norm"),
            norms_residual=head.norms_residual,
        )

    def __call__(self, run: Run) -> tuple[Tensor, ...]:
        [layer] = self.layers
        assert layer.mixer_norm and layer.mlp_norm, "`of_head` builds them"
        hidden = run.inputs[PREVIOUS_STATES]
        normed, rows = self.hidden_norm.alone(run, hidden), run.inputs[LOGIT_ROWS]
        x = layer.mixer(run, (layer.mixer_norm.alone(run, self.embedding(run)), normed))
        residual = run.ops.gather_rows(normed if self.norms_residual else hidden, rows)
        x = layer.mixer.o_proj(run, run.ops.gather_rows(x, rows))
        x, residual = layer.mlp_norm(run, x, residual)
        x, states = self.norm(run, layer.mlp(run, x), residual)
        return self.head(run, x), states


def _of_two_inputs(linear: Linear, size: int) -> TwoInputLinear:
    """Return the layer with twice as many inputs, `size` of them from each vector."""

    def half(index: int) -> Weight:
        weight, columns = linear.weight, AxisShard.whole(size).within(2 * size, index * size)
        parts = tuple(TensorShard(part.tensor, (part.axes[0], columns)) for part in weight.parts)
        return replace(weight, name=weight.name.replace(".weight", f".{index}.weight"), parts=parts)

    return TwoInputLinear(weight=half(0), bias=linear.bias, second=Linear(half(1), None))
