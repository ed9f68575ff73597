"""The CPU kernels against the numpy definition, for every instruction set this machine has."""

import numpy as np
import pytest

from engine.dtypes import as_f32, from_bf16, to_bf16
from engine.ops import cpu, reference
from engine.ops.cpu.calls import Packed

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())


OF_FEW_BITS = ["linear_int8", "linear_a8w8", "linear_int4", "linear_int4 with zeros"]
OF_FEW_BITS += ["linear_int4 of 32", "linear_int4 of 32 with zeros"]


def random(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def assert_close(found, expected, tolerance):
    """Compare with errors relative to the largest value of the array, because single outputs may be near zero."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert np.abs(found - expected).max(initial=0) <= tolerance * (1 + np.abs(expected).max(initial=0))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (1, 1), (3, 8), (5, 33), (40, 1031)])
def test_embedding_matches_reference(isa, dtype, rows, cols):
    table = random(11, cols) if dtype == "f32" else to_bf16(random(11, cols))
    ids = np.random.default_rng(1).integers(0, 11, rows, dtype=np.int32)
    expected = reference.embedding(ids, table, first_id=0)
    assert np.array_equal(expected, as_f32(table[ids]))
    assert np.array_equal(cpu.load(isa).embedding(ids, table, first_id=0), expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_ids_whose_rows_another_rank_holds_give_zeros(isa, dtype):
    table = random(11, 33) if dtype == "f32" else to_bf16(random(11, 33))
    ids = np.array([7, 0, 4, 5, 10, 2**31 - 1], np.int32)
    for embedding in (reference.embedding, cpu.load(isa).embedding):
        shares = [embedding(ids, table[first:end], first_id=first) for first, end in ((0, 5), (5, 9), (9, 11))]
        assert [share.any(axis=1).nonzero()[0].tolist() for share in shares] == [[1, 2], [0, 3], [4]]
        assert np.array_equal(sum(shares)[:5], as_f32(table[ids[:5]]))


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 8), (7, 33), (40, 1031)])
def test_gather_rows_matches_reference(isa, rows, cols):
    x, picked = random(rows, cols), np.array([rows - 1, 0, 0], np.int32)
    assert np.array_equal(cpu.load(isa).gather_rows(x, picked), x[picked])
    assert cpu.load(isa).gather_rows(x, picked[:0]).shape == (0, cols)


@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (1, 1), (3, 8), (2, 4097), (50, 896)])
def test_norms_match_reference(isa, rows, cols):
    ops, x, residual, weight = cpu.load(isa), random(rows, cols), random(rows, cols, seed=1), random(cols, seed=2)
    assert_close(ops.rms_norm(x, weight, epsilon=1e-5), reference.rms_norm(x, weight, epsilon=1e-5), 1e-6)
    for bias in (None, residual.sum(axis=0)):
        expected = reference.layer_norm(x + 3, weight, bias, epsilon=1e-5)
        assert_close(ops.layer_norm(x + 3, weight, bias, epsilon=1e-5), expected, 1e-6)
    expected, expected_residual = reference.add_rms_norm(x, residual.copy(), weight, epsilon=1e-5)
    y, same = ops.add_rms_norm(x, residual, weight, epsilon=1e-5)
    assert same is residual
    assert np.array_equal(residual, expected_residual)
    assert_close(y, expected, 1e-6)


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), [(1, 1, 1, 2), (3, 4, 2, 10), (40, 14, 2, 64)])
def test_head_norm_matches_reference(isa, rows, heads, kv_heads, dim):
    arrays = random(rows, (heads + 2 * kv_heads) * dim), random(dim, seed=1), random(dim, seed=2)
    attributes = {"num_heads": heads, "num_kv_heads": kv_heads, "epsilon": 1e-6}
    assert_close(cpu.load(isa).head_norm(*arrays, **attributes), reference.head_norm(*arrays, **attributes), 1e-6)


ODD = [(0, 8, 3), (1, 1, 1), (1, 96, 50), (2, 31, 7), (3, 33, 13), (4, 64, 24), (7, 1030, 29), (65, 200, 301)]
IN_CHUNKS = [(1, 1281, 50), (9, 2600, 31), (13, 5000, 25)]  # of K
odd_shapes = pytest.mark.parametrize(("rows", "width", "num_out"), ODD + IN_CHUNKS)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@odd_shapes
def test_linear_matches_reference(isa, rows, width, num_out, dtype):
    x, weight = random(rows, width), random(num_out, width, seed=1)
    weight = to_bf16(weight) if dtype == "bf16" else weight
    given = random(num_out, seed=2) if num_out % 2 else None
    assert_close(cpu.load(isa).linear(x, weight, given), reference.linear(x, weight, given), 1e-6)


@pytest.mark.parametrize("op", OF_FEW_BITS)
@odd_shapes
def test_linear_of_few_bits_matches_reference(isa, rows, width, num_out, op):
    x = random(rows, width) * random(rows, 1, seed=5)  # rows of different size
    inputs = (x, *weight_inputs(op, num_out, width), random(num_out, seed=2) if num_out % 2 else None)
    name = op.split()[0]
    assert_close(getattr(cpu.load(isa), name)(*inputs), getattr(reference, name)(*inputs), 1e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_linear_of_floats_of_eight_bits_matches_reference(isa, groups):
    x, numbers = random(3, 200), np.arange(1000, dtype=np.int32).astype(np.uint8).reshape(5, 200) & 0xF7
    inputs = x, numbers, random(5, groups, seed=1), random(5, seed=2)
    assert_close(cpu.load(isa).linear_fp8(*inputs), reference.linear_fp8(*inputs), 1e-6)
    assert_close(cpu.load(isa).linear_a8w8_fp8(*inputs), reference.linear_a8w8_fp8(*inputs), 1e-6)


@pytest.mark.parametrize("op", OF_FEW_BITS)
def test_a_packed_weight_is_the_same_to_the_bit(isa, op):
    """Executors pack weights; if a weight is not packed, the kernel packs it."""
    ops, name = cpu.load(isa), op.split()[0]
    for rows, width, num_out in [(1, 7, 3), (5, 130, 64), (9, 1030, 150), (2, 2600, 65)]:
        x, bias = random(rows, width), random(num_out, seed=2)
        weight, scale, *zero = weight_inputs(op, num_out, width)
        expected = getattr(ops, name)(x, weight, scale, *zero, bias)
        if name == "linear_int4":
            scale, zero = packed(ops, scale), [each if each is None else packed(ops, each) for each in zero]
        assert np.array_equal(getattr(ops, name)(x, packed(ops, weight), scale, *zero, bias), expected)


def packed(ops, rows):
    into = np.full(ops.packed_bytes("linear_int8", rows.shape, rows.itemsize), 255, np.uint8)
    ops.pack("linear_int8", rows, into)
    return into[: rows.nbytes].view(rows.dtype).reshape(rows.shape).view(Packed)


def weight_inputs(op, num_out, width):
    """Return codes of all values, scales that differ, and zeros or none."""
    rng = np.random.default_rng(width)
    if op in ("linear_int8", "linear_a8w8"):
        return rng.integers(-128, 128, (num_out, width), np.int8), rng.random(num_out, np.float32) * 0.02
    padded = -(-width // 128) * 128
    groups = (num_out, padded // (32 if "of 32" in op else 64))
    codes, scale = rng.integers(0, 256, (num_out, padded // 2), np.uint8), to_bf16(random(*groups, scale=0.2))
    return codes, scale, to_bf16(rng.integers(0, 17, groups).astype(np.float32)) if "zeros" in op else None


def test_bytes_of_activations_are_rounded_to_nearest_even(isa):
    """127 / 254 is half a step: with a weight that is 1 at one place every code is seen."""
    halves = np.array([[254, 1, 3, 5, -1, -3, 253, -253, 0, 2]], np.float32)
    codes = cpu.load(isa).linear_a8w8(halves, np.eye(10, dtype=np.int8), np.full(10, 0.5, np.float32))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 126, -126, 0, 1]]


def test_numbers_of_a_group_are_multiples_of_its_own_step(isa):
    """A step is a 127th of the largest of 64 numbers, so a number that is small compared with other groups is not
    lost.
    """
    ops, x = cpu.load(isa), np.zeros((1, 320), np.float32)
    x[0, [0, 1, 64, 65, 256, 257]] = 127, 0.6, 1.27, 0.006, 3.2512, 0.00016
    for k, expected in [(1, 1), (65, 0.01), (257, 0)]:
        weight = (np.arange(320) == k).astype(np.int8)[None]
        found = ops.linear_int8(x, weight, np.ones(1, np.float32))
        assert found[0, 0] == pytest.approx(expected, abs=1e-6)
        codes = np.full((1, 192), 0x88, np.uint8)
        codes[0, k // 2] += 1 << 4 * (k % 2)
        found = ops.linear_int4(x, codes, to_bf16(np.ones((1, 6), np.float32)))
        assert found[0, 0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_bytes_of_a_row_that_is_not_finite_give_nan_and_zeros_give_zeros(isa, number):
    x, weight = random(3, 40), np.ones((5, 40), np.int8)
    x[1, 7], x[2] = number, 0
    for ops in (cpu.load(isa), reference):
        found = ops.linear_a8w8(x, weight, np.ones(5, np.float32))
        assert np.isnan(found[1]).all() and np.isfinite(found[0]).all() and not found[2].any()


@pytest.mark.parametrize(("rows", "half"), [(1, 1), (5, 7), (300, 32)])
def test_rotary_angles_match_reference(isa, rows, half):
    positions = np.random.default_rng(0).integers(0, 131072, rows, dtype=np.int32)
    inv_freq = (1e6 ** -(np.arange(half) / half)).astype(np.float32)
    arguments = (positions, inv_freq)
    found = cpu.load(isa).rotary_angles(*arguments, attention_scaling=1.5)
    assert_close(found, reference.rotary_angles(*arguments, attention_scaling=1.5), 2e-7)


@pytest.mark.parametrize(("rows", "half"), [(0, 4), (1, 1), (5, 7), (300, 32)])
def test_mrope_angles_match_reference(isa, rows, half):
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 131072, (3, rows), dtype=np.int32)
    inv_freq = (1e6 ** -(np.arange(half) / half)).astype(np.float32)
    axes = rng.integers(0, 3, half, dtype=np.int32)
    arguments = (positions, inv_freq, axes)
    found = cpu.load(isa).mrope_angles(*arguments, attention_scaling=1.5)
    assert_close(found, reference.mrope_angles(*arguments, attention_scaling=1.5), 2e-7)
    equal = np.ascontiguousarray(np.broadcast_to(positions[0], (3, rows)))
    plain = cpu.load(isa).rotary_angles(positions[0], inv_freq, attention_scaling=1.5)
    assert np.array_equal(cpu.load(isa).mrope_angles(equal, inv_freq, axes, attention_scaling=1.5), plain)


@pytest.mark.parametrize(("rows", "cols"), [(0, 3), (1, 1), (5, 33), (40, 1031)])
def test_rows_of_spans_match_the_reference(isa, rows, cols):
    x, ops = random(rows, cols), cpu.load(isa)
    picked, none = np.random.default_rng(0).integers(-1, 4, rows, dtype=np.int32), np.full(rows, -1, np.int32)
    for width in (cols, 3 * cols):
        values = random(4, width)
        assert np.array_equal(ops.replace_rows(x, picked, values), reference.replace_rows(x, picked, values))
        added = ops.add_gathered_rows(x, picked, values, column=width - cols)
        assert np.array_equal(added, reference.add_gathered_rows(x, picked, values, column=width - cols))
        assert np.array_equal(ops.replace_rows(x, none, values[:0]), x)
        assert np.array_equal(ops.add_gathered_rows(x, none, values[:0], column=0), x)


@pytest.mark.parametrize(("rows", "cols"), [(0, 3), (1, 1), (3, 8), (5, 33), (40, 1031)])
def test_swiglu_matches_reference(isa, rows, cols):
    gate_up = random(rows, 2 * cols, scale=4)
    assert_close(cpu.load(isa).swiglu(gate_up), reference.swiglu(gate_up), 1e-6)


@pytest.mark.parametrize(("rows", "cols"), [(0, 2), (1, 2), (3, 8), (5, 34), (40, 1030)])
def test_elementwise_ops_of_families_match_reference(isa, rows, cols):
    ops, x, y = cpu.load(isa), random(rows, cols, scale=3), random(rows, cols)
    for name in ("gelu", "geglu"):
        assert_close(getattr(ops, name)(x), getattr(reference, name)(x), 2e-6)
    assert np.array_equal(ops.relu_squared(x), reference.relu_squared(x))
    assert np.array_equal(ops.add(x, y), x + y)
    assert np.array_equal(ops.scale(x, factor=0.3), reference.scale(x, factor=0.3))
    assert_close(ops.softcap(x, cap=2.0), reference.softcap(x, cap=2.0), 1e-6)


def test_a_soft_cap_survives_large_numbers(isa):
    x = np.float32([[0, -1e-30, 1e30, -1e30, np.inf, -np.inf, np.nan]])
    assert np.array_equal(cpu.load(isa).softcap(x, cap=3.0), np.float32([[0, 0, 3, -3, 3, -3, np.nan]]), equal_nan=True)


def test_squares_of_negative_numbers_are_zero_and_what_is_no_number_stays(isa):
    x = np.float32([[-1, -np.inf, 0, 3, np.inf, np.nan]])
    squares = np.float32([[0, 0, 0, 9, np.inf, np.nan]])
    assert np.array_equal(cpu.load(isa).relu_squared(x), squares, equal_nan=True)


def test_wide_norms_and_rotations_of_heads_match_reference(isa):
    ops, heads = cpu.load(isa), {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10}
    qkv, q_weight, k_weight, cos_sin = random(5, 100), random(60), random(20), random(5, 4)
    sums = reference.square_sums(qkv, **heads)
    assert_close(ops.square_sums(qkv, **heads), sums, 1e-6)
    given = {**heads, "q_size": 120, "k_size": 40, "epsilon": 1e-6}
    expected = reference.wide_norm(qkv, sums, q_weight, k_weight, **given)
    assert_close(ops.wide_norm(qkv, sums, q_weight, k_weight, **given), expected, 1e-6)
    expected = reference.rotate_heads(qkv, cos_sin, **heads)
    assert_close(ops.rotate_heads(qkv, cos_sin, **heads), expected, 1e-6)


def test_swiglu_survives_large_gates(isa):
    gate_up = np.array([[-1e30, -200, -88, -20, 20, 88, 200, 1e30, 3, 3, 3, 3, 3, 3, 3, 3]], np.float32)
    found = cpu.load(isa).swiglu(gate_up)
    assert np.isfinite(found).all()
    assert np.allclose(found[0], [0, 0, -1.6e-36, -1.2366921e-07, 60, 264, 600, 3e30], rtol=1e-5, atol=1e-36)


def test_conversion_to_bf16_rounds_to_nearest_even(isa):
    """Seen through the cache, which holds the values as they were rounded."""
    bits = np.arange(0, 2**32, 65521, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    halfway = ((np.arange(0x3F00, 0x3F80, dtype=np.uint32) << 16) + 0x8000).view(np.float32)
    values = np.concatenate([values, halfway])
    values = np.pad(values, (0, -len(values) % 16)).reshape(-1, 16)
    cache = np.zeros((1, 2, 1, len(values), 16), np.uint16)
    qkv = np.concatenate([np.zeros((len(values), 32), np.float32), values], axis=1)
    batch = (np.array([0, len(values)], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32))
    heads = {"num_heads": 1, "num_kv_heads": 1, "scale": 1.0, "window": 0, "softcap": 0.0}
    cpu.load(isa).paged_attention(qkv, np.zeros((len(values), 0), np.float32), cache, *batch, **heads)
    assert np.array_equal(cache[0, 1, 0], to_bf16(values))
    assert np.all(np.abs(from_bf16(to_bf16(halfway)) - halfway) <= 2.0**-9)
    assert np.all(to_bf16(halfway) % 2 == 0)
