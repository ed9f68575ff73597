"""Configuration of a decoder, read from config.json. Keys that no family supports are refused.

This module reads the keys that families share, in their old and new spelling; each family reads its own keys.
Independent of tensors and of Paddle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from engine.models.config_fields import ModelError, an_object, number, whole_number
from engine.models.mixture_config import MixtureConfig
from engine.models.quantization import read_quantization
from engine.models.rope import Rope, read_rope
from engine.models.weights import Shard

if TYPE_CHECKING:
    from engine.models.decoder import Decoder  # the decoder module imports this one
    from engine.models.eagle3 import Eagle3Head
    from engine.models.layers import Network

DECODER = "decoder"  # name of the graph that generates tokens
# The names of graphs that draft are those of the methods that need them.
MTP_GRAPH, EAGLE3_GRAPH = DRAFT_GRAPHS = ("mtp", "eagle3")
MTP = ("mtp.", "model.mtp")  # tensor names of layers that only draft tokens
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_modules")  # the number of these layers behind the decoder layers
TYPES = ("full_attention", "sliding_attention")  # the values that layer_types may have
Family = TypeVar("Family", bound="DecoderConfig")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Configuration of a decoder with rotary positions and grouped-query attention. Each family extends it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens that the model supports, after rope scaling
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool  # the output projection is the embedding table
    windows: tuple[int, ...] = ()  # the window of each layer in tokens; 0: full attention; empty: all layers have it
    slides: tuple[bool, ...] = ()  # whether a layer is of the sliding kind, even if its window was removed
    sliding_rope: Rope | None = None  # rope of the layers that slide; None: `rope`
    norm_offset: float = 0.0  # added to the weights of norms; 1 if the checkpoint stores weight - 1
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # applied to the outputs of mixer and MLP
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0  # logits become cap * tanh(logit / cap); 0: no cap
    takes_spans: bool = False  # embeddings of prompt spans replace token embeddings; positions may be 3-D
    num_deepstack_layers: int = 0  # the first layers, behind which more features of prompt spans are added
    mixture: MixtureConfig | None = None  # the mixtures of experts of its layers
    num_mtp_layers: int = 0  # layers behind the decoder layers that only draft tokens (MTP)
    eagle3: Eagle3Head | None = None  # a head of its own checkpoint, which drafts tokens
    rotates_partly: ClassVar[bool] = False  # partial_rotary_factor may be below 1
    has_rotary_pairs: bool = False  # the checkpoint stores the two elements of a pair adjacently, not half a head apart

    @classmethod
    @abstractmethod
    def read(cls, keys: Mapping[str, Any]) -> DecoderConfig:
        """Read the parsed config.json. Raises ModelError for values that the family does not implement."""

    @classmethod
    def mixture_of(cls, keys: Mapping[str, Any]) -> MixtureConfig | None:
        """Read the mixtures of experts of the model: None without them. For families that differ in nothing else."""
        return None

    @abstractmethod
    def network(self, shard: Shard) -> Decoder:
        """Return the network of one rank."""

    def networks(self, shard: Shard) -> dict[str, Network]:
        """Return, by name, the networks of one rank, each of which is exported as a graph. A family that also drafts
        tokens or reads images adds its networks to the decoder."""
        network = self.network(shard)
        return self.eagle3.networks(network, shard) if self.eagle3 else {DECODER: network}

    def ignores(self, tensor: str) -> bool:
        """Return whether the networks leave out this tensor of the checkpoint, which belongs to layers that only draft
        tokens (MTP): they follow the decoder layers, or have names of their own."""
        behind = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        return tensor.startswith((*MTP, *(f"model.layers.{layer}." for layer in behind)))

    def for_length(self: Family, max_seq_len: int) -> Family:
        """Return the configuration for sequences of at most `max_seq_len` tokens, without windows that are as long."""
        windows = tuple(0 if window >= max_seq_len else window for window in self.windows)
        eagle3 = self.eagle3.for_length(max_seq_len) if self.eagle3 else None
        return replace(self, rope=self.rope.for_length(max_seq_len), windows=windows, eagle3=eagle3)

    def window(self, layer: int | None) -> int:
        """Return the window of a layer in tokens, or 0 for full attention."""
        return self.windows[layer] if self.windows and layer is not None else 0

    def rope_of(self, layer: int | None) -> Rope:
        """Return the rope of a layer. Sliding layers may have a rope of their own."""
        has_own = self.sliding_rope and self.slides and layer is not None and self.slides[layer]
        return self.sliding_rope if has_own and self.sliding_rope else self.rope


SILU, GELU, RELU_SQUARED = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new"), ("relu2",)


def read_decoder(
    family: type[Family],
    keys: Mapping[str, Any],
    own: Mapping[str, Any],
    head_dim: int | None = None,
    activations: Collection[str] = SILU,
) -> Family:
    """Read the keys that all families share, and return the family's configuration with these and its `own` fields.

    `head_dim` is the default where config.json has no such key. `activations` are the names in config.json of the
    activation that the family computes. Raises ModelError for values that a decoder does not implement.
    """
    _refuse_what_is_not_built(keys, activations, has_experts=own.get("mixture") is not None)
    hidden_size = whole_number(keys, "hidden_size")
    num_heads = whole_number(keys, "num_attention_heads")
    head_dim = whole_number(keys, "head_dim", head_dim or hidden_size // num_heads)
    max_positions = whole_number(keys, "max_position_embeddings")
    rope = own.get("rope") or read_rope(keys, head_dim, max_positions)
    if dual_chunk := an_object(keys, "dual_chunk_attention_config"):  # not implemented; only needed beyond that length
        max_positions = min(max_positions, whole_number(dual_chunk, "original_max_position_embeddings"))
    own = {"slides": tuple(map(bool, own.get("windows", ()))), "rope": rope, **own}
    config = family(
        vocab_size=whole_number(keys, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(keys, "intermediate_size"),
        num_layers=whole_number(keys, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=whole_number(keys, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max(max_positions, rope.max_positions),
        rms_norm_eps=number(keys, "rms_norm_eps", number(keys, "norm_epsilon", 1e-6)),
        tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
        num_mtp_layers=max(whole_number(keys, name) if keys.get(name) else 0 for name in MTP_KEYS),
        **own,
    )
    _check_heads(config)
    if not family.rotates_partly and 2 * len(rope.inv_freq) != head_dim:  # transformers ignores the key
        share = 2 * len(rope.inv_freq) / head_dim
        raise ModelError(f"config.json: partial_rotary_factor is {share:g}, this model type rotates whole heads")
    return config


def layer_windows(keys: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 for full attention.

    `layer_types` determines the sliding layers. If config.json does not have it, `slides` does, given a layer's index.
    Raises ModelError for unknown types and a wrong number of layers.
    """
    layer_types = layer_kinds(keys, TYPES, slides)
    has_window = TYPES[True] in layer_types and keys.get("sliding_window", 4096) is not None
    window = whole_number(keys, "sliding_window", 4096) if has_window else 0
    return tuple(window * (kind == TYPES[True]) for kind in layer_types)


def layer_kinds(keys: Mapping[str, Any], kinds: tuple[str, str], is_second: Callable[[int], bool]) -> Sequence[str]:
    """Return the kind of each layer, one of two: from `layer_types`, or by a layer's index if config.json does not have
    it. Raises ModelError for unknown kinds and a wrong number of layers."""
    num_layers = whole_number(keys, "num_hidden_layers")
    layer_types = keys.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ModelError(f"config.json: layer_types is {layer_types!r}, it must be a list")
    layer_types = layer_types or [kinds[is_second(layer)] for layer in range(num_layers)]
    for kind in layer_types:
        if kind not in kinds:
            raise ModelError(f"config.json: layer_types has {kind!r}, supported are {', '.join(map(repr, kinds))}")
    if len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(layer_types)} layers, num_hidden_layers is {num_layers}")
    return layer_types


def _refuse_what_is_not_built(keys: Mapping[str, Any], activations: Collection[str], has_experts: bool) -> None:
    read_quantization(keys)
    for name in ("hidden_act", "hidden_activation"):
        activation = keys.get(name)
        if activation is not None and activation not in activations:
            supported = " or ".join(map(repr, activations))
            raise ModelError(f"config.json: {name} is {activation!r}, supported is {supported}")
    if keys.get("is_causal", True) is not True:
        raise ModelError(f"config.json: is_causal is {keys['is_causal']!r}, supported is True: models that write text")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.get(name) and keys[name] != 1 and not has_experts:  # a released HunYuan without a router has 1
            raise ModelError(f"config.json: {name} is {keys[name]!r}, this model type has no mixtures of experts")


def _check_heads(config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads is {config.num_heads}, it must be a multiple of"
            f" num_key_value_heads, which is {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim is {config.head_dim}, rotary positions need an even one")
