"""Qwen3.5: three layers of Gated DeltaNet before each layer of attention, whose output has a gate. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_kinds, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.gated_delta_net import DeltaNetOptions, GatedDeltaNet
from engine.models.keys import ModelError, an_object, whole_number
from engine.models.layers import Place
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen35(DecoderConfig):
    """Configuration of a dense Qwen3.5 model."""

    are_linear: tuple[bool, ...]  # of each layer: whether it is Gated DeltaNet
    delta_net: DeltaNetOptions

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen35:
        keys = {"partial_rotary_factor": 0.25, **keys, **an_object(keys, "text_config")}
        head_dims = [whole_number(keys, f"linear_{kind}_head_dim", 128) for kind in ("key", "value")]
        if head_dims[0] != head_dims[1] or head_dims[0] % 16 or keys.get("attention_bias"):
            raise ModelError(
                "config.json: linear_key_head_dim and linear_value_head_dim must be the same multiple of 16, and"
                f" attention_bias false; they are {head_dims[0]}, {head_dims[1]} and {keys.get('attention_bias')!r}"
            )
        k_heads, v_heads = (whole_number(keys, f"linear_num_{kind}_heads") for kind in ("key", "value"))
        num_taps = whole_number(keys, "linear_conv_kernel_dim", 4)
        interval = whole_number(keys, "full_attention_interval", 4)
        kinds = layer_kinds(keys, ("full_attention", "linear_attention"), lambda layer: (layer + 1) % interval != 0)
        own = {
            "norm_offset": 1.0,
            "are_linear": tuple(kind == "linear_attention" for kind in kinds),
            "delta_net": DeltaNetOptions(k_heads, v_heads, head_dims[0], num_taps),
        }
        return read_decoder(cls, keys, own, head_dim=256)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, place: Place) -> DecoderLayer:
        assert place.layer is not None
        is_linear, options = self.are_linear[place.layer], AttentionOptions(norms=HEADS, has_gate=True)
        mixer = GatedDeltaNet.of(self, place, self.delta_net) if is_linear else Attention.of(self, place, options)
        return DecoderLayer.of(self, place, (mixer, GatedMlp.of(self, place)))
