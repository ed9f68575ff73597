"""Vision towers: networks that compute the embeddings of an image's tokens from its patches.

A tower is one more graph of the model. Every rank has the whole of it, because only the first one runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError, an_object, number, whole_number
from engine.models.formats import FORMATS
from engine.models.kv_cache import CacheLayout
from engine.models.layers import POSITIONS, LayerNorm, LayerScope, Linear, Network, Norm, Run, Tensor
from engine.models.weights import AxisShard, Constant, Shard, Weight

VISION_GRAPH = "vision"  # name of the graph
# Inputs; beside them POSITIONS, i32 [3, T], whose rows are 0, row and column of a patch
PATCHES = "patches"  # f32 [T, values of a patch]
SEGMENT_ENDS = "segment_ends"  # i32 [B]: the end of each image in the patches, or of windows if all layers have them
WINDOW_ENDS = "window_ends"  # i32 [B]: the end of each window, for towers with windows in some layers
GRID_ROWS, GRID_WEIGHTS = "grid_rows", "grid_weights"  # i32 and f32 [T, 4]: of learned positions
TOKEN_ROWS = "token_rows"  # i32 [S, merge_size²]: the patches of each token
EMBEDDINGS = "embeddings"  # output f32 [S, hidden size of the decoder]
DEEPSTACK = "deepstack_{}"  # outputs of the same shape: what is added behind the first layers of the decoder


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Configuration of a tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    out_size: int  # hidden size of the decoder
    epsilon: float  # of norms
    theta: float = 10000.0  # base of the rotary positions
    window: int = 0  # tokens in each direction of a window; 0: every layer attends to the whole image
    full_layers: tuple[int, ...] = ()  # layers without windows
    grid_size: int = 0  # learned positions in each direction; 0: none
    aligns_corners: bool = False  # the learned positions of the corners are those of the corner patches
    deepstack: tuple[int, ...] = ()  # layers whose outputs are also merged for the decoder

    @classmethod
    def read(cls, keys: Mapping[str, Any], own: Mapping[str, Any]) -> VisionConfig:
        """Read the keys of `vision_config` in config.json that families share. `own` are the other fields. Raises
        ModelError."""
        given, rope = an_object(keys, "vision_config"), an_object(an_object(keys, "vision_config"), "rope_parameters")
        if not given:
            raise ModelError("config.json: vision_config is missing")
        return cls(
            hidden_size=whole_number(given, "hidden_size"),
            patch_size=whole_number(given, "patch_size", 14),
            merge_size=whole_number(given, "spatial_merge_size", 2),
            out_size=whole_number(keys, "hidden_size"),
            theta=number(rope, "rope_theta", 10000.0),
            intermediate_size=whole_number(given, "intermediate_size"),
            **own,
        )

    @property
    def patch_values(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def has_full_layers(self) -> bool:
        return not self.window or not set(self.full_layers).isdisjoint(range(self.num_layers))

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class VisionLayout:
    """Layout of the layers of a tower: the class of their norms, and the names of their tensors in the checkpoint."""

    norm: type[Norm]
    norms: tuple[str, str]  # before attention and before the MLP
    qkv: tuple[str, ...]  # stacked by the checkpoint, or one tensor each
    projection: str
    up: tuple[str, ...]  # two: the gate and what it multiplies
    down: str
    activation: str  # name of an op


@dataclass(frozen=True)
class VisionMlp:
    """MLP of a tower: `down(activation(up(x)))`. `activation` is the name of an op, which may be gated."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return self.down(run, getattr(run.ops, self.activation)(self.up(run, x)))


@dataclass(frozen=True)
class VisionLayer:
    """A layer of bidirectional attention and an MLP, each behind a norm and added to the residual."""

    attention_norm: Norm
    qkv: Linear
    projection: Linear
    mlp_norm: Norm
    mlp: VisionMlp
    num_heads: int
    ends: str  # the input with the ends of the segments that it attends to
    is_bf16: bool

    @classmethod
    def of(cls, config: VisionConfig, scope: LayerScope, layout: VisionLayout, ends: str = SEGMENT_ENDS) -> VisionLayer:
        """Build the layer in a scope."""
        size, inner = config.hidden_size, config.intermediate_size
        norms = [vision_norm(layout.norm, scope, name, size, config.epsilon) for name in layout.norms]
        mlp = VisionMlp(
            dense(scope, "up", layout.up, (inner, size)),
            dense(scope, "down", (layout.down,), (size, inner)),
            layout.activation,
        )
        return cls(
            attention_norm=norms[0],
            qkv=dense(scope, "qkv", layout.qkv, (3 * size // len(layout.qkv), size)),
            projection=dense(scope, "proj", (layout.projection,), (size, size)),
            mlp_norm=norms[1],
            mlp=mlp,
            num_heads=config.num_heads,
            ends=ends,
            is_bf16=scope.shard.dtype != "float32",
        )

    def __call__(self, run: Run, x: Tensor, residual: Tensor | None, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP, which the caller has to add to the residual, and the residual."""
        x, residual = self.attention_norm(run, x, residual)
        qkv, heads = self.qkv(run, x), self.num_heads
        scale = (self.qkv.weight.shape[0] // (3 * heads)) ** -0.5
        ends, is_bf16 = run.inputs[self.ends], int(self.is_bf16)
        x = run.ops.bidirectional_attention(qkv, angles, ends, num_heads=heads, scale=scale, is_bf16=is_bf16)
        x, residual = self.mlp_norm(run, self.projection(run, x), residual)
        return self.mlp(run, x), residual


@dataclass(frozen=True)
class DeepStackMerger:
    """Projector of the output of one layer, which merges the patches of a token and normalizes them together."""

    layer: int
    norm: Norm
    merge: tuple[Linear, Linear]

    def __call__(self, run: Run, x: Tensor) -> Tensor:
        return _projected(run, self.merge, self.norm.alone(run, _merged(run, x)))


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """A tower with the projector to the decoder's embeddings, which merges the patches of a token. With `deepstack`, it
    also returns projections of the outputs of some layers."""

    patch_embedding: Linear
    layers: tuple[VisionLayer, ...]
    norms: tuple[Norm, ...]  # after the layers, one after the other
    merge: tuple[Linear, Linear]
    inv_freq: Constant
    axes: Constant
    grid: Weight | None = None  # learned positions
    deepstack: tuple[DeepStackMerger, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        ends = sorted({SEGMENT_ENDS, *(layer.ends for layer in self.layers)})
        return (PATCHES, POSITIONS, *ends, *(GRID_ROWS, GRID_WEIGHTS) * (self.grid is not None), TOKEN_ROWS)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs, in the order in which a call returns them."""
        return (EMBEDDINGS, *(DEEPSTACK.format(index) for index in range(len(self.deepstack))))

    @property
    def cache_layout(self) -> CacheLayout:
        """Return the layout without caches."""
        return CacheLayout((), (), {})

    @property
    def input_shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the inputs, without those whose shape is [None]."""
        merged = self.merge[0].weight.shape[1] // self.layers[0].projection.weight.shape[0]
        shapes: dict[str, tuple[int | None, ...]] = {PATCHES: (None, self.patch_embedding.weight.shape[1])}
        return shapes | {
            POSITIONS: (3, None),
            GRID_ROWS: (None, 4),
            GRID_WEIGHTS: (None, 4),
            TOKEN_ROWS: (None, merged),
        }

    def __call__(self, run: Run) -> tuple[Tensor, ...]:
        x, residual = self.patch_embedding(run, run.inputs[PATCHES]), None
        if self.grid:
            [table] = run.stored(self.grid)
            learned = run.ops.interpolate_rows(table, run.inputs[GRID_ROWS], run.inputs[GRID_WEIGHTS])
            x = run.ops.add(x, learned)
        arrays = (run.inputs[POSITIONS], run.params[self.inv_freq.name], run.params[self.axes.name])
        angles = run.ops.mrope_angles(*arrays, attention_scaling=1.0)
        features = []
        for index, layer in enumerate(self.layers):
            x, residual = layer(run, x, residual, angles)
            features += [each(run, run.ops.add(x, residual)) for each in self.deepstack if each.layer == index]
        first, *others = self.norms
        x, _ = first(run, x, residual)
        for norm in others:
            x = norm.alone(run, x)
        return _projected(run, self.merge, _merged(run, x)), *features


def _merged(run: Run, x: Tensor) -> Tensor:
    """Return the patches of each token side by side."""
    return run.ops.concat_rows(x, run.inputs[TOKEN_ROWS])


def _projected(run: Run, merge: tuple[Linear, Linear], x: Tensor) -> Tensor:
    return merge[1](run, run.ops.gelu_erf(merge[0](run, x)))


@dataclass(frozen=True, kw_only=True)
class VisionFamily(DecoderConfig):
    """Configuration of a family whose models read images."""

    vision: VisionConfig | None = None  # None: the checkpoint has no tower
    takes_spans: bool = True

    def tower(self, vision: VisionConfig, shard: Shard) -> VisionTower:
        """Return the tower. `shard` is that of a rank that has the whole of it."""
        raise NotImplementedError

    def networks(self, shard: Shard) -> dict[str, Network]:
        networks = super().networks(shard)
        if self.vision is None:
            return networks
        whole = replace(shard, format=FORMATS[shard.dtype], rank=0, num_ranks=1)
        return {**networks, VISION_GRAPH: self.tower(self.vision, whole)}


def axial_rope(config: VisionConfig) -> tuple[Constant, Constant]:
    """Return the frequencies of a tower and the axis of each: half of the angles turn with the row, half with the
    column."""
    size = config.head_dim // 2
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    inv_freq = (1.0 / config.theta ** exponents.astype(np.float64)).astype(np.float32)
    axes = np.repeat(np.array([1, 2], np.int32), len(inv_freq))
    return Constant("vision_inv_freq", np.tile(inv_freq, 2)), Constant("vision_axes", axes)


def dense(scope: LayerScope, name: str, tensors: tuple[str, ...], sizes: tuple[int, int], bias: bool = True) -> Linear:
    """Return a linear layer that stacks the outputs of layers of the checkpoint. `sizes` are the outputs of each and
    the inputs."""
    num_outputs, num_inputs = sizes
    outputs = [(tensor, AxisShard.whole(num_outputs)) for tensor in tensors]
    return Linear.columns(scope, name, outputs, num_inputs, bias)


def vision_norm(kind: type[Norm], scope: LayerScope, name: str, size: int, epsilon: float) -> Norm:
    """Return a norm of rows of `size`, of the class Norm or LayerNorm."""
    ends = ("weight", "bias")[: 1 + (kind is LayerNorm)]
    weights = [scope.weight(f"{name}.{end}", [(f"{name}.{end}", (AxisShard.whole(size),))]) for end in ends]
    return LayerNorm(weights[0], epsilon, weights[1]) if kind is LayerNorm else Norm(weights[0], epsilon)
