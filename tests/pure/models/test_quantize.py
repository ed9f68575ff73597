"""Codes and scales stand for the matrix they were made of, as well as their bits allow."""

import numpy as np
import pytest

from engine.dtypes import FP8_VALUES, from_bf16, from_fp8, to_bf16
from engine.models import checkpoint as checkpoint_module
from engine.models.checkpoint import Checkpoint
from engine.models.formats import FORMATS
from engine.models.quantize import AT_ONCE, pack_int4, to_block_fp8, to_int4, to_int8
from engine.models.weights import AxisShard, TensorShard, Weight
from engine.ops.reference import int4_values


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def values_of_int4(codes, scale, width):
    return from_bf16(int4_values(codes, scale))[:, :width]


def test_an_int8_code_is_half_a_step_from_its_number_at_most():
    matrix = random(37, 300) * random(37, 1)
    codes, scale = to_int8(matrix)
    assert codes.dtype == np.int8 and scale.dtype == np.float32
    assert np.abs(codes).max(axis=1).tolist() == [127] * 37
    assert (np.abs(codes * scale[:, None] - matrix) <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("width", [1, 64, 127, 128, 300])
def test_int4_codes_stand_for_their_numbers(width):
    matrix = random(20, width)
    codes, scale = to_int4(matrix)
    groups = -(-width // 128) * 2
    assert (codes.shape, codes.dtype, scale.shape) == ((20, groups * 32), np.uint8, (20, groups))
    error = values_of_int4(codes, scale, width) - matrix
    assert np.square(error).mean() < 0.011 * np.square(matrix).mean()


def test_int4_is_better_than_rounding_to_the_largest_number():
    matrix = random(50, 1024)
    groups = matrix.reshape(50, 16, 64)
    step = np.abs(groups).max(axis=2, keepdims=True) / 7
    simple = (np.rint(groups / step) * step).reshape(matrix.shape)
    error = np.square(values_of_int4(*to_int4(matrix), 1024) - matrix).sum()
    assert error < 0.85 * np.square(simple - matrix).sum()


def test_numbers_that_lie_on_a_grid_of_int4_are_kept():
    rng = np.random.default_rng(0)
    codes, scale = (
        rng.integers(-8, 8, (9, 3, 64)),
        from_bf16(to_bf16(rng.standard_normal((9, 3, 1)).astype(np.float32))),
    )
    codes[..., 0] = -8  # or a finer grid could hold them
    matrix = (codes * scale).astype(np.float32).reshape(9, 192)
    assert np.array_equal(values_of_int4(*to_int4(matrix), 192), from_bf16(to_bf16(matrix)))


@pytest.mark.parametrize("quantize", [to_int8, to_int4])
def test_zeros_stay_zeros(quantize):
    codes, scale = quantize(np.zeros((3, 70), np.float32))
    values = codes * scale[:, None] if quantize is to_int8 else values_of_int4(codes, scale, 70)
    assert values.shape == (3, 70) and not values.any()


@pytest.mark.parametrize("quantize", [to_int8, to_int4])
def test_a_large_matrix_is_done_in_pieces_of_rows(quantize, monkeypatch):
    matrix = random(50, 130)
    whole = quantize(matrix)
    monkeypatch.setattr("engine.models.quantize.AT_ONCE", 7 * 130)
    assert 7 * 130 < AT_ONCE
    assert all(np.array_equal(a, b) for a, b in zip(quantize(matrix), whole, strict=True))


def test_two_codes_share_a_byte_the_first_in_the_lower_half():
    packed = pack_int4(np.array([[1, 2, 3]], np.uint8))
    assert packed.shape == (1, 64) and packed[0, :3].tolist() == [0x21, 3, 0]


def test_a_block_of_8_bit_floats_has_the_nearest_ones_to_its_elements_and_one_scale():
    matrix = random(300, 200) * random(300, 1)
    numbers, scale = to_block_fp8(matrix)
    assert (numbers.shape, scale.shape, scale.dtype) == ((300, 200), (300, 2), np.float32)
    finite = FP8_VALUES[np.isfinite(FP8_VALUES)]
    for rows in (slice(0, 128), slice(128, 256), slice(256, 300)):
        for group, columns in enumerate((slice(0, 128), slice(128, 200))):
            assert (scale[rows, group] == np.abs(matrix[rows, columns]).max() / np.float32(448)).all()
            divided = (matrix[rows, columns] / scale[rows, group, None]).ravel()
            errors = np.abs(FP8_VALUES[numbers[rows, columns].ravel()] - divided)
            np.testing.assert_array_equal(errors, np.abs(finite[:, None] - divided).min(axis=0))


def test_blocks_of_zeros_stay_zeros():
    assert not from_fp8(*to_block_fp8(np.zeros((130, 140), np.float32))).any()


class Array:
    """A tensor of a checkpoint."""

    def __init__(self, values):
        self.values = values

    def get_shape(self):
        return list(self.values.shape)

    def get_dtype(self):
        return "F32"

    def __getitem__(self, key):
        return self.values[key]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_matrix_that_is_read_in_pieces_has_the_same_blocks(rank, monkeypatch):
    """Blocks begin at the first row and column of a rank's share, whatever these are."""
    matrix, columns = random(400, 300), AxisShard(300, 150 * rank, 150 * rank + 150, 150)
    monkeypatch.setattr(checkpoint_module, "STORED_AT_ONCE", 200 * 150)
    monkeypatch.setattr("engine.models.quantize.AT_ONCE", 100 * 150)
    weight = Weight("w", (TensorShard("w", (AxisShard.whole(400), columns)),), FORMATS["block_wise_fp8"])
    found = Checkpoint({"w": Array(matrix)}).stored(weight)
    monkeypatch.undo()
    wanted = to_block_fp8(matrix[:, columns.start : columns.stop])
    assert all(np.array_equal(*each) for each in zip(found, wanted, strict=True))
