"""Experts that a checkpoint stacks in one tensor are read as one matrix per expert and projection."""

import ml_dtypes
import numpy as np

from engine.dtypes import from_mxfp4
from engine.models.quantize import to_mxfp4
from engine.models.stacked_experts import with_single_experts


class Array:
    """A tensor in memory."""

    def __init__(self, array):
        self._array = array

    def get_dtype(self):
        return "U8"

    def get_shape(self):
        return list(self._array.shape)

    def __getitem__(self, key):
        return self._array[key]


def test_experts_in_mxfp4_are_read_by_turns_of_gates_and_up_with_their_scales():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2, 6, 64)).astype(np.uint8)
    scales = rng.integers(120, 134, (2, 6, 2)).astype(np.uint8)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(2, 6, 2, 16)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    wanted = values * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
    name = "model.layers.0.mlp.experts"
    tensors = {f"{name}.gate_up_proj_blocks": Array(blocks), f"{name}.gate_up_proj_scales": Array(scales)}
    found = with_single_experts({"model_type": "gpt_oss"}, tensors)
    for expert in range(2):
        for first, projection in enumerate(("gate_proj", "up_proj")):
            stored = found[f"{name}.{expert}.{projection}.weight"]
            assert stored.get_shape() == [3, 64]
            np.testing.assert_array_equal(stored[1:3], wanted[expert, first::2][1:3])


def test_the_experts_of_qwen3_vl_are_read_as_released_and_as_transformers_5_writes_them():
    rng, name = np.random.default_rng(0), "model.layers.0.mlp.experts"
    arrays = {"gate_up_proj": rng.random((2, 6, 8), np.float32), "down_proj": rng.random((2, 8, 3), np.float32)}
    keys = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 8}}
    for turn in ((0, 1, 2), (0, 2, 1)):
        stored = {f"{name}.{end}": Array(array.transpose(turn)) for end, array in arrays.items()}
        found = with_single_experts(keys, stored)
        for expert in range(2):
            gate, up, down = (found[f"{name}.{expert}.{each}_proj.weight"] for each in ("gate", "up", "down"))
            np.testing.assert_array_equal(np.concatenate([gate[...], up[...]]), arrays["gate_up_proj"][expert])
            np.testing.assert_array_equal(down[...], arrays["down_proj"][expert])


def test_values_in_mxfp4_stay_the_same_when_they_are_stored_again():
    """Groups have any of the eight largest numbers, zeros alone, and small and large exponents."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (60, 96)).astype(np.uint8)
    codes[:8, :32] = np.minimum(codes[:8, :32] & 7, np.arange(8)[:, None]) | codes[:8, :32] & 8
    scales = rng.integers(100, 140, (60, 3)).astype(np.uint8)
    scales[8], scales[9] = 4, 250
    values = from_mxfp4(codes[:, ::2] | codes[:, 1::2] << 4, scales)
    found = to_mxfp4(values)
    assert [each.dtype for each in found] == [np.uint8, np.uint8] and found[0].shape == (60, 48)
    np.testing.assert_array_equal(from_mxfp4(*found), values)


def test_other_matrices_are_rounded_to_the_nearest_in_mxfp4():
    matrix = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    codes, scales = to_mxfp4(matrix)
    groups, steps = matrix.reshape(50, 2, 32), 2.0 ** (scales.astype(np.float64) - 127)
    largest = np.abs(groups).max(axis=2) / steps
    assert (4 <= largest).all() and (largest < 8).all()
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    nearest = np.abs(groups[..., None] / steps[..., None, None] - numbers).min(axis=3)
    error = np.abs(from_mxfp4(codes, scales).reshape(groups.shape) - groups) / steps[..., None]
    np.testing.assert_allclose(error, nearest, atol=1e-6)
