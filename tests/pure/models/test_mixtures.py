"""Mixtures of experts: quantized checkpoints, layers that are left out, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_fp8, to_bf16
from engine.exporting.export import ExportOptions, export
from engine.graph import load
from engine.models import checkpoint as checkpoint_module
from engine.models.adapters import AdapterError, checked
from engine.models.config_fields import ModelError
from engine.models.families import read_model
from engine.models.formats import FORMATS
from engine.models.weights import Shard, weights_of
from tests.family_checkpoints import config_of, make_checkpoint
from tests.lora_adapters import make_adapter
from tests.mixture_checkpoints import MIXTURES
from tests.quantized_checkpoints import change_tensors, make_fp8, make_quantized, numbers_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["awq", "w4a16 of 32", "w8a8"])
def test_the_codes_of_experts_are_kept(kind, tmp_path):
    quantized, plain = make_quantized(tmp_path, kind, "qwen3_moe", moe_intermediate_size=256)
    export(quantized, tmp_path / "kept", ExportOptions("float32"))
    export(plain, tmp_path / "wide", ExportOptions("float32"))
    found, wanted = load(tmp_path / "kept")[1], load(tmp_path / "wide")[1]
    np.testing.assert_array_equal(found["layers.0.router.weight"], wanted["layers.0.router.weight"])
    for name in ("layers.0.experts.gate_up_proj.weight", "layers.2.experts.down_proj.weight"):
        np.testing.assert_allclose(numbers_of(found, name), wanted[name], rtol=2**-7, atol=1e-7)


def test_projections_that_are_grouped_by_key_heads_keep_their_8_bit_floats(tmp_path):
    quantized, plain = make_fp8(tmp_path, "a block", family="qwen3_next")
    export(quantized, tmp_path / "kept", ExportOptions("bfloat16", "weight_only_fp8"))
    export(plain, tmp_path / "wide", ExportOptions("bfloat16"))
    found, wanted = load(tmp_path / "kept")[1], load(tmp_path / "wide")[1]
    for name in ("layers.0.qkv_proj.weight", "layers.0.z_proj.weight", "layers.0.experts.gate_up_proj.weight"):
        np.testing.assert_array_equal(to_bf16(from_fp8(found[name], found[f"{name}_scale"])), wanted[name])
    np.testing.assert_array_equal(found["layers.0.ba_proj.weight"], wanted["layers.0.ba_proj.weight"])


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_are_never_quantized_and_every_rank_has_them_whole(family):
    config = read_model(config_of(family))
    for rank in range(2):
        weights = weights_of(config.network(Shard(FORMATS["weight_only_int4"], "bfloat16", 64, rank, 2)))
        routers = [weight for name, weight in weights.items() if ".router." in name]
        assert routers and {weight.format.name for weight in routers} == {"float32"}
        assert all(axis.size == axis.count for weight in routers for part in weight.parts for axis in part.axes)
        stacks = [weight for name, weight in weights.items() if ".experts." in name and name.endswith(".weight")]
        assert {weight.format.name for weight in stacks} == {"weight_only_int4"}


def test_layers_without_experts_are_those_that_config_json_names():
    layers = {name: read_model(config_of(name)).mixture.layers for name in MIXTURES}
    assert layers["qwen3_moe"] == (True, False, True)
    assert layers["qwen2_moe"] == (False, True, False, True)
    assert layers["qwen3_next"] == (True, True, False, True)
    assert layers["glm4_moe"] == layers["dots1"] == layers["ernie4_5_moe"] == (False, True, True)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method is 'greedy', supported is 'noaux_tc'"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts is -1, it must be a whole number"),
        ("glm4_moe", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1', it must be a positive whole"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', supported is 'sigmoid'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, supported is None"),
        ("ernie4_5_moe", {"moe_layer_end_index": "2"}, "moe_layer_end_index is '2', it must be a whole number"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act is 'sigmoid', supported is 'softmax'"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, it must be a positive whole number"),
    ],
)
def test_a_mixture_that_is_not_computed_is_refused(family, overrides, message):
    with pytest.raises(ModelError, match=f"^config.json: {message}"):
        read_model(config_of(family, **overrides))


@pytest.mark.parametrize(
    ("family", "key", "tensor"),
    [
        ("glm4_moe_lite", "num_nextn_predict_layers", "model.layers.3.eh_proj.weight"),
        ("minimax_m2", "num_mtp_modules", "model.layers.2.eh_proj.weight"),
    ],
)
def test_layers_that_only_draft_are_left_out_if_config_json_has_their_number(family, key, tensor, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family)
    change_tensors(checkpoint, lambda tensors: tensors.update({tensor: np.ones((64, 128)), "mtp.fc": np.ones(2)}))
    with pytest.raises(ModelError, match=f"has tensor {tensor}, for which this model type has no place"):
        export(checkpoint, tmp_path / "refused", ExportOptions())
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 1}))
    export(checkpoint, tmp_path / "out", ExportOptions())
    assert not any(name.startswith(tensor[6:15]) for name in load(tmp_path / "out")[1])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("mlp.experts.3.up_proj", "adapters of experts are not supported"),
        ("linear_attn.in_proj_qkvz", "belongs to a layer that supports no adapters"),
        ("mlp.shared_expert.up_proj", ""),
        ("linear_attn.out_proj", ""),
    ],
)
def test_an_adapter_of_experts_or_grouped_projections_is_refused(module, message, tmp_path, exported, checkpoint):  # noqa: PLR0913
    graph_dir = exported("qwen3_next", block_size=16)
    make_adapter(tmp_path / "adapter", checkpoint("qwen3_next"), 1, target_modules=[module.split(".")[-1]])
    path = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name: each for name, each in load_file(path).items() if f".layers.0.{module}." in name}, path)
    if message:
        with pytest.raises(AdapterError, match=rf"tensor .*layers\.0\.{module}\.lora_A\.weight:? {message}"):
            checked(tmp_path / "adapter", graph_dir, 64)
    else:
        checked(tmp_path / "adapter", graph_dir, 64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("quant_type", ["weight_only_int8", "weight_only_int4", "weight_only_fp8"])
def test_weights_are_quantized_in_pieces_with_the_same_result(quant_type, tmp_path, checkpoint, exported, monkeypatch):  # noqa: PLR0913
    """All matrices of a stack as float32 may be larger than the memory that the quantized model needs."""
    monkeypatch.setattr(checkpoint_module, "STORED_AT_ONCE", 640)
    heights, format = [], FORMATS[quant_type]
    store = type(format).store
    monkeypatch.setattr(type(format), "store", lambda self, matrix: heights.append(len(matrix)) or store(self, matrix))
    export(checkpoint("qwen3_moe"), tmp_path / "out", ExportOptions(quant_type=quant_type, num_ranks=2))
    assert max(heights) == 640 // 20  # columns of the share of an expert's `down`
    for rank in range(2):
        found, wanted = (
            load(tmp_path / "out", rank)[1],
            load(exported("qwen3_moe", quant_type=quant_type, num_ranks=2), rank)[1],
        )
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
