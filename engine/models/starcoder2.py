"""StarCoder2: layer norms, an MLP without a gate, and biases unless `use_bias` is false."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import GELU, DecoderConfig, layer_windows, read_decoder
from engine.models.decoder import PRE_NORM, Decoder, DecoderLayer
from engine.models.layers import LayerNorm, LayerScope
from engine.models.mlp import Mlp
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Starcoder2(DecoderConfig):
    """Configuration of a StarCoder2 model."""

    use_bias: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Starcoder2:
        windows = layer_windows(keys, lambda layer: keys.get("sliding_window") is not None)
        given = {"num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5, **keys}
        return read_decoder(
            cls, given, {"windows": windows, "use_bias": bool(keys.get("use_bias", True))}, activations=GELU
        )

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer, LayerNorm)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        bias = self.use_bias
        attention = Attention.of(self, scope, AttentionOptions(bias, bias, window=self.window(scope.layer)))
        mlp = Mlp.of(self, scope, ("c_fc", "c_proj"), bias)
        return DecoderLayer.of(self, scope, (attention, mlp), PRE_NORM, LayerNorm)
