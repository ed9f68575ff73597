"""ERNIE 4.5 without experts: like Llama, except for the order of rotary pairs; attention and MLP may have biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.models.attention import Attention, AttentionOptions
from engine.models.config import read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.mtp import ERNIE, MtpFamily, MtpLayout
from engine.models.weights import Shard

# The defaults of transformers for keys that config.json does not have
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}


@dataclass(frozen=True, kw_only=True)
class Ernie45(MtpFamily):
    """Configuration of an ERNIE 4.5 model."""

    use_bias: bool
    mtp_layout: ClassVar[MtpLayout | None] = ERNIE

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Ernie45:
        given = {"tie_word_embeddings": True, **DEFAULTS, **keys}
        return read_decoder(cls, given, {"has_rotary_pairs": True, "use_bias": bool(keys.get("use_bias"))})

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self.layer)

    def layer(self, scope: LayerScope) -> DecoderLayer:
        attention = Attention.of(self, scope, AttentionOptions(self.use_bias, self.use_bias))
        return DecoderLayer.of(self, scope, (attention, mlp_of(self, scope, self.use_bias)))
