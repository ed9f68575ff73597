"""The ops of vision networks against the numpy definition, for every instruction set this machine has."""

import numpy as np
import pytest

from engine.ops import cpu, reference
from tests.pure.ops.test_cpu import assert_close, random

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())

# Heads, their size, and the ends of segments: single rows, whole pieces and tiles of 96 rows, an empty segment
SHAPES = [
    (1, 2, [1]),
    (2, 72, [97, 97, 300]),
    (3, 80, [64, 128, 129, 257]),
    (1, 64, [384]),
    (2, 6, [13, 140]),
]


def attention_inputs(num_heads: int, head_dim: int, ends: list[int]):
    num_rows, rotary_dim = ends[-1], max(2, head_dim // 2 // 2 * 2)
    angles = np.random.default_rng(1).uniform(0, 6, (num_rows, rotary_dim // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return random(num_rows, 3 * num_heads * head_dim), cos_sin, np.array(ends, np.int32)


@pytest.mark.parametrize(("is_bf16", "tolerance"), [(0, 2e-6), (1, 1e-3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_bidirectional_attention_matches_reference(isa, shape, is_bf16, tolerance):
    inputs, (num_heads, head_dim, _) = attention_inputs(*shape), shape
    attributes = {"num_heads": num_heads, "scale": 2 * head_dim**-0.5, "is_bf16": is_bf16}
    found = cpu.load(isa).bidirectional_attention(*inputs, **attributes)
    assert_close(found, reference.bidirectional_attention(*inputs, **attributes), tolerance)


@pytest.mark.parametrize("is_bf16", [0, 1])
def test_a_segment_depends_on_no_other_and_not_on_threads(isa, is_bf16):
    qkv, cos_sin, ends = attention_inputs(2, 72, [40, 300, 420])
    attributes = {"num_heads": 2, "scale": 0.2, "is_bf16": is_bf16}
    before, found = cpu.num_threads(), []
    for num_threads in (1, 3):
        cpu.set_num_threads(num_threads)
        found.append(cpu.load(isa).bidirectional_attention(qkv, cos_sin, ends, **attributes))
    alone = cpu.load(isa).bidirectional_attention(
        qkv[40:300].copy(), cos_sin[40:300].copy(), ends[:1] * 0 + 260, **attributes
    )
    cpu.set_num_threads(before)
    assert np.array_equal(found[0], found[1]) and np.array_equal(alone, found[0][40:300])


@pytest.mark.parametrize("is_bf16", [0, 1])
def test_large_scores_of_attention_do_not_overflow(isa, is_bf16):
    qkv, cos_sin, ends = attention_inputs(1, 16, [200])
    attributes = {"num_heads": 1, "scale": 1e4, "is_bf16": is_bf16}
    found = cpu.load(isa).bidirectional_attention(qkv, cos_sin, ends, **attributes)
    values = qkv[:, 32:]
    assert np.isfinite(found).all() and np.abs(found).max() <= np.abs(values).max() * 1.01


@pytest.mark.parametrize(("rows", "cols", "taps"), [(1, 1, 1), (7, 33, 4), (100, 1152, 4)])
def test_interpolate_rows_matches_reference(isa, rows, cols, taps):
    rng = np.random.default_rng(0)
    inputs = random(9, cols), rng.integers(0, 9, (rows, taps), np.int32), random(rows, taps, seed=1)
    assert_close(cpu.load(isa).interpolate_rows(*inputs), reference.interpolate_rows(*inputs), 1e-6)


@pytest.mark.parametrize(("rows", "cols", "count"), [(1, 1, 1), (8, 33, 4), (40, 1031, 2)])
def test_concat_rows_matches_reference(isa, rows, cols, count):
    x, picked = random(rows, cols), np.random.default_rng(0).integers(0, rows, (5, count), np.int32)
    assert np.array_equal(cpu.load(isa).concat_rows(x, picked), reference.concat_rows(x, picked))


def test_gelu_erf_matches_reference(isa):
    x = np.concatenate([np.linspace(-12, 12, 1999), [0, -0.0, 1e-30, -1e9, 1e9]]).astype(np.float32).reshape(4, -1)
    found, expected = cpu.load(isa).gelu_erf(x), reference.gelu_erf(x)
    assert np.abs(found - expected)[np.abs(x) < 100].max() < 2e-6
    assert_close(found, expected, 1e-7)
