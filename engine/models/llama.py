"""Llama 1 to 3, and families with the same network: Seed-OSS and InternLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Llama(DecoderConfig):
    """Configuration of a Llama model."""

    attention_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Llama:
        biases = {name: bool(keys.get(name)) for name in ("attention_bias", "mlp_bias")}
        return read_decoder(cls, keys, {"output_bias": biases["attention_bias"], **biases})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        options = AttentionOptions(qkv_bias=self.attention_bias, o_bias=self.output_bias)
        mlp = GatedMlp.of(self, scope, self.mlp_bias)
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), mlp))


class SeedOss(Llama):
    """Configuration of a Seed-OSS model, in which a key of its own gives the output projection of attention a bias."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> SeedOss:
        names = {"attention_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
        given = {"attention_bias": True, "num_key_value_heads": 8, **keys}
        return read_decoder(cls, given, {own: bool(given.get(name)) for own, name in names.items()}, head_dim=128)


class InternLm3(Llama):
    """Configuration of an InternLM3 model, whose keys for biases have other names."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> InternLm3:
        qkv_bias = bool(keys.get("qkv_bias", keys.get("attention_bias")))
        bias = bool(keys.get("bias", keys.get("mlp_bias")))
        given = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, **keys}
        own = {"attention_bias": qkv_bias, "output_bias": bias, "mlp_bias": bias}
        return read_decoder(cls, given, own, head_dim=128)
