"""DeepSeek V2 and V3, and models of the same network: latent attention in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.keys import an_object, whole_number
from engine.models.latent_attention import LatentAttention, LatentOptions, read_latent
from engine.models.layers import Place
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DecoderConfig):
    """Configuration of a DeepSeek V2 model."""

    latent: LatentOptions
    mlp_bias: bool
    num_mtp_layers: int  # behind the decoder layers, to draft tokens; not used

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> DeepseekV2:
        latent = read_latent(keys)
        scaling = {
            **an_object(keys, "rope_scaling"),
            **an_object(keys, "rope_parameters"),
            "partial_rotary_factor": 1.0,
        }
        rope = {"rope_scaling": None, "rope_parameters": scaling, "head_dim": latent.rope_dim}
        given = {**keys, **rope, "num_key_value_heads": keys.get("num_attention_heads")}
        own = {
            "latent": latent,
            "has_rotary_pairs": bool(keys.get("rope_interleave", True)),
            "mlp_bias": bool(keys.get("mlp_bias")),
            "num_mtp_layers": whole_number(keys, "num_nextn_predict_layers")
            if keys.get("num_nextn_predict_layers")
            else 0,
        }
        return read_decoder(cls, given, own)

    def ignores(self, tensor: str) -> bool:
        behind = range(self.num_layers, self.num_layers + self.num_mtp_layers)
        return any(tensor.startswith(f"model.layers.{layer}.") for layer in behind)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, place: Place) -> DecoderLayer:
        mixer = LatentAttention.of(self, place, self.latent)
        return DecoderLayer.of(self, place, (mixer, GatedMlp.of(self, place, self.mlp_bias)))


class DeepseekV3(DeepseekV2):
    """Configuration of a DeepSeek V3 or R1 model, and of Kimi K2, GLM-4.7-Flash and Mistral Small 4."""
