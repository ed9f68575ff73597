"""Experts of 4-bit floats with powers of two (MXFP4) keep their values in an export, as gpt-oss is released."""

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_bf16, from_mxfp4
from engine.executors.cpu.program import CpuProgram, allocated
from engine.exporting.export import ExportOptions, export
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.quantize import to_mxfp4
from engine.settings.config import Config
from tests.checkpoints import make_checkpoint as make_dense
from tests.family_checkpoints import make_checkpoint
from tests.pure.exporting.test_quantized_checkpoints import PROMPT, inputs_of

pytestmark = pytest.mark.slow
STACKS = [f"layers.1.experts.{name}.weight" for name in ("gate_up_proj", "down_proj")]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return a checkpoint of gpt-oss with experts in MXFP4."""
    config = {"intermediate_size": 96, "quantization_config": {"quant_method": "mxfp4"}}
    directory = make_checkpoint(tmp_path_factory.mktemp("gpt-oss"), "gpt_oss", **config)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        matrices = tensors.pop(name).astype(np.float32).swapaxes(1, 2)
        codes, scales = to_mxfp4(matrices.reshape(-1, matrices.shape[2]))
        tensors[f"{name}_blocks"] = codes.reshape(*matrices.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = scales.reshape(*matrices.shape[:2], -1)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_values_of_the_checkpoint_are_kept(released, tmp_path, num_ranks):
    """Two ranks have 64 and 32 of the 96 columns of an expert, the second padded with zeros."""
    export(released, tmp_path / "kept", ExportOptions("bfloat16", "mxfp4", num_ranks=num_ranks))
    export(released, tmp_path / "wide", ExportOptions("bfloat16"))
    assert Manifest.read(tmp_path / "kept").weight_format == "mxfp4"
    wanted = load(tmp_path / "wide")[1]
    of_ranks = [load(tmp_path / "kept", rank)[1] for rank in range(num_ranks)]
    assert of_ranks[0]["layers.1.qkv_proj.weight"].dtype == np.uint16  # bfloat16
    gate_up, down = ([from_mxfp4(each[name], each[f"{name}_scale"]) for each in of_ranks] for name in STACKS)
    np.testing.assert_array_equal(np.concatenate(down, axis=1)[:, :96], from_bf16(wanted[STACKS[1]]))
    assert all(each.shape[1] % 32 == 0 for each in down)
    whole = np.concatenate([each.reshape(6, 2, -1, each.shape[1]) for each in gate_up], axis=2)[:, :, :96]
    np.testing.assert_array_equal(whole.reshape(wanted[STACKS[0]].shape), from_bf16(wanted[STACKS[0]]))


def test_a_cpu_computes_with_the_numbers_that_they_stand_for(released, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    logits = []
    for quant_type in ("mxfp4", "none"):
        export(released, tmp_path / quant_type, ExportOptions("bfloat16", quant_type))
        program = CpuProgram(*load(tmp_path / quant_type))
        specs = Manifest.read(tmp_path / quant_type).graph().caches
        program.set_caches({spec.name: allocated(spec.shape_of(2), spec.dtype) for spec in specs})
        inputs = inputs_of(PROMPT[:40]) | {"block_tables_1": np.ones((1, 1), np.int32)}
        logits.append(program.run(inputs)["logits"].copy())
    np.testing.assert_array_equal(*logits)
    assert "matrices of 8-bit or 4-bit floats become bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "gpu"}, "mxfp4"),
        ({"device": "cpu"}, "none"),
        ({"device": "gpu", "batch_invariant": True}, "none"),
        ({"device": "gpu", "dtype": "bfloat16"}, "none"),
        ({"device": "gpu", "quant_type": "weight_only_int4"}, "weight_only_int4"),
    ],
)
def test_they_stay_so_on_a_gpu_unless_something_else_is_asked_for(settings, expected, released, monkeypatch):
    monkeypatch.setattr("engine.exporting.export_options.with_device", lambda config: config)
    assert options_of(Config(**settings), released).quant_type == expected


def test_a_model_without_experts_is_refused(tmp_path):
    dense = make_dense(tmp_path / "dense", "qwen2")
    with pytest.raises(ModelError, match="quant_type is 'mxfp4', a format of experts, but the model has none"):
        export(dense, tmp_path / "out", ExportOptions(quant_type="mxfp4"))
