"""The ops of mixtures of experts: every instruction set against the numpy definition, rows that are independent."""

import numpy as np
import pytest

from engine.dtypes import MXFP4_GROUP, to_bf16
from engine.ops import cpu, reference
from engine.ops.cpu.calls import Packed
from engine.ops.cpu.kernels import BF16_OPS
from tests.pure.ops.test_cpu import OF_FEW_BITS, assert_close, random, weight_inputs
from tests.pure.ops.test_invariance import assert_rows_are_independent

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())

FORMATS = ["linear", "linear bf16", "linear_fp8", "linear_mxfp4", *OF_FEW_BITS]
WIDENED = ("linear_fp8", "linear_mxfp4")
SILU = {"activation": 0, "limit": 0.0, "alpha": 1.0, "offset": 0.0}
CLAMPED = {"activation": 0, "limit": 3.0, "alpha": 1.702, "offset": 1.0}
GELU = {"activation": 1, "limit": 0.0, "alpha": 1.0, "offset": 0.0}
PLAIN_ROUTE = {"top_k": 4, "scoring": 0, "num_groups": 1, "top_groups": 1, "group_best": 1}
PLAIN_ROUTE |= {"renormalize": 0, "epsilon": 0.0, "minimum": 0.0, "factor": 1.0, "first_expert": 0}


def stored(format, num_rows, width):
    if format in OF_FEW_BITS:
        return weight_inputs(format, num_rows, width)
    if format == "linear_fp8":
        numbers = np.random.default_rng(width).integers(0, 256, (num_rows, width), np.int32).astype(np.uint8)
        return numbers & 0x77, random(num_rows, 1, seed=1, scale=0.01)
    if format == "linear_mxfp4":
        rng = np.random.default_rng(width)
        codes, exponents = rng.integers(0, 256, (num_rows, width // 2)), rng.integers(116, 124, (num_rows, width // 32))
        return codes.astype(np.uint8), exponents.astype(np.uint8)
    weight = random(num_rows, width, seed=1)
    return (to_bf16(weight) if "bf16" in format else weight,)


def chosen(num_tokens, num_experts, top_k):
    """Return ids of different experts for each token."""
    rng = np.random.default_rng(num_tokens)
    ids = [rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]
    return np.array(ids, np.int32).reshape(num_tokens, top_k)


def op_of(kind, format):
    return f"expert_{kind}{format.split()[0].removeprefix('linear')}"


SHAPES = [(0, 4, 2, 64, 32), (1, 4, 2, 64, 32), (3, 5, 2, 130, 33), (7, 3, 3, 1300, 20), (700, 4, 2, 96, 48)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "num_experts", "top_k", "hidden", "inner"), SHAPES)
def test_experts_match_reference(isa, format, rows, num_experts, top_k, hidden, inner):  # noqa: PLR0913
    ids, is_odd = chosen(rows, num_experts, top_k), inner % 2 == 1
    if format == "linear_mxfp4":
        hidden, inner = (each + -each % MXFP4_GROUP for each in (hidden, inner))
    x, factors = random(rows, hidden, scale=0.1), random(rows, top_k, seed=4)
    act = {"num_experts": num_experts, **(CLAMPED if is_odd else GELU if top_k == 3 else SILU)}
    bias = random(num_experts * 2 * inner, seed=2) if is_odd else None
    inputs, name = (x, ids, *stored(format, num_experts * 2 * inner, hidden), bias), op_of("gate_up", format)
    assert_close(getattr(cpu.load(isa), name)(*inputs, **act), getattr(reference, name)(*inputs, **act), 3e-6)
    h, bias = random(rows, top_k * inner), random(num_experts * hidden, seed=2) if is_odd else None
    inputs, name = (h, ids, factors, *stored(format, num_experts * hidden, inner), bias), op_of("down", format)
    given = {"num_experts": num_experts}
    assert_close(getattr(cpu.load(isa), name)(*inputs, **given), getattr(reference, name)(*inputs, **given), 3e-6)


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in ("linear", *WIDENED)])
@pytest.mark.parametrize(("hidden", "inner"), [(70, 33), (130, 96)])
def test_packed_matrices_of_experts_are_the_same_to_the_bit(isa, format, hidden, inner):
    """Executors pack each matrix by itself."""
    ops, num_experts = cpu.load(isa), 5
    ids, factors = chosen(9, num_experts, 3), random(9, 3, seed=4)
    for kind, inputs, num_rows, width, given in (
        ("gate_up", (random(9, hidden), ids), 2 * inner, hidden, SILU),
        ("down", (random(9, 3 * inner), ids, factors), hidden, inner, {}),
    ):
        weights = stored(format, num_experts * num_rows, width)
        packed = [_packed(ops, op_of(kind, format), each, num_experts, kind) for each in weights]
        op = getattr(ops, op_of(kind, format))
        expected = op(*inputs, *weights, num_experts=num_experts, **given)
        assert np.array_equal(op(*inputs, *packed, num_experts=num_experts, **given), expected)


def _packed(ops, op, rows, num_experts, kind):
    if rows is None or rows.dtype == np.float32:
        return rows
    num_matrices = num_experts * (2 if kind == "gate_up" else 1)
    size = ops.packed_bytes(op, rows.shape, rows.itemsize, num_matrices)
    if not size:
        assert op in BF16_OPS
        return rows
    into = np.full(max(size, rows.nbytes), 255, np.uint8)
    ops.pack(op, rows, into, num_matrices)
    return into[: rows.nbytes].view(rows.dtype).reshape(rows.shape).view(Packed)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("format", ["linear", "linear bf16", *OF_FEW_BITS])
def test_rows_of_experts_are_independent(isa, format, num_threads):
    """All rows together compute gates and what they multiply at once, few rows the matrices one after the other."""
    ops, before = cpu.load(isa), cpu.num_threads()
    gate_up, down = stored(format, 6 * 2 * 40, 130), stored(format, 6 * 130, 40)
    ids, factors = chosen(250, 6, 2), random(250, 2, seed=4)

    def experts(columns):
        """Return the experts' outputs of the tokens in the first column."""
        tokens = columns[:, 0].astype(np.int32)
        own, x = np.ascontiguousarray(ids[tokens]), np.ascontiguousarray(columns[:, 1:])
        h = getattr(ops, op_of("gate_up", format))(x, own, *gate_up, num_experts=6, **SILU)
        weights = np.ascontiguousarray(factors[tokens])
        return getattr(ops, op_of("down", format))(h, own, weights, *down, num_experts=6)

    cpu.set_num_threads(num_threads)
    try:
        numbers = np.arange(250, dtype=np.float32)[:, None]
        assert_rows_are_independent(experts, np.concatenate([numbers, random(250, 130)], axis=1))
    finally:
        cpu.set_num_threads(before)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 60])
def test_slots_of_experts_of_other_ranks_add_nothing(isa, format, rows):
    """Two ranks compute together what one with all experts does. Some tokens have no expert of the first rank."""
    hidden, inner = (96, 64) if format == "linear_mxfp4" else (70, 33)
    (ids, factors), x = (chosen(rows, 5, 2), random(rows, 2, seed=4)), random(rows, hidden, scale=0.1)
    up = (*stored(format, 5 * 2 * inner, hidden), random(5 * 2 * inner, seed=2))
    down = (*stored(format, 5 * hidden, inner), random(5 * hidden, seed=2))

    def part(ops, first, end):
        own, given = ids - np.int32(first), {"num_experts": end - first}
        stacks = [[each if each is None else np.split(each, 5)[first:end] for each in stack] for stack in (up, down)]
        up_part, down_part = ([each and np.concatenate(each) for each in stack] for stack in stacks)
        h = getattr(ops, op_of("gate_up", format))(x, own, *up_part, **given, **CLAMPED).reshape(rows, 2, inner)
        h[(own < 0) | (own >= end - first)] = np.nan  # slots of other ranks have no values
        return getattr(ops, op_of("down", format))(h.reshape(rows, -1), own, factors, *down_part, **given)

    for ops in (cpu.load(isa), reference):
        parts = part(ops, 0, 2), part(ops, 2, 5)
        assert_close(parts[0] + parts[1], part(ops, 0, 5), 3e-6)
        assert not parts[0][(ids >= 2).all(axis=1)].any()


ROUTES = {
    "softmax": {"renormalize": 1},
    "sigmoid in groups by the sum of two": {
        **{"scoring": 1, "num_groups": 8, "top_groups": 3, "group_best": 2},
        **{"renormalize": 1, "epsilon": 1e-20, "factor": 2.5},
    },
    "softmax in groups by the largest": {"num_groups": 4, "top_groups": 2, "minimum": 0.5, "renormalize": 1},
    "softmax of the chosen, and the first expert of a rank": {"scoring": 2, "first_expert": 20},
}


@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("route", ROUTES)
def test_routes_match_reference(isa, route, rows):
    given, is_biased = PLAIN_ROUTE | ROUTES[route], "groups" in route
    x, weight = random(rows, 50), random(32, 50, seed=1)
    bias, choice_bias = random(32, seed=2), random(32, seed=3) - 1 if is_biased else None
    ids, weights = cpu.load(isa).moe_route(x, weight, bias, choice_bias, **given)
    expected_ids, expected = reference.moe_route(x, weight, bias, choice_bias, **given)
    assert np.array_equal(ids, expected_ids)
    assert_close(weights, expected, 1e-6)


def test_equal_scores_go_to_the_lower_id_and_nan_chooses_experts_that_exist(isa):
    for ops in (cpu.load(isa), reference):
        x, weight = np.float32([[1], [np.nan]]), np.float32([[1], [2], [2], [0], [2], [1]])
        ids, weights = ops.moe_route(x, weight, **PLAIN_ROUTE)
        assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
        assert np.isnan(weights[1]).all() and np.isfinite(weights[0]).all()
        groups = {"num_groups": 3, "top_groups": 2, "group_best": 2, "top_k": 3}
        ids, _ = ops.moe_route(x[:1], weight, **PLAIN_ROUTE | groups)
        assert ids.tolist() == [[1, 4, 0]]  # of groups with 3, 2 and 3


def test_gated_additions_match_reference(isa):
    inputs = random(5, 37), random(5, 37, seed=1), random(5, 50, seed=2), random(1, 50, seed=3)
    assert_close(cpu.load(isa).add_gated(*inputs), reference.add_gated(*inputs), 1e-6)
