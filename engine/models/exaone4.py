"""EXAONE 4: norms after attention and MLP, and of each head. If some layers have windows, the others do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import DecoderConfig, layer_windows, read_decoder
from engine.models.config_fields import whole_number
from engine.models.decoder import POST_NORM, Decoder, DecoderLayer
from engine.models.layers import LayerScope
from engine.models.mlp import GatedMlp
from engine.models.rope import no_rotation
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Exaone4(DecoderConfig):
    """Configuration of an EXAONE 4 model."""

    has_windows: bool

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Exaone4:
        keys = {"sliding_window": 4096, **keys}
        has_windows = keys["sliding_window"] is not None
        pattern = keys.get("sliding_window_pattern", 4) if has_windows else None
        if isinstance(pattern, str) and pattern:  # L for a layer with a window, G for one without
            slides = [each == "L" for each in pattern]
        else:  # the last of so many layers has none
            interval = whole_number({"sliding_window_pattern": pattern}, "sliding_window_pattern", 4)
            slides = [(layer + 1) % interval != 0 for layer in range(whole_number(keys, "num_hidden_layers"))]
        windows = layer_windows(keys, lambda layer: has_windows and slides[layer % len(slides)])
        return read_decoder(cls, {"rms_norm_eps": 1e-5, **keys}, {"windows": windows, "has_windows": has_windows})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self._layer)

    def _layer(self, scope: LayerScope) -> DecoderLayer:
        assert scope.layer is not None
        rope = no_rotation() if self.has_windows and not self.slides[scope.layer] else self.rope
        options = AttentionOptions(norms=HEADS, rope=rope, window=self.window(scope.layer))
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), GatedMlp.of(self, scope)), POST_NORM)
