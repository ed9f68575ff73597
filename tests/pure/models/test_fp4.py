"""Checkpoints of 4-bit floats stand for the numbers that their published formulas give."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.dtypes import from_mxfp4
from engine.exporting.export import ExportOptions, export
from engine.graph import load
from engine.models.config_fields import ModelError
from engine.models.fp4 import with_fp4
from engine.models.quantization import is_fp8
from engine.models.stored_tensors import ConcatenatedTensor
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import compressed

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
RNG = np.random.default_rng(0)


def mxfp4(codes):
    """Return values, and their tensors as compressed-tensors stores MXFP4: with an exponent for 32 elements."""
    exponents = RNG.integers(118, 124, (len(codes), codes.shape[1] // 32), np.uint8)
    values = np.ldexp(E2M1[codes], np.repeat(exponents.astype(np.int32) - 127, 32, axis=1))
    return values, {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": exponents}


def nvfp4(codes, names=("weight", "weight_scale_2"), inverse=False):
    """Return values, and their tensors in NVFP4: with an 8-bit float for 16 elements, and a factor or, if `inverse`, a
    divisor for the matrix."""
    scale = RNG.uniform(8, 400, (len(codes), codes.shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    total = np.float32(2**12 if inverse else 2**-12)
    values = E2M1[codes] * np.repeat(scale.astype(np.float32), 16, axis=1) * np.float32(2**-12)
    return values, {names[0]: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, names[1]: total.reshape(1)}


def floats(layout):
    config = compressed(4, layout)
    config["config_groups"]["group_0"]["weights"] |= {"type": "float"}
    return config


GLOBAL = ("weight_packed", "weight_global_scale")
KINDS = {
    "modelopt": (MODELOPT, nvfp4),
    "nvfp4": (
        floats("nvfp4-pack-quantized"),
        lambda codes: nvfp4(codes, ("weight_packed", "weight_global_scale"), True),
    ),
    "mxfp4": (floats("mxfp4-pack-quantized"), mxfp4),
}
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(params=KINDS)
def checkpoints(request, tmp_path):
    """Return a checkpoint of 4-bit floats and one with the same numbers as float32."""
    config, write = KINDS[request.param]
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    quantized = make_checkpoint(tmp_path / "quantized", "qwen3", **SIZES, quantization_config=config)
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in numbers.items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            numbers[name], parts = write(RNG.integers(0, 16, tensor.shape, np.uint8))
            stored |= {f"{layer}{end}": array for end, array in parts.items()}
            stored[f"{layer}input_scale"] = np.ones(1, np.float32)
        else:
            stored[name] = tensor
    stored["model.layers.0.self_attn.k_proj.k_scale"] = np.ones(1, np.float32)
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    return quantized, plain, config


def test_numbers_of_4_bit_floats_are_kept(checkpoints, tmp_path):
    quantized, plain, config = checkpoints
    messages = []
    export(quantized, tmp_path / "found", ExportOptions("bfloat16"), messages.append)
    export(plain, tmp_path / "wanted", ExportOptions("bfloat16"))
    found, wanted = (load(tmp_path / name)[1] for name in ("found", "wanted"))
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    assert not is_fp8({"quantization_config": config})
    assert any("the KV cache has the dtype" in message for message in messages) == ("quant_algo" in config)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.zeros((160, 1), np.uint8), r"a.weight_packed of 160 x 64 4-bit floats has scales of .* \(160, 1\)"),
        (None, "a.weight_packed has 4-bit floats, but no a.weight_scale"),
    ],
)
def test_other_scales_are_refused(scale, message):
    tensors = {"a.weight_packed": ConcatenatedTensor((np.zeros((160, 32), np.uint8),))}
    tensors |= {} if scale is None else {"a.weight_scale": ConcatenatedTensor((scale,))}
    with pytest.raises(ModelError, match=message):
        with_fp4(tensors)


def test_blocks_of_mxfp4_are_read_with_any_leading_axes():
    codes = RNG.integers(0, 16, (3, 5, 2, 32), np.uint8)
    scales = RNG.integers(100, 140, (3, 5, 2), np.uint8)
    values = from_mxfp4(codes[..., ::2] | codes[..., 1::2] << 4, scales)
    wanted = np.ldexp(E2M1[codes], scales.astype(np.int32)[..., None] - 127)
    np.testing.assert_array_equal(values, wanted.reshape(3, 5, 64))
