"""What config.json says of a decoder, in the few numbers it is made of. Refuses what no family can express.

Knows the keys that families share, old and new; a family knows its own. Knows neither tensors nor Paddle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.models.keys import ModelError, an_object, number, whole_number
from engine.models.quantization import read_quantization
from engine.models.rope import Rope, read_rope
from engine.models.weights import Shard

if TYPE_CHECKING:
    from engine.models.decoder import Decoder  # made of what a config says

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
    sliding_window: int | None = None  # some layer looks back only so far: exact up to this length
    has_rotary_pairs: bool = False  # what turns together lies side by side in the checkpoint, not half a head apart

    @classmethod
    @abstractmethod
    def read(cls, keys: Mapping[str, Any]) -> DecoderConfig:
        """Of the parsed config.json. Raises ModelError for anything the family would compute differently."""

    @abstractmethod
    def network(self, shard: Shard) -> Decoder:
        """Of one rank."""


def read_decoder(family: type[Family], keys: Mapping[str, Any], head_dim: int | None = None, **own: Any) -> Family:
    """The keys all families share, beside the family's `own` fields. `head_dim`: where no key says another.

    Raises ModelError for anything a decoder would compute differently.
    """
    _refuse_what_is_not_built(keys)
    hidden_size = whole_number(keys, "hidden_size")
    num_heads = whole_number(keys, "num_attention_heads")
    head_dim = whole_number(keys, "head_dim", head_dim or hidden_size // num_heads)
    max_positions = whole_number(keys, "max_position_embeddings")
    rope = read_rope(keys, head_dim, max_positions)
    if dual_chunk := an_object(keys, "dual_chunk_attention_config"):  # not built, and not needed up to that length
        max_positions = min(max_positions, whole_number(dual_chunk, "original_max_position_embeddings"))
    config = family(
        vocab_size=whole_number(keys, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(keys, "intermediate_size"),
        num_layers=whole_number(keys, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=whole_number(keys, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max(max_positions, rope.max_positions),
        rms_norm_eps=number(keys, "rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
        **own,
    )
    _check_heads(config)
    return config


def sliding_window(keys: Mapping[str, Any], by_default: bool) -> int | None:
    """The window of the layers that have one, None when none has. `by_default`: some have, without `layer_types`."""
    layer_types = keys.get("layer_types")
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"config.json: layer_types has {kind!r}, supported is 'full_attention'")
    has_sliding_layers = by_default if layer_types is None else "sliding_attention" in layer_types
    if not has_sliding_layers or keys.get("sliding_window", 4096) is None:
        return None
    return whole_number(keys, "sliding_window", 4096)


def _refuse_what_is_not_built(keys: Mapping[str, Any]) -> None:
    read_quantization(keys)
    activation = keys.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act is {activation!r}, supported is 'silu'")
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
