"""Tests of the contents of config.json and of the tensors that a network asks for, without Paddle."""

import numpy as np
import pytest

from engine.models.config import DecoderConfig
from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.models.formats import FLOAT32
from engine.models.quantization import is_fp8
from engine.models.weights import Shard, weights_of
from tests.checkpoints import COMMON, FAMILIES, tensor_list
from tests.family_checkpoints import ALL, config_of

QWEN2_MOE = {**ALL["qwen2_moe"], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 99}
YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def a_config(family: str = "llama", **overrides) -> DecoderConfig:
    keys = {**COMMON, "model_type": family, **FAMILIES.get(family, {}), **overrides}
    return read_model({name: value for name, value in keys.items() if value != "absent"})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_has_its_place_and_shape(family):
    network = a_config(family).network(Shard(FLOAT32, "float32", block_size=64))
    parts = [part for weight in weights_of(network).values() for part in weight.parts]
    assert {part.tensor: part.shape for part in parts} == {
        name: shape for name, (shape, *_) in tensor_list({**COMMON, **FAMILIES[family]}).items()
    }


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "llama",
            {"model_type": "gemma4"},
            "model_type is 'gemma4', supported are llama, mistral, ministral, ministral3, qwen2, qwen3",
        ),
        ("llama", {"model_type": "absent"}, "model_type is None"),
        ("ernie4_5", {"model_type": "ernie4_5_vl"}, "model_type is 'ernie4_5_vl', supported are .*, ernie4_5, "),
        ("llama", {"hidden_size": "absent"}, "hidden_size is missing"),
        ("llama", {"hidden_size": "72"}, "hidden_size is '72', it must be a positive whole number"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, it must be at most 4096"),
        ("llama", {"hidden_size": 2**20 + 1}, "hidden_size is 1048577, it must be at most 1048576"),
        ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648, it must be at most 2147483647"),
        ("llama", {"model_type": ["llama"]}, "model_type is .'llama'., supported are llama"),
        ("llama", {"rope_scaling": {"type": []}}, "rope_type is .., supported are default"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1, it must be a positive number"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4, it must be a multiple"),
        ("llama", {"head_dim": 15}, "of a head of 15 an even number must be rotated"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config.quant_method is 'bitsandbytes', supported",
        ),
        ("llama", {"quantization_config": "gptq"}, "quantization_config is 'gptq', it must be an object"),
        ("qwen2", {"is_causal": False}, "is_causal is False, supported is True"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8, this model type has no mixtures of experts"),
        ("llama", {"rope_scaling": {"type": "axial", "factor": 2}}, "rope_type is 'axial', supported are default,"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "short_factor has 1 numbers, .* need 8"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": 2}}, "short_factor is 2, it must be a list of"),
        (
            "gemma3_text",
            {"hidden_act": "absent", "attn_logit_softcapping": 5.0},
            "attn_logit_softcapping is 5.0, supported is null",
        ),
        (
            "gemma2",
            {"hidden_act": "absent", "hidden_activation": "silu"},
            "hidden_activation is 'silu', supported is 'gelu_pytorch_tanh' or",
        ),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": "x"}}, "attention_factor is 'x'"),
        ("mistral", {"sliding_window": "99"}, "sliding_window is '99', it must be a positive whole number"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers is '2'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x', it must be a positive number"),
        ("llama", {"rope_theta": 1e308}, "rope_theta is 1e.308, it must be from 1e-15 to 1e.15"),
        ("llama", {"partial_rotary_factor": float("inf")}, "partial_rotary_factor is inf, it must be from 1e-15"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*, it must be from 1e-15"),
        (
            "llama",
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
            "rope_type 'yarn' is not possible with .*'theta': 1.0.*: float division by zero",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, of a head of 18 an even number"),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, this model type rotates whole heads",
        ),
        ("dots1", {**ALL["dots1"], "partial_rotary_factor": 0.5}, "factor is 0.5, this model type rotates whole heads"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "one set for all layers"),
        ("qwen3", {"layer_types": ["full_attention", "linear"]}, "layer_types has 'linear'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 3"),
        ("qwen3", {"layer_types": [None, "linear"]}, "layer_types has None"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, supported with experts is false"),
        (
            "deepseek_v2",
            {**ALL["deepseek_v2"], "mlp_bias": True},
            "mlp_bias is True, supported with shared experts is false",
        ),
    ],
)
def test_unsupported_values_are_refused_by_key_and_value(family, overrides, message):
    with pytest.raises(ModelError, match=message):
        a_config(family, **overrides)


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {"sliding_window": 99}, ()),  # a key that llama does not read
        ("mistral", {}, (0, 0)),
        ("mistral", {"sliding_window": 99}, (99, 99)),
        ("mistral", {"sliding_window": "absent"}, (4096, 4096)),
        ("mistral", {"sliding_window": 99, "use_sliding_window": False}, (99, 99)),  # a key that mistral does not read
        ("qwen2", {"sliding_window": 99}, (0, 0)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 2}, (0, 0)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 1}, (0, 99)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 0}, (99, 99)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": None}, (0, 0)),
        ("qwen2", {"sliding_window": "absent", "use_sliding_window": True, "max_window_layers": 1}, (0, 4096)),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, (0, 0)),
        ("qwen3", {"sliding_window": 99, "layer_types": ["full_attention"] * 3}, (0, 0, 0)),
        ("qwen3", {"sliding_window": 99, "layer_types": ["sliding_attention", *["full_attention"] * 2]}, (99, 0, 0)),
        ("gemma2", {"sliding_window": 99, "hidden_act": "absent"}, (99, 0)),
        ("ministral", {"sliding_window": 99}, (99, 99)),
        ("qwen2_moe", {**QWEN2_MOE, "max_window_layers": 2}, (99, 0, 0)),
        ("qwen2_moe", {**QWEN2_MOE, "max_window_layers": 3}, (99, 0, 99)),
        ("qwen2_moe", {**QWEN2_MOE, "max_window_layers": 0}, (0, 0, 0)),
        ("qwen2_moe", {**QWEN2_MOE, "use_sliding_window": False}, (0, 0, 0)),
        ("dots1", {**ALL["dots1"], "sliding_window": 99, "max_window_layers": 0}, (99, 99, 99)),
    ],
)
def test_a_sliding_window_counts_only_where_the_family_uses_it(family, overrides, windows):
    assert a_config(family, **overrides).windows == windows


def test_windows_as_long_as_the_exported_length_are_full_attention():
    model = a_config("mistral", sliding_window=99)
    assert model.for_length(100).windows == (99, 99)
    assert model.for_length(99).windows == (0, 0)


def test_old_and_new_rope_keys_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = a_config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = a_config(rope_theta="absent", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    np.testing.assert_array_equal(old.rope.inv_freq, new.rope.inv_freq)
    assert not np.array_equal(old.rope.inv_freq, a_config(rope_theta=5e5).rope.inv_freq)


def test_the_original_length_beside_the_scaling_has_precedence():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    beside = a_config("qwen2", rope_scaling=scaling, original_max_position_embeddings=512)
    within = a_config("qwen2", rope_scaling={**scaling, "original_max_position_embeddings": 512})
    assert beside.max_position_embeddings == within.max_position_embeddings == 2048
    np.testing.assert_array_equal(beside.rope.inv_freq, within.rope.inv_freq)


def test_scaled_positions_reach_further_than_the_key_says():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert a_config("qwen2", rope_scaling=yarn).max_position_embeddings == 4096


def test_dual_chunk_attention_limits_the_length_to_what_needs_none():
    chunks = {"chunk_size": 512, "local_size": 16, "original_max_position_embeddings": 512}
    plain, dual = a_config("qwen2"), a_config("qwen2", dual_chunk_attention_config=chunks)
    assert (plain.max_position_embeddings, dual.max_position_embeddings) == (1024, 512)
    np.testing.assert_array_equal(dual.rope.inv_freq, plain.rope.inv_freq)
    with pytest.raises(ModelError, match="original_max_position_embeddings is missing"):
        a_config("qwen2", dual_chunk_attention_config={"chunk_size": 512})


def test_defaults_are_those_of_transformers():
    config = a_config(
        "qwen3", head_dim=None, num_key_value_heads="absent", rms_norm_eps="absent", tie_word_embeddings="absent"
    )
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (128, 4, 1e-6)
    assert not config.tied_embeddings
    own = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    config = a_config("ernie4_5", **dict.fromkeys(own, "absent"))
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (128, 2, 1e-5)
    assert config.rope.inv_freq[-1] == pytest.approx(500000 ** (-126 / 128)) and config.tied_embeddings


@pytest.mark.parametrize(
    ("family", "defaults"),
    [
        *((family, {"num_key_value_heads": 8}) for family in ("mistral_window", "ministral", "mixtral", "seed_oss")),
        *((family, {"num_key_value_heads": 4}) for family in ("gemma2", "gemma3_text", "smollm3", "qwen3_moe")),
        *((family, {"num_key_value_heads": 2}) for family in ("glm", "glm4", "internlm3", "starcoder2", "qwen3_next")),
        *((family, {"num_key_value_heads": 8}) for family in ("gpt_oss", "minimax_m2", "glm4_moe", "qwen2_5_vl")),
        ("qwen3_5_text", {"num_key_value_heads": 4}),
        ("gemma", {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}),
        ("gemma3_text", {"vocab_size": 262208}),
        ("ministral3", {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
        ("qwen2_5_vl", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}),
        ("mixtral", {"rope_theta": 1e6}),
        ("exaone4", {"sliding_window": 4096}),
        ("deepseek_v2", {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4, "n_routed_experts": 256, "num_experts_per_tok": 8}),
        ("deepseek_v3", {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1}),
        ("deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": 1536, "moe_intermediate_size": 2048}),
        ("glm4_moe_lite", {"norm_topk_prob": True, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}),
        ("glm4_moe_lite", {"first_k_dense_replace": 1, "mlp_layer_types": None, "num_experts_per_tok": 4}),
        ("mistral4", {"norm_topk_prob": True, "n_routed_experts": 128, "n_shared_experts": 1, "q_lora_rank": 1024}),
        ("mistral4", {"rope_parameters": {**YARN, "factor": 128.0, "original_max_position_embeddings": 8192}}),
    ],
)
def test_missing_keys_have_the_defaults_that_transformers_has(family, defaults):
    given = config_of(family, hidden_size=256, num_attention_heads=16, text_config={}) | defaults
    if "vision_config" in given:
        given["vision_config"] = given["vision_config"] | {"out_hidden_size": 256}
    missing = {name: value for name, value in given.items() if name not in defaults}
    assert repr(read_model(missing)) == repr(read_model(given))


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [
        ("qwen3_moe", "num_experts", "num_local_experts"),
        ("mixtral", "num_local_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts", "num_experts"),
    ],
)
def test_the_number_of_experts_is_found_under_each_of_its_names(family, name, other):
    renamed = a_config(family, **ALL[family] | {name: "absent", other: ALL[family][name]})
    assert renamed.mixture == a_config(family, **ALL[family]).mixture


def test_released_configs_name_the_routing_of_dots1_and_the_one_expert_of_hunyuan():
    dots = ALL["dots1"]
    assert a_config("dots1", **dots, scoring_func="noaux_tc").mixture == a_config("dots1", **dots).mixture
    with pytest.raises(ModelError, match="scoring_func is 'softmax', supported is 'sigmoid'"):
        a_config("dots1", **dots, scoring_func="softmax")
    assert a_config("hunyuan_v1_dense", num_experts=1).mixture is None


def test_a_model_without_windows_needs_no_pattern_of_windows():
    config = a_config("exaone4", sliding_window=None, sliding_window_pattern=0)  # as transformers writes it
    assert config.windows == (0, 0) and not config.has_windows


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_attention_bias_adds_the_biases_of_all_projections(family):
    network = read_model(config_of(family, attention_bias=True)).network(Shard(FLOAT32, "float32", block_size=64))
    tensors = {part.tensor for weight in weights_of(network).values() for part in weight.parts}
    assert {f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkvo"} <= tensors


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},  # MiniMax-M2
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}},  # an older ModelOpt
    ],
)
def test_released_configs_of_8_bit_floats_are_read(quantization):
    a_config(quantization_config=quantization)
    assert is_fp8({"quantization_config": quantization})
