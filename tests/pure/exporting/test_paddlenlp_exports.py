"""Tests of exports of PaddleNLP: they are served like the checkpoint that they were made of, or refused with a
sentence.
"""

import json
import shutil

import numpy as np
import pytest

from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.paddle_packed import PaddlePacked
from server_scripts import model_source
from tests.checkpoints import make_checkpoint
from tests.family_checkpoints import make_checkpoint as make_family
from tests.paddlenlp_exports import SIZES, make_export
from tests.quantized_checkpoints import numbers_of

pytestmark = pytest.mark.slow

INT8, INT4 = "weight_only_int8", "weight_only_int4"
MIXED = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": make_checkpoint(folder / "llama", "llama", num_hidden_layers=11, torch_dtype="float16"),
        "qwen2": make_checkpoint(folder / "qwen2", "qwen2", **SIZES, torch_dtype="float16"),
        "odd": make_checkpoint(folder / "odd", "qwen2_untied", **SIZES, vocab_size=321, torch_dtype="bfloat16"),
        "mixtral": make_family(folder / "mixtral", "mixtral", **MIXED),
        "qwen2_moe": make_family(
            folder / "qwen2_moe", "qwen2_moe", **MIXED, moe_intermediate_size=128, shared_expert_intermediate_size=256
        ),
    }


@pytest.fixture(scope="module")
def an_export(checkpoints, tmp_path_factory):
    """Do not write into it."""
    return make_export(checkpoints["qwen2"], tmp_path_factory.mktemp("exports") / "int8", 2, INT8)


def params_of(directory, num_ranks=1):
    return [load(directory, rank)[1] for rank in range(num_ranks)]


def graph_of(source, out, **options):
    export(source, out, ExportOptions(**options), lambda step: None)
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "theirs", "ours", "how"),
    [
        ("llama", 1, 1, {}),  # its layer 10 comes before its layer 2
        ("qwen2", 2, 1, {"suffix": ".pdmodel"}),
        ("odd", 2, 4, {"dtype": "bfloat16"}),  # a vocabulary that ranks cannot share
        ("mixtral", 2, 1, {"dtype": "float32"}),
        ("qwen2_moe", 1, 2, {"dtype": "float32"}),
    ],
)
def test_every_number_of_the_checkpoint_is_found_again(family, theirs, ours, how, checkpoints, tmp_path):  # noqa: PLR0913
    exported = make_export(checkpoints[family], tmp_path / "theirs", theirs, **how)
    found = params_of(graph_of(exported, tmp_path / "found", num_ranks=ours), ours)
    wanted = params_of(graph_of(checkpoints[family], tmp_path / "wanted", num_ranks=ours), ours)
    for of_rank, expected in zip(found, wanted, strict=True):
        assert of_rank.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(of_rank[name], array, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("quant", "theirs", "ours", "how"),
    [
        (INT8, 1, 1, {"arch": 75}),
        (INT8, 2, 2, {"arch": 80, "suffix": ".pdmodel"}),
        (INT8, 2, 4, {"arch": 90}),
        (INT8, 4, 2, {"arch": 90}),
        (INT4, 1, 1, {"arch": 75}),
        (INT4, 2, 1, {"arch": 90}),
        (INT4, 2, 2, {"arch": 86}),
    ],
)
def test_codes_are_those_that_paddle_made(quant, theirs, ours, how, checkpoints, tmp_path):  # noqa: PLR0913
    """The error of each code is at most half a step, and the steps are Paddle's: nothing was quantized again, except
    where one row has the scales of two of its ranks.
    """
    exported = make_export(checkpoints["qwen2"], tmp_path / "theirs", theirs, quant, **how)
    graph = graph_of(exported, tmp_path / "found", num_ranks=ours)
    assert Manifest.read(graph).weight_format == quant
    plain = graph_of(checkpoints["qwen2"], tmp_path / "wanted", num_ranks=ours, dtype="float32")
    for of_rank, wanted in zip(params_of(graph, ours), params_of(plain, ours), strict=True):
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            name = f"layers.1.{name}.weight"
            numbers = numbers_of(of_rank, name)[:, : wanted[name].shape[1]]
            step = np.abs(wanted[name]).max(axis=1, keepdims=True) / (127 if quant == INT8 else 7)
            off = 0.56 + (0.5 if quant == INT8 and theirs > ours else 0)  # their scales are float16, ours of int4 bf16
            off *= 2 if ours > theirs else 1  # a share of a row may have a smaller step than the row
            assert (np.abs(numbers - wanted[name]) <= off * step).all(), name
            if ours == theirs:
                largest = np.abs(numbers).max(axis=1, keepdims=True)
                np.testing.assert_allclose(largest, np.abs(wanted[name]).max(axis=1, keepdims=True), rtol=0.01)


@pytest.mark.parametrize(("family", "quant", "theirs"), [("mixtral", INT4, 2), ("qwen2_moe", INT8, 1)])
def test_codes_of_experts_are_those_that_paddle_made(family, quant, theirs, checkpoints, tmp_path):
    exported = make_export(checkpoints[family], tmp_path / "theirs", theirs, quant)
    graph = graph_of(exported, tmp_path / "found", num_ranks=theirs)
    plain = graph_of(checkpoints[family], tmp_path / "wanted", num_ranks=theirs, dtype="float32")
    for of_rank, wanted in zip(params_of(graph, theirs), params_of(plain, theirs), strict=True):
        names = [name for name in wanted if name.startswith("layers.1.experts.") or "shared_expert" in name]
        assert len(names) > 1
        for name in names:
            step = np.abs(wanted[name]).max(axis=1, keepdims=True) / (127 if quant == INT8 else 7)
            assert (np.abs(numbers_of(of_rank, name) - wanted[name]) <= 0.56 * step).all(), name


def test_the_cache_has_what_start_server_asks_for_and_makes_it_once(checkpoints, tmp_path, monkeypatch):
    exported = make_export(checkpoints["qwen2"], tmp_path / "theirs", static_cache=True)
    graph = model_source.export(exported, tmp_path / "cache")
    model = Manifest.read(graph)
    assert (model.max_seq_len, model.graph().caches[0].dtype) == (512, "int8")
    assert json.loads((graph / "config.json").read_text())["tie_word_embeddings"] is True
    monkeypatch.setattr("engine.exporting.cache.export", None)
    assert export_cached(exported, tmp_path / "cache", ExportOptions()) == graph


def test_rows_can_be_read_from_any_to_any():
    packed = PaddlePacked(np.arange(2 * 64 * 8 // 2, dtype=np.uint16).astype(np.uint8), 4, (8, 128))
    whole = packed[slice(0, 8), slice(0, 128)]
    np.testing.assert_array_equal(packed[slice(3, 7), slice(5, 9)], whole[3:7, 5:9])
    with pytest.raises(ModelError, match="rows 2 to 8 cut those that are interleaved, 4 at a time"):
        packed.rows(2, 8)


def set_keys(**keys):
    def change(directory):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def in_programs(old, new, ranks=(0, 1)):
    def change(directory):
        for rank in ranks:
            path = directory / f"rank_{rank}/model.json"
            path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_keys(model_type="bloom"),
            "export of 'bloom', a family that is not supported: serve a model of one that is, llama, mistral",
        ),
        (set_keys(model_type="deepseek_v3_mtp"), "of a draft model: serve the model that it drafts for"),
        (set_keys(model_type=["llama"]), r"export of \['llama'\], a family that is not supported"),
        (set_keys(model_type="deepseek_v4"), "export of 'deepseek_v4', a family that is not supported"),
        (
            set_keys(model_type="mistral"),
            "only those of llama, qwen2, mixtral, qwen2_moe are read: start the server with the checkpoint that",
        ),
        (
            set_keys(quant_type="a8w8"),
            "quant_type 'a8w8', read are none, weight_only_int8, weight_only_int4: .* and QUANT_TYPE=a8w8$",
        ),
        (set_keys(quant_type="a8w8c8"), "and QUANT_TYPE=a8w8, USE_CACHE_KV_INT8=1$"),
        (set_keys(quant_type="a8w8_fp8"), "and QUANT_TYPE=a8w8_fp8$"),
        (set_keys(quant_type=["int8"]), r"quant_type \['int8'\], read are none"),
        # what config.json does not say, the names of the parameters do
        (in_programs("fuseqwen2.", "fusedeepseek_v2."), "rank_0/model.json is a PaddleNLP export of 'deepseek_v2'"),
        (in_programs("qkv_weight_scale", "qkv_out_scale"), "rank_0/model.json .* quant_type 'a8w8'"),
        (in_programs("ffn1_weight", "ffn1_0_weight"), "rank_0/model.json .* quant_type 'a8w8_fp8'"),
        (set_keys(use_fake_parameter=True), "has use_fake_parameter, its scales stand for none: start the server with"),
        (set_keys(num_attention_heads=9), r"qkv_bias: 256 rows cannot be 3 matrices in the ratio of \(9, 4, 4\)"),
        (lambda d: shutil.rmtree(d / "rank_1"), "has the files of 1 ranks, its config.json speaks of 2"),
        (lambda d: (d / "rank_1/model.json").unlink(), "model.pdiparams has neither model.json nor model.pdmodel"),
        (lambda d: (d / "rank_1/model.json").write_text("{}"), "model.json is not a program that Paddle has saved"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (
            in_programs('"D": 80', '"D": 70', [1]),
            "rank_1/model.json: .* for GPUs of arch 70, supported are 75 and above: export it on such a GPU, or start",
        ),
        (in_programs('"x"', '"pre_caches_0"', [1]), "begins with a prefix that lies outside of it"),
        (in_programs("ffn2_weight", "gate_weight", [1]), "its ranks have different parameters"),
        (in_programs("fuseqwen2.1.ln_scale", "zzz_1.w_0"), "it is a second model.norm.weight"),
        (
            in_programs("fuseqwen2.1.ln_scale", "fuseqwen2.1.linear_shift"),
            "linear_shift: it is not one of those of a Llama",
        ),
        (
            in_programs("out_proj_weight_scale", "out_proj_wide_scale"),
            "out_proj_weight: it has 8-bit numbers without scales",
        ),
    ],
)
def test_unsupported_configurations_are_refused_in_a_sentence(change, message, an_export, tmp_path):
    directory = shutil.copytree(an_export, tmp_path / "theirs")
    change(directory)
    with pytest.raises(ModelError, match=message):
        export(directory, tmp_path / "out", ExportOptions())
