"""The decoder that families share: layers of a mixer and an MLP, with norms around them and a residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.attention import Attention
from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError
from engine.models.experts import Mixture
from engine.models.formats import head_format
from engine.models.gated_delta_net import GatedDeltaNet
from engine.models.kv_cache import CacheLayout
from engine.models.latent_attention import LatentAttention
from engine.models.layers import (
    EMBEDDING_ROWS,
    HIDDEN,
    LOGIT_ROWS,
    LOGITS,
    POSITIONS,
    SPAN_EMBEDDINGS,
    STATES,
    Embedding,
    Head,
    LayerScope,
    Linear,
    Norm,
    Rotary,
    Run,
    Tensor,
    scaled,
    step_inputs,
)
from engine.models.mlp import GatedMlp, Mlp
from engine.models.weights import Shard, found_in

Mixer = Attention | LatentAttention | GatedDeltaNet
# Names of the norms in checkpoints: before and after the mixer, before and after the MLP. Checkpoints give the name
# post_attention_layernorm to the norm before the MLP or to the one after the mixer, whichever the model has.
PRE_NORM = ("input", "", "post_attention", "")
POST_NORM = ("", "post_attention", "", "post_feedforward")


@dataclass(frozen=True)
class DecoderLayer:
    """A mixer and an MLP. Each reads the residual through its norm, if it has one, and its output goes through its
    post norm, if it has one, before it is added to the residual."""

    mixer_norm: Norm | None
    mixer: Mixer
    mixer_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: GatedMlp | Mlp | Mixture
    mlp_post_norm: Norm | None
    multiplier: float  # applied to the outputs of mixer and MLP

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        scope: LayerScope,
        parts: tuple[Mixer, GatedMlp | Mlp | Mixture],
        norms: tuple[str, str, str, str] = PRE_NORM,
        kind: type[Norm] = Norm,
    ) -> DecoderLayer:
        """Build a layer of `parts`, which are its mixer and its MLP.

        `norms` are the checkpoint's names, without `_layernorm`, of the norms before and after the mixer and before
        and after the MLP. An empty name stands for no norm. `kind` is the class of the norms.
        """
        made = [kind.of(config, scope, f"{name}_layernorm") if name else None for name in norms]
        return cls(made[0], parts[0], made[1], made[2], parts[1], made[3], config.residual_multiplier)

    def __call__(
        self, run: Run, x: Tensor, residual: Tensor | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP, which the caller has to add to the residual, and the residual.

        `x` [T, H] is the output of the layer before, which is not yet added to `residual` [T, H]. The first layer gets
        no residual. `rows` [R] selects the rows that are still needed after the mixer; None selects all.
        """
        x, residual = _enter(run, self.mixer_norm, x, residual)
        x = self.mixer(run, x)
        if rows is not None:
            x, residual = run.ops.gather_rows(x, rows), run.ops.gather_rows(residual, rows)
        x = self._leave(run, self.mixer_post_norm, self.mixer.o_proj(run, x))
        x, residual = _enter(run, self.mlp_norm, x, residual)
        return self._leave(run, self.mlp_post_norm, self.mlp(run, x)), residual

    def _leave(self, run: Run, norm: Norm | None, x: Tensor) -> Tensor:
        return scaled(run, norm.alone(run, x) if norm else x, self.multiplier)


def _enter(run: Run, norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the input of a mixer or MLP, and the residual with `x` added to it."""
    if norm:
        return norm(run, x, residual)
    total = x if residual is None else run.ops.add(x, residual)
    return total, total


@dataclass(frozen=True)
class Decoder:
    """The network of one rank.

    It computes, from the tokens of a step, the logits and last hidden states of selected rows. With `has_states`, it
    also returns the last hidden states of all tokens; with `projections` instead the sum of the hidden states that
    enter some layers, each through a projection.
    """

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Head
    has_states: bool = False
    num_deepstack_layers: int = 0  # behind each of the first layers, features of prompt spans are added
    projections: tuple[tuple[int, Linear], ...] = ()  # each with the index of its layer

    @classmethod
    def of(
        cls, config: DecoderConfig, shard: Shard, layer: Callable[[LayerScope], DecoderLayer], norm: type[Norm] = Norm
    ) -> Decoder:
        """Build the decoder of one rank. `layer` builds the layer in a scope. Raises ModelError if the heads cannot be
        divided among the ranks."""
        check_ranks(config, shard.num_ranks)
        top = LayerScope(shard)
        embedding = Embedding.of(config, top)
        return cls(
            embedding=embedding,
            layers=tuple(layer(LayerScope(shard, i)) for i in range(config.num_layers)),
            norm=norm.of(config, top, "norm"),
            head=Head.of(config, embedding, head_format(shard.format, shard.dtype)),
            num_deepstack_layers=config.num_deepstack_layers,
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs, in the order in which a call returns them."""
        return (LOGITS, HIDDEN, STATES) if self.has_states or self.projections else (LOGITS, HIDDEN)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs, except for the caches."""
        return step_inputs(len(self.cache_layout.groups), self.embedding.takes_spans)

    @property
    def cache_layout(self) -> CacheLayout:
        """Return the layout of the KV caches of all layers. Raises ModelError if it is not supported."""
        return CacheLayout.of([layer.mixer.cache for layer in self.layers])

    @property
    def input_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the inputs other than block tables and caches, without the inputs whose shape is [None].

        None stands for a size that differs from step to step. Raises ModelError if only some layers have 3-D positions.
        """
        is_3d = {rotary.axes is not None for rotary in found_in(self, Rotary)}
        if len(is_3d) > 1:
            raise ModelError("config.json: mrope_section must be given for all layers or for none")
        width = self._size * (1 + self.num_deepstack_layers)
        shapes: dict[str, tuple[int | None, ...]] = {SPAN_EMBEDDINGS: (None, width)}
        return shapes | {POSITIONS: (3, None)} if True in is_3d else shapes

    def __call__(self, run: Run) -> tuple[Tensor, ...]:
        x, residual, total = self.embedding(run), None, None
        for index, layer in enumerate(self.layers):
            total = self._projected(run, index, (x, residual), total)
            # After the last mixer, rows are independent of each other.
            selects = layer is self.layers[-1] and not self.has_states
            x, residual = layer(run, x, residual, run.inputs[LOGIT_ROWS] if selects else None)
            if index < self.num_deepstack_layers:
                features = run.inputs[EMBEDDING_ROWS], run.inputs[SPAN_EMBEDDINGS]
                x = run.ops.add_gathered_rows(x, *features, column=(1 + index) * self._size)
        states, _ = self.norm(run, x, residual)
        if self.projections:
            return self.head(run, states), states, total
        if not self.has_states:
            return self.head(run, states), states
        x = run.ops.gather_rows(states, run.inputs[LOGIT_ROWS])
        return self.head(run, x), x, states

    @property
    def _size(self) -> int:
        """Return the size of a hidden state."""
        return self.embedding.table.shape[1]

    def _projected(self, run: Run, layer: int, entering: tuple[Tensor, Tensor | None], total: Tensor | None) -> Tensor:
        """Return the sum of the projections up to those of what enters a layer: its input and the residual."""
        for of_layer, projection in self.projections:
            if of_layer == layer:
                x, residual = entering
                x = projection(run, x if residual is None else run.ops.add(x, residual))
                total = x if total is None else run.ops.add(total, x)
        return total


def check_ranks(config: DecoderConfig, num_ranks: int, what: str = "") -> None:
    """Raise ModelError unless the heads can be divided among the ranks. `what` says whose heads they are."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        raise ModelError(
            f"num_ranks (MP_NUM) is {num_ranks}, it must divide num_attention_heads{what}, which is {heads}"
        )
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise ModelError(
            f"num_ranks (MP_NUM) is {num_ranks}, it must divide num_key_value_heads{what}, which is {kv_heads}, or be a"
            " multiple of it"
        )
