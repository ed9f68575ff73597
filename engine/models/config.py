"""What config.json says of a decoder, in the few numbers it is made of. Refuses what no family can express.

Knows the keys that families share, old and new; a family knows its own. Knows neither tensors nor Paddle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from engine.models.keys import ModelError, an_object, number, whole_number
from engine.models.quantization import read_quantization
from engine.models.rope import Rope, read_rope
from engine.models.weights import Shard

if TYPE_CHECKING:
    from engine.models.decoder import Decoder  # made of what a config says

DECODER = "decoder"  # the graph that makes tokens
TYPES = ("full_attention", "sliding_attention")  # of layer_types
Family = TypeVar("Family", bound="DecoderConfig")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """A decoder with rotary positions and grouped-query attention, in the words of config.json. A family extends it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens the model was made for, after rope scaling
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool  # the output projection is the embedding table
    windows: tuple[int, ...] = ()  # of each layer, the positions that it attends to; 0: all; nothing: all layers all
    slides: tuple[bool, ...] = ()  # whether a layer is of the kind with windows, even where no window is left
    sliding_rope: Rope | None = None  # of these layers; None: that of all
    norm_offset: float = 0.0  # added to the weights of norms: 1 where the checkpoint has what differs from 1
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what mixer and MLP add
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0  # logits become cap * tanh(logit / cap); 0: they stay
    takes_spans: bool = False  # the embeddings of prompt spans take the place of those of tokens; positions may be 3-D
    has_rotary_pairs: bool = False  # what turns together lies side by side in the checkpoint, not half a head apart

    @classmethod
    @abstractmethod
    def read(cls, keys: Mapping[str, Any]) -> DecoderConfig:
        """Of the parsed config.json. Raises ModelError for anything the family would compute differently."""

    @abstractmethod
    def network(self, shard: Shard) -> Decoder:
        """Return the network of one rank."""

    def networks(self, shard: Shard) -> dict[str, Decoder]:
        """Return, by name, the networks of one rank that are exported, each as a graph. A family that also drafts or
        reads images adds to the decoder."""
        return {DECODER: self.network(shard)}

    def for_length(self: Family, max_seq_len: int) -> Family:
        """Return the model as it is exported for this length: windows that reach that far are none."""
        windows = tuple(0 if window >= max_seq_len else window for window in self.windows)
        return replace(self, rope=self.rope.for_length(max_seq_len), windows=windows)

    def window(self, layer: int | None) -> int:
        """Return the window of a layer, 0 if it attends to everything."""
        return self.windows[layer] if self.windows and layer is not None else 0

    def rope_of(self, layer: int | None) -> Rope:
        """Return the positions of a layer, which those with a window may have for themselves."""
        has_own = self.sliding_rope and self.slides and layer is not None and self.slides[layer]
        return self.sliding_rope if has_own and self.sliding_rope else self.rope


SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")


def read_decoder(
    family: type[Family],
    keys: Mapping[str, Any],
    own: Mapping[str, Any],
    head_dim: int | None = None,
    activations: Collection[str] = SILU,
) -> Family:
    """Read the keys that all families share, beside the family's `own` fields. `head_dim`: where no key says another.
    `activations`: names of that which the family computes.

    Raises ModelError for anything a decoder would compute differently.
    """
    _refuse_what_is_not_built(keys, activations)
    hidden_size = whole_number(keys, "hidden_size")
    num_heads = whole_number(keys, "num_attention_heads")
    head_dim = whole_number(keys, "head_dim", head_dim or hidden_size // num_heads)
    max_positions = whole_number(keys, "max_position_embeddings")
    rope = own.get("rope") or read_rope(keys, head_dim, max_positions)
    if dual_chunk := an_object(keys, "dual_chunk_attention_config"):  # not built, and not needed up to that length
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
        **own,
    )
    _check_heads(config)
    return config


def layer_windows(keys: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the window of each layer, 0 for full attention: by `layer_types`, without these of the layers for which
    `slides` is true."""
    num_layers = whole_number(keys, "num_hidden_layers")
    layer_types = keys.get("layer_types") or [TYPES[slides(layer)] for layer in range(num_layers)]
    for kind in layer_types:
        if kind not in TYPES:
            raise ModelError(f"config.json: layer_types has {kind!r}, supported are {', '.join(map(repr, TYPES))}")
    if len(layer_types) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(layer_types)} layers, num_hidden_layers is {num_layers}")
    has_window = TYPES[True] in layer_types and keys.get("sliding_window", 4096) is not None
    window = whole_number(keys, "sliding_window", 4096) if has_window else 0
    return tuple(window * (kind == TYPES[True]) for kind in layer_types)


def _refuse_what_is_not_built(keys: Mapping[str, Any], activations: Collection[str]) -> None:
    read_quantization(keys)
    for name in ("hidden_act", "hidden_activation"):
        activation = keys.get(name)
        if activation is not None and activation not in activations:
            supported = " or ".join(map(repr, activations))
            raise ModelError(f"config.json: {name} is {activation!r}, supported is {supported}")
    if keys.get("is_causal", True) is not True:
        raise ModelError(f"config.json: is_causal is {keys['is_causal']!r}, supported is True: models that write text")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.get(name):
            raise ModelError(f"config.json: {name} is {keys[name]!r}, mixtures of experts are not supported yet")


def _check_heads(config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads is {config.num_heads}, it must be a multiple of"
            f" num_key_value_heads, which is {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"config.json: head_dim is {config.head_dim}, rotary positions need an even one")
