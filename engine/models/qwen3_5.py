"""Qwen3.5: three layers of Gated DeltaNet before each layer of attention, whose output has a gate, and a tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.models.attention import HEADS, Attention, AttentionOptions
from engine.models.config import layer_kinds, read_decoder
from engine.models.config_fields import an_object, whole_number
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.experts import mlp_of
from engine.models.gated_delta_net import DeltaNetOptions, GatedDeltaNet
from engine.models.layers import LayerScope
from engine.models.mixture_config import refuse_other_values
from engine.models.mtp import QWEN, MtpFamily
from engine.models.qwen_vision import Qwen3VisionFamily, read_qwen3_vision
from engine.models.weights import Shard


@dataclass(frozen=True, kw_only=True)
class Qwen35(Qwen3VisionFamily, MtpFamily):
    """Configuration of a dense Qwen3.5 model."""

    are_linear: tuple[bool, ...]  # of each layer: whether it is Gated DeltaNet
    delta_net: DeltaNetOptions
    defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25, "num_key_value_heads": 4}
    mtp_layout = QWEN
    rotates_partly = True
    is_grouped: ClassVar[bool] = False  # layout of the projections of Gated DeltaNet

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Qwen35:
        keys = {**cls.defaults, **keys, **an_object(keys, "text_config")}
        refuse_other_values(keys, attention_bias=False)
        keys, of_tower = read_qwen3_vision(keys, (11, 11, 10))  # the sections that transformers has by default
        interval = whole_number(keys, "full_attention_interval", 4)
        kinds = layer_kinds(keys, ("full_attention", "linear_attention"), lambda layer: (layer + 1) % interval != 0)
        own = {
            "norm_offset": 1.0,
            "are_linear": tuple(kind == "linear_attention" for kind in kinds),
            "delta_net": DeltaNetOptions.read(keys, cls.is_grouped),
            "mixture": cls.mixture_of(keys),
            **of_tower,
        }
        return read_decoder(cls, keys, own, head_dim=256)

    def with_mtp_layer(self) -> Qwen35:
        return replace(super().with_mtp_layer(), are_linear=(*self.are_linear, False))

    def network(self, shard: Shard) -> Decoder:
        return Decoder.of(self, shard, self.layer)

    def layer(self, scope: LayerScope) -> DecoderLayer:
        assert scope.layer is not None
        is_linear, options = self.are_linear[scope.layer], AttentionOptions(norms=HEADS, has_gate=True)
        mixer = GatedDeltaNet.of(self, scope, self.delta_net) if is_linear else Attention.of(self, scope, options)
        return DecoderLayer.of(self, scope, (mixer, mlp_of(self, scope)))
