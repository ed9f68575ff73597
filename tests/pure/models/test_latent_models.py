"""Models with latent attention: their checkpoints as they are released, and what is refused."""

import numpy as np
import pytest

from engine.dtypes import from_fp8, to_bf16
from engine.errors import ConfigError
from engine.exporting import by_settings
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models import support
from engine.models.keys import ModelError
from engine.models.weights import HeadRows, Share
from engine.settings.config import Config
from tests.family_checkpoints import make_checkpoint
from tests.quantized_checkpoints import make_fp8


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


def test_an_int8_cache_is_refused(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "deepseek_v2")
    with pytest.raises(ModelError, match=r"USE_CACHE_KV_INT8.* not supported by models with latent attention"):
        export(checkpoint, tmp_path / "out", ExportOptions(int8_cache=True))


def test_gpus_are_refused_by_the_name_of_the_family(tmp_path, monkeypatch):
    monkeypatch.setattr(by_settings, "with_device", lambda config: config)
    refused = support.FamilySupport("mistral4", "", (support.RUN, support.RUN, support.REFUSED, support.REFUSED))
    monkeypatch.setattr(support, "FAMILIES", (refused,))
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "mistral4")
    with pytest.raises(
        ConfigError, match="model_type is 'mistral4', which has no kernels for GPUs yet; set DEVICE=cpu"
    ):
        by_settings.options_of(Config(device="gpu"), checkpoint)
    assert by_settings.options_of(Config(device="cpu"), checkpoint) == ExportOptions()


def test_rows_of_heads_and_pairs_behind_others_have_the_order_of_the_op():
    matrix = np.arange(2 * 5 * 3).reshape(10, 3)  # two heads of five rows
    assert HeadRows(5, 1, 3).of(matrix).tolist() == matrix[[1, 2, 6, 7]].tolist()
    turned = HeadRows(5, 1, 3, is_turned=True)
    assert turned.of(matrix).tolist() == np.concatenate([matrix[1:3].T, matrix[6:8].T]).tolist()
    assert turned.of(matrix).shape == turned.shape(10, 3)
    assert Share.whole(2).each(6, 4, 1).order().tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 8, 10, 11]
