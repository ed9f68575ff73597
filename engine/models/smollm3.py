"""SmolLM3: like Llama, but some layers do not rotate; these may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import values_of_layers, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.rope import no_rotation
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class SmolLm3(DecoderConfig):
    """Configuration of a SmolLM3 model."""

    rotates: tuple[bool, ...]  # for each layer, whether it has rotary positions
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> SmolLm3:
        num_layers, interval = whole_number(keys, "num_hidden_layers"), whole_number(keys, "no_rope_layer_interval", 4)
        listed = values_of_layers(keys, "no_rope_layers", num_layers)
        rotates = tuple(bool(each) for each in listed or [(layer + 1) % interval for layer in range(num_layers)])
        has_windows = bool(keys.get("use_sliding_window")) and keys.get("sliding_window") is not None
        windows = layer_windows(keys, lambda layer: has_windows and not rotates[layer])
        given = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, **keys}
        biases = {name: bool(keys.get(name)) for name in ("attention_bias", "mlp_bias")}
        own = {"rotates": rotates, "windows": windows if has_windows else (), **biases}
        return read_decoder(cls, given, own)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        assert scope.layer is not None
        rope = self.rope if self.rotates[scope.layer] else no_rotation()
        bias = self.attention_bias
        attention = Attention.of(self, scope, AttentionOptions(bias, bias, rope=rope, window=self.window(scope.layer)))
        return DecoderLayer.of(self, scope, (attention, GatedMlp.of(self, scope, self.mlp_bias)))
