"""Exports with matrices of 8 and 4 bits, or a cache of 8: what is stored, and that all ways to run them agree."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.dtypes import from_bf16
from engine.exporting.__main__ import main
from engine.exporting.export import QUANT_TYPES, ExportOptions, export
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.formats import without_cache
from engine.ops import cpu, reference
from engine.ops.reference import int4_values
from engine.settings.config import Config
from server_scripts.model_source import export_dtype
from tests.golden_arrays import golden
from tests.paged_model import PagedModel
from tests.pure.models.test_ranks import answers_of_ranks

pytestmark = pytest.mark.slow

QUANTIZED = [name for name in QUANT_TYPES[1:] if name != "mxfp4"]  # a format of experts alone
# Of a logit on average, as a share of their standard deviation: the random models of 64 channels forgive little.
LARGEST_ERROR = {
    "weight_only_int8": 0.04,
    "weight_only_int4": 0.36,
    "weight_only_int4_g32": 0.3,
    "a8w8": 0.045,
    "weight_only_fp8": 0.12,
    "a8w8_fp8": 0.2,
    "block_wise_fp8": 0.2,
    "a8w8_fp8_wint4": 0.36,
}
# Matrices with 4 bits and those with 8-bit floats. The second family has a dense layer and an expert of all tokens.
MIXED = {
    "qwen2": ({"gate_up_proj", "down_proj"}, {"qkv_proj", "o_proj"}),
    "glm4_moe": (
        {"experts.gate_up_proj", "experts.down_proj"},
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "shared_gate_up_proj", "shared_experts.down_proj"},
    ),
}
each_type = pytest.mark.parametrize("quant_type", QUANTIZED)


def error_of(found: np.ndarray, wanted: np.ndarray) -> float:
    return np.abs(found[-len(wanted) :] - wanted).mean() / wanted.std()


def logits_of(model: PagedModel, prompt: list[int], chunk: int = 1000, num_logits: int = 20) -> np.ndarray:
    return model.prefill(prompt, chunk=chunk, num_logits=num_logits)


@pytest.mark.sampled(3)
@each_type
@pytest.mark.parametrize("family", ["qwen2", "llama3", "qwen3", "ernie4_5"])
def test_logits_are_near_those_of_transformers(family, quant_type, exported):
    expected = golden(family)
    found = logits_of(PagedModel.of(exported(family, quant_type=quant_type), cpu), expected["prompt_65"].tolist())
    assert error_of(found, expected["logits_65"][-20:]) < LARGEST_ERROR[quant_type]


@each_type
def test_numpy_kernels_and_paddle_compute_the_same(quant_type, exported):
    directory, prompt = exported("qwen2", quant_type=quant_type), golden("qwen2")["prompt_65"].tolist()
    of_kernels = logits_of(PagedModel.of(directory, cpu), prompt)
    np.testing.assert_array_equal(logits_of(PagedModel.through_paddle(directory), prompt), of_kernels)
    defined = logits_of(PagedModel.of(directory, reference), prompt)
    # Sums of another order round an activation the other way now and then, which changes an 8-bit float by up to an
    # eighth. Rows without such an activation have to agree.
    rounds_to_fp8 = quant_type.startswith("a8w8") and "fp8" in quant_type
    assert error_of(of_kernels, defined) < (0.01 if rounds_to_fp8 else 0.003)
    assert np.quantile(np.abs(of_kernels - defined).mean(axis=-1), 0.25) < 1e-4 * defined.std()


@pytest.mark.sampled(3)
@each_type
def test_chunks_of_a_prompt_change_no_bit(quant_type, exported):
    model, prompt = partial(PagedModel.of, exported("qwen2", quant_type=quant_type), cpu), list(range(3, 133))
    together = logits_of(model(), prompt)
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(logits_of(model(), prompt, chunk, 1)[-1], together[-1])


@pytest.mark.sampled(3)
@each_type
def test_ranks_agree_and_are_near_one_rank(quant_type, exported):
    expected = golden("qwen2")
    ranks = answers_of_ranks(exported("qwen2", quant_type=quant_type, num_ranks=2), 2, expected["prompt_65"].tolist())
    np.testing.assert_array_equal(ranks[0][0], ranks[1][0])
    assert error_of(ranks[0][0], expected["logits_65"]) < LARGEST_ERROR[quant_type]


def test_matrices_are_quantized_and_nothing_else(exported, checkpoint):
    graph, params = load(exported("qwen2", quant_type="weight_only_int4"))
    dtypes = {name: value.dtype for name, value in graph.parameters.items()}
    assert dtypes["embed_tokens.weight"] == dtypes["layers.0.qkv_proj.bias"] == dtypes["norm.weight"] == "float32"
    assert {dtypes[f"layers.0.{name}_proj.weight"] for name in ("qkv", "o", "gate_up", "down")} == {"uint8"}
    down, scale = (params[f"layers.1.down_proj.{name}"] for name in ("weight", "weight_scale"))
    wanted = load_file(checkpoint("qwen2") / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    error = from_bf16(int4_values(down, scale))[:, : wanted.shape[1]] - wanted
    assert np.square(error).mean() < 0.012 * np.square(wanted).mean()


@pytest.mark.parametrize("quant_type", [name for name in QUANTIZED if "fp8" not in name])
@pytest.mark.parametrize(
    ("family", "table"), [("qwen2", "model.embed_tokens.weight"), ("qwen2_untied", "lm_head.weight")]
)
def test_logits_come_from_eight_bits_of_the_tied_table_or_their_own(family, table, quant_type, exported, checkpoint):  # noqa: PLR0913
    directory = exported(family, quant_type=quant_type)
    graph, params = load(directory)
    head, scale = params["lm_head.weight"], params["lm_head.weight_scale"]
    assert head.dtype == np.int8 and graph.nodes[-1].op == "linear_int8"
    wanted = load_file(checkpoint(family) / "model.safetensors")[table]
    assert (np.abs(head * scale[:, None] - wanted) <= 0.51 * scale[:, None]).all()


@pytest.mark.parametrize("family", MIXED)
def test_experts_or_mlps_have_four_bits_and_the_rest_eight_bit_floats(family, exported):
    params = load(exported(family, quant_type="a8w8_fp8_wint4"))[1]
    scales = {name.split(".", 2)[2]: array.dtype for name, array in params.items() if name.endswith(".weight_scale")}
    for dtype, names in zip((np.uint16, np.float32), MIXED[family], strict=True):  # bf16 of int4, f32 of fp8
        assert {name.removesuffix(".weight_scale") for name, found in scales.items() if found == dtype} == names


@each_type
def test_an_export_says_how_its_weights_are_stored(quant_type, exported):
    directory = exported("qwen2", quant_type=quant_type)
    assert Manifest.read(directory).weight_format == quant_type
    assert Manifest.read(directory).graph().caches[0].dtype == "float32"
    keys = json.loads((directory / "config.json").read_text())
    assert (keys["infer_model_dtype"], keys["infer_model_quant_type"]) == ("float32", quant_type)


def test_the_command_quantizes(a_checkpoint, tmp_path):
    options = ["--quant-type", "weight_only_int8", "--dtype", "bfloat16", "--int8-cache"]
    assert main([str(a_checkpoint), str(tmp_path / "out"), *options]) == 0
    assert Manifest.read(tmp_path / "out").graph().caches[0].dtype == "int8"
    assert Manifest.read(tmp_path / "out").weight_format == "weight_only_int8"
    assert load(tmp_path / "out")[1]["embed_tokens.weight"].dtype == np.uint16


def test_an_unknown_quantization_is_refused_with_the_list_of_the_known(a_checkpoint, tmp_path):
    known = "none, weight_only_int8, weight_only_int4, weight_only_int4_g32, a8w8, .*a8w8_fp8_wint4, mxfp4$"
    with pytest.raises(ModelError, match=f"quant_type is 'int3', supported are {known}"):
        export(a_checkpoint, tmp_path / "out", ExportOptions(quant_type="int3"))


def test_quant_type_has_the_types_of_the_export_and_those_with_an_8_bit_cache():
    [choices] = [f.metadata["setting"].choices for f in Config.__dataclass_fields__.values() if f.name == "quant_type"]
    assert choices[: len(QUANT_TYPES)] == QUANT_TYPES
    assert all(without_cache(name)[0] in QUANT_TYPES and "c8" in name for name in choices[len(QUANT_TYPES) :])


# ---- a KV cache of 8 bits ----


@pytest.fixture(scope="module")
def int8_cache(exported):
    return exported("qwen2", int8_cache=True)


def test_a_cache_of_bytes_has_a_scale_for_each_key_and_value(int8_cache):
    model = Manifest.read(int8_cache)
    assert model.weight_format == "float32"
    assert {(cache.dtype, cache.shape) for cache in model.graph().caches} == {("int8", (-1, 2, 2, 64, 16 + 2))}
    keys = json.loads((int8_cache / "config.json").read_text())
    assert (keys["infer_model_cachekv_int8_type"], keys["infer_model_dtype"]) == ("dynamic", "float32")


def test_a_cache_of_bytes_keeps_logits_near_those_of_transformers(int8_cache):
    expected = golden("qwen2")
    prompt, wanted = expected["prompt_200"].tolist(), expected["logits_200"][-20:]
    model = PagedModel.of(int8_cache, cpu)
    assert 0 < error_of(model.prefill(prompt, chunk=50, num_logits=len(wanted)), wanted) < 0.03


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit_with_a_cache_of_bytes(int8_cache, chunk):
    prompt = list(range(3, 133))
    together = logits_of(PagedModel.of(int8_cache, cpu), prompt, num_logits=1)
    np.testing.assert_array_equal(logits_of(PagedModel.of(int8_cache, cpu), prompt, chunk, 1)[-1], together[-1])


def test_a_cache_of_bytes_is_the_same_in_paddle(int8_cache):
    prompt = golden("qwen2")["prompt_65"].tolist()
    of_kernels = logits_of(PagedModel.of(int8_cache, cpu), prompt)
    np.testing.assert_array_equal(logits_of(PagedModel.through_paddle(int8_cache), prompt), of_kernels)


@pytest.mark.parametrize(
    ("quant", "stored"),
    [
        (None, ("auto", "none")),
        ("bfloat16", ("bfloat16", "none")),
        ("weight_only_int4", ("auto", "weight_only_int4")),
        ("a8w8c8_fp8", ("auto", "a8w8c8_fp8")),
    ],
)
def test_the_third_part_of_a_name_says_how_weights_are_stored(quant, stored):
    assert export_dtype(quant, Config()) == stored


@pytest.mark.parametrize(("quant_type", "stored"), [("a8w8c8", "a8w8"), ("a8w8c8_fp8", "a8w8_fp8")])
def test_c8_in_a_quantization_asks_for_an_int8_cache(quant_type, stored, a_checkpoint):
    options = options_of(Config(quant_type=quant_type, device="cpu"), a_checkpoint)
    assert (options.quant_type, options.int8_cache) == (stored, True)
