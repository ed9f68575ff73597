"""OLMo 2 and 3: norms after attention and MLP, one norm of all queries together and one of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import WIDE, Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.decoder import POST_NORM, Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.rope import ropes_by_layer_type
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Olmo2(DecoderConfig):
    """Configuration of an OLMo 2 model."""

    attention_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Olmo2:
        return read_decoder(cls, {"rms_norm_eps": 1e-5, **keys}, {"attention_bias": bool(keys.get("attention_bias"))})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias, window = self.attention_bias, self.window(scope.layer)
        options = AttentionOptions(bias, bias, norms=WIDE, rope=self.rope_of(scope.layer), window=window)
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), GatedMlp.of(self, scope)), POST_NORM)


@dataclass(frozen=True, kw_only=True)
class Olmo3(Olmo2):
    """Configuration of an OLMo 3 model, in which three of four layers have a window and a rope of their own."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Olmo3:
        given = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **keys}
        head_dim = whole_number(keys, "hidden_size") // whole_number(keys, "num_attention_heads")
        head_dim = whole_number(keys, "head_dim", head_dim)
        ropes = ropes_by_layer_type(given, head_dim, whole_number(keys, "max_position_embeddings"))
        windows = layer_windows(keys, lambda layer: (layer + 1) % 4 != 0)
        own = {"rope": ropes[0], "sliding_rope": ropes[1], "windows": windows}
        return read_decoder(cls, given, {"attention_bias": bool(keys.get("attention_bias")), **own})
