"""Models with latent attention: their checkpoints as they are released, and what is refused."""

import numpy as np
import pytest

from engine.dtypes import from_fp8, to_bf16
from engine.errors import ConfigError
from engine.exporting import export_options
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models import support
from engine.models.config_fields import ModelError
from engine.models.weights import AxisShard, HeadSlice
from engine.ops import cpu
from engine.settings.config import Config
from tests.family_checkpoints import make_checkpoint
from tests.golden_arrays import golden, log_softmax
from tests.paged_model import PagedModel
from tests.pure.models.test_family_goldens import cases
from tests.pure.models.test_ranks import answer, answers_of_ranks
from tests.quantized_checkpoints import make_fp8

INT8_ERROR = 0.15  # of log-probabilities; DTYPE=bfloat16 has as much


@pytest.mark.slow
def test_blocks_of_8_bit_floats_are_read_also_where_rows_are_in_another_order(tmp_path):
    """kv_b_proj, which queries and values are multiplied with, is dequantized."""
    quantized, plain = make_fp8(tmp_path, "a block", family="deepseek_v3")
    export(quantized, tmp_path / "kept", ExportOptions("bfloat16", "weight_only_fp8"))
    export(plain, tmp_path / "wide", ExportOptions("bfloat16"))
    found, wanted = load(tmp_path / "kept")[1], load(tmp_path / "wide")[1]
    assert found["layers.1.key_weight"].shape == (6 * 48, 24)
    for name, array in wanted.items():
        kept = found[name]
        if f"{name}_scale" in found:
            kept = to_bf16(from_fp8(kept, found[f"{name}_scale"]))
        np.testing.assert_array_equal(kept, array, err_msg=name)
    assert {"layers.0.q_b_proj.weight_scale", "layers.0.kv_a_proj_with_mqa.weight_scale"} < found.keys()


def test_the_cache_has_one_row_per_position_on_every_rank(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "deepseek_v2")
    export(checkpoint, tmp_path / "out", ExportOptions("bfloat16", num_ranks=2))
    caches = Manifest.read(tmp_path / "out").graph().caches
    assert {(each.shape, each.dtype) for each in caches} == {((-1, 64, 48 + 16), "bfloat16")}
    assert caches[0].block_bytes == 64 * 64 * 2


@pytest.mark.slow
def test_an_int8_cache_has_a_scale_for_each_64_elements(exported):
    for num_ranks in (1, 2):
        graph_dir = exported("deepseek_v2", int8_cache=True, num_ranks=num_ranks)
        caches = Manifest.read(graph_dir).graph().caches
        assert {(each.shape, each.dtype) for each in caches} == {((-1, 64, 48 + 16 + 2 * 2), "int8")}
        assert caches[0].block_bytes == 64 * 68


def test_an_int8_cache_of_sizes_that_it_cannot_have_is_refused(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "deepseek_v2", kv_lora_rank=46)
    export(checkpoint, tmp_path / "wide", ExportOptions())
    with pytest.raises(ModelError, match=r"kv_lora_rank is 46, with .*USE_CACHE_KV_INT8.* must be a multiple of 4"):
        export(checkpoint, tmp_path / "out", ExportOptions(int8_cache=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v2", "glm4_moe_lite"))],
)
def test_log_probabilities_with_an_int8_cache_are_near_those_of_transformers(family, exported):
    """The likeliest 20 tokens of a position count. The median leaves out positions that choose other experts."""
    graph_dir, errors = exported(family, int8_cache=True), []
    for length, (prompt, _) in cases(family).items():
        wanted = golden(f"families/{family}")[f"logprobs_{length}"]
        found = log_softmax(PagedModel.of(graph_dir, cpu).prefill(prompt, 1000, num_logits=len(wanted)))
        likeliest = np.argsort(wanted, axis=1)[:, -20:]
        errors += list(np.abs(np.take_along_axis(found - wanted, likeliest, axis=1)).mean(axis=1))
    assert 0 < np.median(errors) < INT8_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit_with_an_int8_cache(chunk, exported):
    prompt, graph_dir = list(range(3, 133)), exported("deepseek_v3", int8_cache=True)
    whole, cut = (PagedModel.of(graph_dir, cpu).prefill(prompt, each) for each in (1000, chunk))
    np.testing.assert_array_equal(cut, whole)


@pytest.mark.slow
def test_ranks_have_the_same_int8_cache(exported):
    prompt = list(range(3, 70))
    wanted = answer(PagedModel.of(exported("deepseek_v2", int8_cache=True), cpu), prompt)
    ranks = answers_of_ranks(exported("deepseek_v2", int8_cache=True, num_ranks=2), 2, prompt)
    np.testing.assert_array_equal(ranks[1][0], ranks[0][0])
    assert np.abs(ranks[0][0] - wanted[0]).mean() < 0.1  # codes at a border differ
    assert ranks[0][1][:1] == ranks[1][1][:1] == wanted[1][:1]


def test_gpus_are_refused_by_the_name_of_the_family(tmp_path, monkeypatch):
    monkeypatch.setattr(export_options, "with_device", lambda config: config)
    refused = support.FamilySupport("mistral4", "", (support.RUN, support.RUN, support.REFUSED, support.REFUSED))
    monkeypatch.setattr(support, "FAMILIES", (refused,))
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "mistral4")
    with pytest.raises(
        ConfigError, match="model_type is 'mistral4', which has no kernels for GPUs yet; set DEVICE=cpu"
    ):
        export_options.options_of(Config(device="gpu"), checkpoint)
    assert export_options.options_of(Config(device="cpu"), checkpoint) == ExportOptions()


def test_rows_of_heads_and_pairs_behind_others_have_the_order_of_the_op():
    matrix = np.arange(2 * 5 * 3).reshape(10, 3)  # two heads of five rows
    assert HeadSlice(5, 1, 3).of(matrix).tolist() == matrix[[1, 2, 6, 7]].tolist()
    turned = HeadSlice(5, 1, 3, is_turned=True)
    assert turned.of(matrix).tolist() == np.concatenate([matrix[1:3].T, matrix[6:8].T]).tolist()
    assert turned.of(matrix).shape == turned.shape(10, 3)
    assert AxisShard.whole(2).each(6, 4, 1).order().tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 8, 10, 11]
