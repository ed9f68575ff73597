"""GLM-4.5 and 4.6: mixtures of experts like those of DeepSeek-V3 with grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import read_decoder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.layers import LayerScope
from engine.models.mixture_config import deepseek_mixture
from engine.models.mtp import DEEPSEEK, MtpFamily, MtpLayout
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(MtpFamily):
    """Configuration of a GLM-4 model with mixtures of experts."""

    attention_bias: bool
    output_bias: bool  # bias of the attention's output projection
    has_head_norms: bool
    mtp_layout: ClassVar[MtpLayout | None] = DEEPSEEK
    rotates_partly = True

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Glm4Moe:
        defaults = {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8}
        defaults |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
        keys = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8, **defaults, **keys}
        own = {
            "attention_bias": bool(keys.get("attention_bias")),
            "output_bias": False,
            "has_head_norms": bool(keys.get("use_qk_norm")),
            "mixture": deepseek_mixture(keys),
        }
        return read_decoder(cls, keys, own)

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self.layer)

    def layer(self, scope: LayerScope) -> DecoderLayer:
        norms, window = HEADS if self.has_head_norms else "", self.window(scope.layer)
        options = AttentionOptions(self.attention_bias, self.output_bias, norms=norms, window=window)
        return DecoderLayer.of(self, scope, (Attention.of(self, scope, options), mlp_of(self, scope)))
