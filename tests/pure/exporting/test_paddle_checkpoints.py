"""A checkpoint in Paddle's format gives the same graph as the one of transformers, or is refused in a sentence."""

import json
import pickle
import shutil

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_bf16
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.graph import load
from engine.models.config import MTP_GRAPH
from engine.models.config_fields import ModelError
from engine.models.paddle_checkpoint import TransposedTensor
from engine.models.stored_tensors import ConcatenatedTensor
from tests.checkpoints import make_checkpoint
from tests.family_checkpoints import make_checkpoint as make_family
from tests.mtp_checkpoints import make_mtp_checkpoint
from tests.paddle_checkpoints import make_paddle_checkpoint, quantize


def params_of(source, out, num_ranks=1, **options):
    export(source, out, ExportOptions(num_ranks=num_ranks, **options), lambda step: None)
    return [load(out, rank)[1] for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "given", "files", "options"),
    [
        ("ernie4_5", {}, "model.safetensors", {}),
        ("ernie4_5", {"num_key_value_heads": 4, "use_bias": False}, "model.safetensors", {"num_ranks": 2}),
        ("ernie4_5", {"tie_word_embeddings": False, "use_bias": False}, "model_state.pdparams", {}),
        ("ernie4_5", {"torch_dtype": "bfloat16"}, "shards", {"quant_type": "weight_only_int8"}),
        ("ernie4_5_moe", {}, "model.safetensors", {"num_ranks": 2}),
        ("llama", {}, "model.safetensors", {"num_ranks": 2}),
        ("qwen2", {}, "model_state.pdparams", {}),
    ],
)
def test_every_number_of_the_checkpoint_is_found_again(family, given, files, options, tmp_path):  # noqa: PLR0913
    make = make_family if family == "ernie4_5_moe" else make_checkpoint
    checkpoint = make(tmp_path / "checkpoint", family, **given)
    in_paddle = make_paddle_checkpoint(checkpoint, tmp_path / "paddle", files, torch_dtype=None)
    wanted = params_of(checkpoint, tmp_path / "wanted", **options)
    found = params_of(in_paddle, tmp_path / "found", **options)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.slow
def test_the_mtp_layer_of_ernie_is_found_again(tmp_path):
    checkpoint = make_mtp_checkpoint(tmp_path / "checkpoint", "ernie4_5_moe")
    in_paddle = make_paddle_checkpoint(checkpoint, tmp_path / "paddle")
    for source, out in ((checkpoint, "wanted"), (in_paddle, "found")):
        export(source, tmp_path / out, ExportOptions(mtp=True), lambda step: None)
    wanted, found = (load(tmp_path / out, name=MTP_GRAPH)[1] for out in ("wanted", "found"))
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_keys_that_are_left_out_have_paddles_defaults(tmp_path):
    given = {"head_dim": 16, "rope_theta": 10000.0, "num_key_value_heads": 4, "tie_word_embeddings": False}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "ernie4_5", **given)
    left_out = dict.fromkeys([*given, "rms_norm_eps"])
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    in_paddle = make_paddle_checkpoint(checkpoint, tmp_path / "paddle")
    config = json.loads((in_paddle / "config.json").read_text())
    (in_paddle / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - left_out.keys()}))
    [wanted] = params_of(checkpoint, tmp_path / "wanted")
    [found] = params_of(in_paddle, tmp_path / "found")
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    made = json.loads((tmp_path / "found/config.json").read_text())
    assert {key: made[key] for key in given} == given
    assert made["rms_norm_eps"] == 1e-6


SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Return a folder quantized as by FastDeploy, and its twin in floats with the numbers that the codes stand for."""
    folder = tmp_path_factory.mktemp("fastdeploy")
    plain = make_paddle_checkpoint(make_checkpoint(folder / "checkpoint", "ernie4_5", **SIZES), folder / "plain")
    coded = make_paddle_checkpoint(folder / "checkpoint", folder / "coded")
    values = quantize(coded, {"self_attn": "wint8", "mlp": "wint4"}, quantization="mix_quant", dense_quant_type="wint8")
    tensors = load_file(plain / "model.safetensors") | {name: each.astype("f") for name, each in values.items()}
    save_file(tensors, plain / "model.safetensors")
    return coded, plain


@pytest.mark.slow
def test_matrices_that_fastdeploy_has_quantized_keep_their_numbers(quantized, tmp_path):
    coded, plain = quantized
    [found], [wanted] = params_of(coded, tmp_path / "found"), params_of(plain, tmp_path / "wanted", dtype="float32")
    kinds = {name: array.dtype for name, array in found.items() if f"{name}_scale" in found}
    assert {kind.name for kind in kinds.values()} == {"int8", "uint8"}
    for name, kind in kinds.items():
        codes, scale = found[name], found[f"{name}_scale"]
        if kind == np.uint8:
            scale = np.repeat(from_bf16(scale), 64, axis=1)
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(scale.shape).astype(np.int8) - 8
        values = codes * scale.reshape(len(codes), -1)
        if name in wanted:
            np.testing.assert_allclose(values, wanted[name], rtol=2**-7, atol=1e-6, err_msg=name)
    assert sum(name in wanted for name in kinds) >= 8


@pytest.mark.slow
def test_ranks_share_matrices_that_fastdeploy_has_quantized(quantized, tmp_path):
    assert len(params_of(quantized[0], tmp_path / "out", num_ranks=2)) == 2


@pytest.mark.parametrize(
    ("config", "left_out", "message"),
    [
        ({"quantization": "w4a8"}, "", "quantization of FastDeploy is 'w4a8'"),
        ({"quantization": "mix_quant", "moe_quant_type": "w4a8"}, "", "moe_quant_type of FastDeploy is 'w4a8'"),
        ({"quantization": "wint8"}, "weight_scale", r"o_proj\.weight_scale is missing"),
        ({"quantization": "wint8"}, "quant_weight", r"o_proj\.quant_weight is missing"),
    ],
)
def test_other_quantizations_of_fastdeploy_are_refused(quantized, config, left_out, message, tmp_path):  # noqa: PLR0913
    broken = tmp_path / "broken"
    shutil.copytree(quantized[0], broken)
    keys = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(keys | {"quantization_config": config}))
    tensors = load_file(broken / "model.safetensors")
    tensors.pop(f"ernie.layers.0.self_attn.o_proj.{left_out}", None)
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        params_of(broken, tmp_path / "out")


def test_any_part_of_a_turned_matrix_is_read():
    matrix = np.arange(60).reshape(5, 12)
    turned = TransposedTensor(ConcatenatedTensor((matrix.astype(np.float32),)), ((0, 2), (6, 8), (9, 12)))
    whole = matrix[:, [0, 1, 6, 7, 9, 10, 11]].T
    assert turned.get_shape() == [7, 5]
    for start in range(8):
        for stop in range(8):
            np.testing.assert_array_equal(turned[start:stop, 1:4], whole[start:stop, 1:4])


def test_a_change_of_a_pdparams_file_is_a_new_export(tmp_path, no_paddle):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "ernie4_5")
    in_paddle = make_paddle_checkpoint(checkpoint, tmp_path / "paddle", "model_state.pdparams")
    first = export_cached(in_paddle, tmp_path / "cache", ExportOptions(), lambda step: None)
    make_paddle_checkpoint(
        make_checkpoint(tmp_path / "other", "ernie4_5", seed=1), tmp_path / "b", "model_state.pdparams"
    )
    (tmp_path / "b/model_state.pdparams").rename(in_paddle / "model_state.pdparams")
    assert export_cached(in_paddle, tmp_path / "cache", ExportOptions(), lambda step: None) != first


class Runs:
    """A pickled call of a function."""

    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"ernie.embed_tokens.weight": Runs()}), r"it asks for builtins\.print, only arrays are loaded"),
        (b"", "cannot be read"),
        (pickle.dumps([1, 2]), "no dictionary of whole tensors"),
        (pickle.dumps({"UnpackBigParamInfor@@": {}}), r"save it with paddle\.save\(\.\.\., protocol=4\)"),
        (pickle.dumps({"a": np.zeros(2)}), "a has dtype float64, supported are float32"),
        (pickle.dumps({"a": 7}), "a is a int, tensors are supported"),
    ],
)
def test_a_pdparams_file_that_is_no_dictionary_of_tensors_is_refused(content, message, tmp_path, capsys):
    in_paddle = make_paddle_checkpoint(make_checkpoint(tmp_path / "checkpoint", "ernie4_5"), tmp_path / "paddle")
    (in_paddle / "model.safetensors").unlink()
    (in_paddle / "model_state.pdparams").write_bytes(content)
    with pytest.raises(ModelError, match=r"model_state\.pdparams.*" + message):
        params_of(in_paddle, tmp_path / "out")
    assert "must not run" not in capsys.readouterr().out


def test_a_nested_tensor_with_its_name_is_read(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "ernie4_5")
    in_paddle = make_paddle_checkpoint(checkpoint, tmp_path / "paddle", "model_state.pdparams")
    state = paddle.load(str(in_paddle / "model_state.pdparams"), return_numpy=True)
    named = {name: ("a_name", array) for name, array in state.items()}
    (in_paddle / "model_state.pdparams").write_bytes(pickle.dumps(named))
    [found], [wanted] = params_of(in_paddle, tmp_path / "found"), params_of(checkpoint, tmp_path / "wanted")
    np.testing.assert_array_equal(found["norm.weight"], wanted["norm.weight"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"compression_ratio": 2.0}, r"compression_ratio is 2\.0, supported is 1"),
        ({"model_type": "ernie4_5_moe"}, "moe_k is missing, which checkpoints in Paddle's format need"),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 3},
            "outputs are not the queries, keys and values of 3 heads",
        ),
    ],
)
def test_settings_that_would_be_computed_differently_are_refused(keys, message, tmp_path):
    in_paddle = make_paddle_checkpoint(make_checkpoint(tmp_path / "checkpoint", "ernie4_5"), tmp_path / "paddle")
    config = json.loads((in_paddle / "config.json").read_text())
    (in_paddle / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(ModelError, match=message):
        params_of(in_paddle, tmp_path / "out")


def test_fused_matrices_of_llama_are_refused_with_the_way_to_save_it(tmp_path):
    in_paddle = make_paddle_checkpoint(make_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "paddle")
    tensors = load_file(in_paddle / "model.safetensors")
    tensors["llama.layers.0.self_attn.qkv_proj.weight"] = tensors.pop("llama.layers.0.self_attn.q_proj.weight")
    save_file(tensors, in_paddle / "model.safetensors")
    with pytest.raises(ModelError, match="save the checkpoint with fuse_attention_qkv=False"):
        params_of(in_paddle, tmp_path / "out")


def test_a_head_with_a_bias_is_refused(tmp_path):
    in_paddle = make_paddle_checkpoint(make_checkpoint(tmp_path / "checkpoint", "ernie4_5"), tmp_path / "paddle")
    tensors = load_file(in_paddle / "model.safetensors")
    save_file(tensors | {"lm_head.bias": np.zeros(320, np.float32)}, in_paddle / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor lm_head\.bias, for which this model type has no place"):
        params_of(in_paddle, tmp_path / "out")
