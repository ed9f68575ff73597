"""Checkpoints of ModelOpt, whose quantization is described by config.json, by hf_quant_config.json, or by both. The
wanted numbers are those of the formulas of ModelOpt's `to_quantized_weight`."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions, export
from engine.exporting.export_options import options_of
from engine.exporting.manifest import Manifest
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.modelopt import read_config
from engine.models.quantization import is_fp8
from engine.settings import device
from engine.settings.config import Config
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
PRODUCER = {"producer": {"name": "modelopt", "version": "0.29.0"}}
FILE = "hf_quant_config.json"


def fp8(matrix, scale, each):
    codes = (matrix / each).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * each, {"weight": codes, "weight_scale": scale, "input_scale": np.float32([1])}


def of_a_matrix(matrix, rng):
    scale = np.float32(rng.uniform(0.001, 0.01))
    return fp8(matrix, scale.reshape(1), scale)


def of_rows(matrix, rng):
    scale = rng.uniform(0.001, 0.01, len(matrix)).astype(np.float32)
    return fp8(matrix, scale, scale[:, None])


def of_blocks(matrix, rng):
    """Return a matrix with one scale for each block. ModelOpt writes these scales with four axes."""
    rows, columns = (np.arange(size) // 128 for size in matrix.shape)
    scale = rng.uniform(0.001, 0.01, (rows[-1] + 1, 1, columns[-1] + 1, 1)).astype(np.float32)
    return fp8(matrix, scale, scale[:, 0, :, 0][rows[:, None], columns])


def nvfp4(matrix, rng):
    codes = rng.integers(0, 16, matrix.shape, np.uint8)
    scale = rng.uniform(8, 400, (len(codes), codes.shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    total = np.float32(2**-12)
    values = E2M1[codes] * np.repeat(scale.astype(np.float32), 16, axis=1) * total
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return values, {"weight": packed, "weight_scale": scale, "weight_scale_2": total.reshape(1)}


def int8(matrix, rng):
    codes = rng.integers(-128, 128, matrix.shape).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, len(matrix)).astype(np.float32)
    return codes * scale[:, None], {"weight": codes, "weight_scale": scale}


WRITERS = {
    "FP8": of_a_matrix,
    "FP8_PER_CHANNEL_PER_TOKEN": of_rows,
    "fp8_pb_wo": of_blocks,  # in lower case, as ModelOpt writes it
    "NVFP4": nvfp4,
    "W8A16": int8,
}
MIXED = {"self_attn": "FP8", "mlp": "NVFP4"}


def make(directory, writer_of):
    """Make a checkpoint whose config.json says nothing, and one with the same numbers as float32."""
    plain, stored = (make_checkpoint(directory / name, "qwen2", **SIZES) for name in ("plain", "quantized"))
    numbers, tensors, rng = load_file(plain / "model.safetensors"), {}, np.random.default_rng(0)
    for name, tensor in sorted(numbers.items()):
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            numbers[name], parts = writer_of(layer)(tensor, rng)
            tensors |= {f"{layer}{end}": array for end, array in parts.items()}
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.ones(1, np.float32)
    numbers = {name: np.ascontiguousarray(array, np.float32) for name, array in numbers.items()}
    save_file(numbers, plain / "model.safetensors")
    save_file(tensors, stored / "model.safetensors")
    return stored, plain


def describe(checkpoint, quantization):
    (checkpoint / FILE).write_text(json.dumps({**PRODUCER, "quantization": quantization}))
    return checkpoint


def add_to_config(checkpoint, **keys):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": keys}))


def mixed_layers(plain):
    names = [name.removesuffix(".weight") for name in load_file(plain / "model.safetensors")]
    of_part = {name: part for name in names for part in MIXED if f".{part}." in name and name.endswith("_proj")}
    return {name: {"quant_algo": MIXED[part]} for name, part in of_part.items()}


@pytest.fixture(scope="module", params=[*WRITERS, "MIXED_PRECISION"])
def described(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("modelopt")
    if request.param in WRITERS:
        checkpoint, plain = make(directory, lambda layer: WRITERS[request.param])
        layers = {}
    else:
        checkpoint, plain = make(directory, lambda layer: WRITERS[MIXED[layer.split(".")[-3]]])
        layers = {"quantized_layers": mixed_layers(plain)}
    config = {"quant_algo": request.param, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **layers}
    return describe(checkpoint, config), plain, request.param


@pytest.mark.sampled(2)
def test_the_numbers_are_those_that_modelopt_means(described, tmp_path):
    checkpoint, plain, algorithm = described
    messages = []
    export(checkpoint, tmp_path / "found", ExportOptions("bfloat16"), messages.append)
    quant_type = "weight_only_int8" if algorithm == "W8A16" else "none"
    export(plain, tmp_path / "wanted", ExportOptions("bfloat16"))
    found, wanted = (load(tmp_path / name)[1] for name in ("found", "wanted"))
    assert Manifest.read(tmp_path / "found").weight_format == ("bfloat16" if quant_type == "none" else quant_type)
    for name, array in wanted.items():
        if quant_type == "none" or f"{name}_scale" not in found:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert any("the KV cache has the dtype" in message for message in messages)


def test_integers_keep_their_codes(tmp_path):
    checkpoint, plain = make(tmp_path, lambda layer: int8)
    export(describe(checkpoint, {"quant_algo": "W8A16"}), tmp_path / "found", ExportOptions())
    params = load(tmp_path / "found")[1]
    down = "layers.1.down_proj.weight"
    numbers = load_file(plain / "model.safetensors")[f"model.{down.replace('down', 'mlp.down')}"]
    np.testing.assert_array_equal(params[down] * params[f"{down}_scale"][:, None], numbers)


def test_a_gpu_keeps_8_bit_floats_as_the_file_alone_describes_them(described, monkeypatch):
    checkpoint, _, algorithm = described
    is_float = algorithm not in ("NVFP4", "W8A16")
    assert is_fp8(read_config(checkpoint)) == is_float
    monkeypatch.setattr("engine.exporting.export_options.with_device", lambda config: config)
    options = options_of(Config(device=device.GPU), checkpoint)
    assert options.quant_type == ("weight_only_fp8" if is_float else "none")


def test_a_changed_description_is_another_export(tmp_path):
    checkpoint, _ = make(tmp_path, lambda layer: of_rows)
    before = export_cached(checkpoint, tmp_path / "cache", ExportOptions())
    describe(checkpoint, {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"})
    assert export_cached(checkpoint, tmp_path / "cache", ExportOptions()) != before


@pytest.mark.parametrize(
    ("in_file", "in_config", "message"),
    [
        (
            {"quant_algo": "NVFP4"},
            {},
            r"quant_algo is NVFP4, but tensor .*down_proj.weight is stored as FP8_PER_CHANNEL",
        ),
        ({"quant_algo": "FP8"}, {}, "quant_algo is FP8, but tensor .*down_proj.weight is stored as FP8_PER_CHANNEL"),
        ({"quant_algo": "W8A16"}, {}, "quant_algo is W8A16, but tensor"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.norm": {"quant_algo": "FP8"}}},
            {},
            "quant_algo of model.norm is FP8, but tensor model.norm.weight is stored with dtype F32",
        ),
        ({"quant_algo": "MIXED_PRECISION"}, {}, "quantized_layers is missing or empty"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 128}, {}, "quant_algo is 'W4A16_AWQ', supported are FP8, FP8_PER"),
        ({}, {}, "quant_algo is None, supported are"),
        ({"quant_algo": "FP8"}, {"quant_algo": "NVFP4"}, "quant_algo is 'FP8', but config.json: .* is 'NVFP4'"),
        (
            {"quant_algo": "FP8"},
            {"quant_method": "gptq", "bits": 4},
            "quant_method is 'gptq', but there is a hf_quant_config.json",
        ),
        ("FP8", {}, "quantization of ModelOpt|quant_algo is None"),
    ],
)
def test_descriptions_that_contradict_something_are_refused(in_file, in_config, message, tmp_path):
    checkpoint, _ = make(tmp_path, lambda layer: of_rows)
    describe(checkpoint, in_file)
    if in_config:
        add_to_config(checkpoint, **in_config)
    with pytest.raises(ModelError, match=message):
        export(checkpoint, tmp_path / "out", ExportOptions())


def test_both_descriptions_may_say_the_same(tmp_path):
    checkpoint, _ = make(tmp_path, lambda layer: of_rows)
    describe(checkpoint, {"quant_algo": "fp8_per_channel_per_token", "kv_cache_quant_algo": "FP8"})
    add_to_config(checkpoint, quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN", ignore=["lm_head"])
    messages = []
    export(checkpoint, tmp_path / "out", ExportOptions(), messages.append)
    assert any("the KV cache has the dtype" in message for message in messages)
