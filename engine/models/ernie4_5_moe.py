"""ERNIE 4.5 with mixtures of experts: a bias changes the choice of experts; all tokens share some experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import read_decoder
from engine.models.config_fields import ModelError, number, whole_number
from engine.models.ernie4_5 import Ernie45
from engine.models.mixture_config import MixtureConfig, Routing, mixture_layers, num_experts, refuse_other_values

# The defaults of transformers for keys that config.json does not have
DEFAULTS = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}


@dataclass(frozen=True, kw_only=True)
class Ernie45Moe(Ernie45):
    """Configuration of an ERNIE 4.5 model with mixtures of experts."""

    @classmethod
    def read(cls, keys: Mapping[str, Any]) -> Ernie45Moe:
        if keys.get("use_bias"):  # then the output projection has one, too
            raise ModelError(f"config.json: use_bias is {keys['use_bias']!r}, supported with experts is false")
        own = {"has_rotary_pairs": True, "use_bias": False, "mixture": _mixture(keys)}
        return read_decoder(cls, {**DEFAULTS, **keys}, own)


def _mixture(keys: Mapping[str, Any]) -> MixtureConfig:
    size, num_shared = (
        whole_number(keys, "moe_intermediate_size", 1536),
        whole_number(keys, "moe_num_shared_experts", 2, 0),
    )
    start, end = whole_number(keys, "moe_layer_start_index", 1, 0), keys.get("moe_layer_end_index", -1)
    if type(end) is not int:
        raise ModelError(f"config.json: moe_layer_end_index is {end!r}, it must be a whole number")
    refuse_other_values(keys, moe_gate_act="softmax", moe_norm_gate_logits=True)
    interval = whole_number(keys, "moe_layer_interval", 1)
    last = whole_number(keys, "num_hidden_layers") - 1 if end == -1 else end
    return MixtureConfig(
        num_experts=num_experts(keys, 64),
        intermediate_size=size,
        layers=mixture_layers(keys, lambda layer: start <= layer <= last and (layer + 1) % interval == 0),
        routing=Routing(
            top_k=whole_number(keys, "moe_k", 6), renormalize=1, minimum=number(keys, "moe_norm_min", 1e-12)
        ),
        choice_bias="moe_statics.e_score_correction_bias",
        shared="shared_experts" if num_shared else "",
        shared_size=num_shared * size,
    )
