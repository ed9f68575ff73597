"""Experts that a checkpoint stacks in one tensor are read as one matrix per expert and projection."""

import ml_dtypes
import numpy as np

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
