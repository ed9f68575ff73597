"""Configuration of a mixture of experts: which layers have one, how tokens choose experts, and the names of tensors.

Independent of tensors and of families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.models.config_fields import ModelError, layer_list, number, values_of_layers, whole_number
from engine.ops.catalogue_experts import SIGMOID, SILU_GATE, SOFTMAX

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of their number


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of the experts of a token: the attributes of the op `moe_route`."""

    top_k: int
    scoring: int = SOFTMAX
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalize: int = 0
    epsilon: float = 0.0
    minimum: float = 0.0
    factor: float = 1.0

    @property
    def attributes(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Activation between the two products of an expert: attributes of the op `expert_gate_up`."""

    activation: int = SILU_GATE
    limit: float = 0.0
    alpha: float = 1.0
    offset: float = 0.0

    @property
    def attributes(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Configuration of the mixtures of experts of a model. Names are those of the checkpoint's tensors."""

    num_experts: int
    intermediate_size: int  # of an expert
    layers: tuple[bool, ...]  # whether a layer has a mixture; other layers have an MLP
    routing: Routing
    activation: Activation = Activation()
    block: str = "mlp"  # the module that holds the mixture
    router: str = "gate"
    choice_bias: str = ""  # a bias that changes the choice of experts, not their weights; empty: none
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False  # of the router and of the experts
    shared: str = ""  # the expert that all tokens share; empty: none
    shared_size: int = 0  # its intermediate size
    shared_gate: str = ""  # the gate of its output; empty: none


def num_experts(keys: Mapping[str, Any], default: int | None = None) -> int:
    """Return the number of routed experts, for which versions of transformers write different keys."""
    name = next((name for name in EXPERTS if keys.get(name) is not None), EXPERTS[0])
    return whole_number(keys, name, default)


def mixture_layers(keys: Mapping[str, Any], is_mixture: Callable[[int], bool] = lambda layer: True) -> tuple[bool, ...]:
    """Return, for each layer, whether it has a mixture of experts."""
    return tuple(is_mixture(layer) for layer in range(whole_number(keys, "num_hidden_layers")))


def _qwen_layers(keys: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have a mixture by `mlp_only_layers` and `decoder_sparse_step`."""
    dense, step = layer_list(keys, "mlp_only_layers"), whole_number(keys, "decoder_sparse_step", 1)
    return mixture_layers(keys, lambda layer: layer not in dense and (layer + 1) % step == 0)


def qwen_mixture(keys: Mapping[str, Any], **shared: Any) -> MixtureConfig:
    """Return the mixture of Qwen2-MoE and Qwen3-MoE. `shared` are the fields of its shared expert."""
    routing = Routing(
        top_k=whole_number(keys, "num_experts_per_tok"), renormalize=int(bool(keys.get("norm_topk_prob")))
    )
    return MixtureConfig(
        num_experts=num_experts(keys),
        intermediate_size=whole_number(keys, "moe_intermediate_size"),
        layers=_qwen_layers(keys),
        routing=routing,
        **shared,
    )


def deepseek_mixture(keys: Mapping[str, Any]) -> MixtureConfig:
    """Return the mixture of DeepSeek-V3 and the families that follow it: sigmoid scores, a bias of the choice, groups
    of experts, shared experts, and dense layers at the bottom."""
    given = {name: value for name, value in keys.items() if value is not None}
    size = whole_number(given, "moe_intermediate_size")
    num_dense, num_shared = (whole_number(given, name, 0, 0) for name in ("first_k_dense_replace", "n_shared_experts"))
    refuse_other_values(given, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    count = num_experts(given)
    return MixtureConfig(
        num_experts=count,
        intermediate_size=size,
        layers=_deepseek_layers(given, num_dense),
        routing=Routing(
            top_k=whole_number(given, "num_experts_per_tok"),
            scoring=SIGMOID,
            num_groups=whole_number(given, "n_group", 1),
            top_groups=whole_number(given, "topk_group", 1),
            group_best=min(2, count // whole_number(given, "n_group", 1)),
            renormalize=int(bool(given.get("norm_topk_prob"))),
            epsilon=1e-20,
            factor=number(given, "routed_scaling_factor", 1.0),
        ),
        choice_bias="gate.e_score_correction_bias",
        shared="shared_experts" if num_shared else "",
        shared_size=num_shared * size,
    )


def softmax_mixture(keys: Mapping[str, Any]) -> MixtureConfig:
    """Return the mixture of DeepSeek-V2: softmax scores, which are not renormalized, and no bias of the choice."""
    method = keys.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method is {method!r}, supported are 'greedy' and 'group_limited_greedy'")
    refuse_other_values(keys, scoring_func="softmax", norm_topk_prob=False)
    mixture = deepseek_mixture({**keys, "topk_method": None, "scoring_func": None})
    groups = {} if method == "group_limited_greedy" else {"num_groups": 1, "top_groups": 1}
    routing = replace(mixture.routing, scoring=SOFTMAX, group_best=1, epsilon=0.0, **groups)
    return replace(mixture, choice_bias="", routing=routing)


def mistral_mixture(keys: Mapping[str, Any]) -> MixtureConfig:
    """Return the mixture of Mistral Small 4: that of DeepSeek-V3 with softmax scores and no bias of the choice."""
    mixture = deepseek_mixture(keys)
    return replace(mixture, choice_bias="", routing=replace(mixture.routing, scoring=SOFTMAX))


def _deepseek_layers(keys: Mapping[str, Any], num_dense: int) -> tuple[bool, ...]:
    """Return which layers have a mixture by `mlp_layer_types`, or all behind the first `num_dense` ones."""
    types = values_of_layers(keys, "mlp_layer_types", whole_number(keys, "num_hidden_layers"))
    return mixture_layers(keys, lambda layer: types[layer] == "sparse" if types else layer >= num_dense)


def refuse_other_values(keys: Mapping[str, Any], **supported: Any) -> None:
    """Raise ModelError if config.json has another value than the supported one for a key."""
    for name, value in supported.items():
        if keys.get(name, value) != value:
            raise ModelError(f"config.json: {name} is {keys[name]!r}, supported is {value!r}")
