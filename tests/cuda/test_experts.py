"""Mixtures of experts on the GPU: routing and products against their definitions."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from benchmarks.experts_hit import _name, skew  # noqa: E402
from engine.dtypes import (  # noqa: E402
    CODES_PER_SCALE,
    FP8_BLOCK,
    MXFP4_GROUP,
    SMALL_GROUP,
    from_bf16,
    from_fp8,
    from_mxfp4,
    to_bf16,
)
from engine.executors.cuda.program import GraphCall  # noqa: E402
from engine.models.quantize import to_int4, to_int8  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import experts, invariant, mxfp4, routing  # noqa: E402
from engine.ops.cuda.forward_context import forward_pass  # noqa: E402
from tests.cuda.arrays import BF16_STEP, array, assert_close, distance, floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(f"ignore:{what} encountered") for what in ("overflow", "invalid value")]
ROUTE = {
    **{"top_k": 3, "scoring": 0, "num_groups": 1, "top_groups": 1, "group_best": 1, "renormalize": 0},
    **{"epsilon": 0.0, "minimum": 0.0, "factor": 1.0, "first_expert": 0},
}
ROUTES = {
    "softmax": {"renormalize": 1},
    "softmax, not renormalized": {"factor": 2.5, "top_k": 1},
    "sigmoid in groups by two": {"scoring": 1, "num_groups": 4, "top_groups": 2, "group_best": 2, "renormalize": 1},
    "softmax in groups by the largest": {"num_groups": 3, "top_groups": 1, "factor": 16.0, "top_k": 4},
    "softmax of the chosen, and the first expert of a rank": {"scoring": 2, "first_expert": 10},
    "a minimum": {"renormalize": 1, "minimum": 10.0, "epsilon": 1e-20, "scoring": 1},
}
SILU = {"activation": 0, "limit": 0.0, "alpha": 1.0, "offset": 0.0}
GELU, CLAMPED = {**SILU, "activation": 1}, {"activation": 0, "limit": 0.5, "alpha": 1.702, "offset": 1.0}


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("case", ROUTES)
def test_routes_are_those_of_the_definition(device, case):
    """Cases have negative selection biases, equal experts, and tokens without a finite logit."""
    rng = np.random.default_rng(0)
    attributes = {**ROUTE, **ROUTES[case]}
    for num_rows, width in ((1, 40), (21, 300)):
        x, weight, bias = floats(rng, num_rows, width), floats(rng, 24, width), floats(rng, 24)
        weight /= max(1, width / 100)  # for sigmoids that float32 tells apart
        weight[5], bias[5] = weight[2], bias[2]  # a tie
        weight[12:14], bias[12:14] = weight[11], bias[11]
        choice_bias = floats(rng, 24) * 0.2 - 1
        choice_bias[[5, 12, 13]] = choice_bias[[2, 11, 11]]
        for given in ((bias, choice_bias), (None, None)):
            expected_ids, expected = reference.moe_route(x, weight, *given, **attributes)
            found = cuda.moe_route(*[tensor(each, device) for each in (x, weight, *given)], **attributes)
            assert np.array_equal(array(found[0]), expected_ids)
            assert_close(array(found[1]), expected, 1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="products of the interpreter are those of BLAS")
@pytest.mark.parametrize(
    ("dtype", "router"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_a_token_has_the_same_routes_among_any_others(device, dtype, router):
    rng = np.random.default_rng(0)
    x, weight = tensor(floats(rng, 1500, 700), device, dtype), tensor(floats(rng, 70, 700), device, router)
    whole = cuda.moe_route(x, weight, **{**ROUTE, "top_k": 70})
    assert torch.equal(whole[0].sort().values[0].cpu(), torch.arange(70, dtype=torch.int32))
    for start, count in ((0, 1), (7, 64), (7, 65), (100, 1024), (400, 1025)):
        rows = slice(start, start + count)
        found = cuda.moe_route(x[rows].contiguous(), weight, **{**ROUTE, "top_k": 70})
        assert torch.equal(found[0], whole[0][rows]) and torch.equal(found[1], whole[1][rows])


@pytest.mark.usefixtures("products_are_chains_of_sums")
@pytest.mark.parametrize("num_rows", [1, 21] if IS_INTERPRETED else [1, 21, 70, 1100])
def test_products_of_16_bits_give_the_logits_of_float32(device, num_rows):
    rng = np.random.default_rng(0)
    x = tensor(floats(rng, num_rows, 300), device, torch.bfloat16)
    weight = tensor(floats(rng, 24, 300), device, torch.bfloat16)
    expected = array(x.double().cpu() @ weight.double().cpu().t())
    assert_close(array(routing._sums(x, weight).sum(0)), expected, 1e-5)


def test_a_token_that_is_not_finite_has_experts_nevertheless(device):
    rng = np.random.default_rng(0)
    x = floats(rng, 2, 40)
    x[0, 3] = np.nan
    ids, _ = cuda.moe_route(tensor(x, device), tensor(floats(rng, 24, 40), device), **ROUTE)
    assert array(ids)[0].tolist() == [0, 1, 2]


def test_slots_are_sorted_once_in_a_forward_pass(device):
    ids, others = (torch.tensor([[0, 2], numbers], dtype=torch.int32, device=device) for numbers in ([1, 0], [3, 0]))
    with forward_pass():
        order = routing.order_of(ids, 4)
        assert routing.order_of(ids, 4) is order
        assert array(routing.order_of(others, 4).slots).tolist() == [0, 3, 1, 2]
    with forward_pass():
        assert routing.order_of(ids, 4) is not order
    assert array(order.slots).tolist() == [0, 3, 2, 1] and array(order.starts).tolist() == [0, 2, 3, 4, 4]


def test_choices_of_rows_that_are_no_padding_are_added_to_the_counts(device):
    rng = np.random.default_rng(0)
    x, weight = tensor(floats(rng, 21, 40), device), tensor(floats(rng, 24, 40), device)
    route = {**ROUTE, "first_expert": 10}
    ids, weights = (array(each) for each in cuda.moe_route(x, weight, **route))
    counts = torch.full((24,), 2**40, dtype=torch.int64, device=device)
    expected = np.full(24, 2**40)
    for num_rows in (21, 0, 13):
        num_real = tensor(np.array([num_rows], np.int32), device)
        found = cuda.moe_route(x, weight, None, None, num_real, **route, counts=counts)
        expected += np.bincount(ids[:num_rows].ravel() + 10, minlength=24)
        assert np.array_equal(array(found[0]), ids) and np.array_equal(array(found[1]), weights)
        assert np.array_equal(array(counts), expected)


@pytest.mark.parametrize(("exponent", "busiest"), [(0, 0.04), (1, 0.21), (2, 0.61)])
def test_the_skewed_router_of_benchmarks_chooses_about_as_a_zipf_distribution(device, exponent, busiest):
    """`busiest` is the largest probability of the distribution, or for 0 that of the busiest of few tokens."""
    rng = np.random.default_rng(0)
    x, weight = floats(rng, 500, 300), floats(rng, 64, 300) * 0.02
    x /= np.sqrt((x**2).mean(1, keepdims=True))
    call = GraphCall(partial(cuda.moe_route, **{**ROUTE, "top_k": 1}), (0, 1), (2, 3), ())
    program = SimpleNamespace(_calls=[call], _params={1: tensor(weight, device)})
    skew(SimpleNamespace(runner=SimpleNamespace(program=program)), exponent)
    ids, _ = program._calls[0].run(tensor(x, device), tensor(weight, device), None, None)
    share = np.bincount(array(ids).ravel()).max() / len(x)
    assert abs(share - busiest) < 0.05
    assert _name(program._calls[0].run) == "moe_route"


@pytest.mark.parametrize("count", [1, 700, 5000])
def test_slots_are_sorted_by_expert(device, count):
    ids = np.random.default_rng(0).integers(0, 30, (count, 1)).astype(np.int32)
    found = routing.order_of(tensor(ids, device), 31)
    assert array(found.slots).tolist() == np.argsort(ids[:, 0], kind="stable").tolist()
    assert array(found.starts).tolist() == [int((ids < expert).sum()) for expert in range(32)]


def stacked(kind, rng, num_experts, columns, width):
    """Return a random expert stack in the layout of the catalogue."""
    matrix = floats(rng, num_experts * columns, width) / np.sqrt(width, dtype=np.float32)
    if kind in ("int8", "a8w8"):
        return to_int8(matrix)
    if kind.startswith("int4"):
        codes, scale = to_int4(matrix, SMALL_GROUP if "32" in kind else CODES_PER_SCALE)
        return codes, scale, to_bf16(rng.integers(0, 16, scale.shape).astype(np.float32))
    if kind.startswith("fp8"):
        numbers = rng.integers(0, 256, matrix.shape, np.uint8)
        numbers[numbers & 127 == 127] = 0
        groups = -(-width // FP8_BLOCK) if "blocks" in kind else 1
        return numbers, rng.uniform(1e-3, 4e-3, (len(matrix), groups)).astype(np.float32) / np.float32(width**0.5)
    if kind == "mxfp4":
        codes = rng.integers(0, 256, (len(matrix), width // 2), np.uint8)
        return codes, rng.integers(117, 125, (len(matrix), width // MXFP4_GROUP)).astype(np.uint8)
    return (matrix,)


def packed(kind, arrays, device, dtype=None):
    given = [tensor(each, device, dtype if kind == "dense" else None) for each in arrays]
    pack = experts.PACKED_BY.get(op_of("expert_down", kind))
    return given if pack is None else list(pack(*given))[: len(arrays)]


def op_of(name, kind):
    return name if kind == "dense" else f"{name}_{kind.split()[0]}"


def tolerance(kind, num_rows):
    """Return the tolerance of products. Those of 4-bit codes do not round scaled weights to bfloat16 as the definition
    does; those of 8-bit codes and one row give activations 13 bits."""
    is_close = kind == "int4" or (num_rows == 1 and kind in ("int8", "a8w8"))
    return 1e-4 if kind == "dense" or (IS_INTERPRETED and not is_close) else 1e-2


KINDS = ["dense", "fp8", "fp8 by blocks", "int4", "int4 by 32", "int8", "a8w8", "mxfp4"]
SHAPES = [(1, 3), (3, 3), (5, 2), (40, 3)]  # tokens and experts of each


def sizes(kind):
    """Return sizes that are multiples of nothing, or of the fewest columns that the format has."""
    return (320, 32) if kind == "mxfp4" else (300, 44)


@pytest.mark.parametrize("act", [SILU, GELU, CLAMPED], ids=["silu", "gelu", "clamped"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_experts_are_those_of_the_definition(device, kind, act):
    """Sizes that no tile divides; an expert without slots; more slots than fit into a tile."""
    rng = np.random.default_rng(0)
    num_experts, (width, inner) = 5, sizes(kind)
    for num_rows, top_k in SHAPES if act is SILU else SHAPES[1:2]:
        ids = np.argsort(rng.random((num_rows, num_experts - 1)), axis=1)[:, :top_k].astype(np.int32)
        weights = rng.random((num_rows, top_k)).astype(np.float32)
        x, h = (
            from_bf16(to_bf16(floats(rng, num_rows, width))),
            from_bf16(to_bf16(floats(rng, num_rows, top_k * inner))),
        )
        up, down = stacked(kind, rng, num_experts, 2 * inner, width), stacked(kind, rng, num_experts, width, inner)
        up_bias, down_bias = floats(rng, num_experts * 2 * inner), floats(rng, num_experts * width)
        for is_biased in (False, True):
            biases = [(each,) if is_biased else () for each in (up_bias, down_bias)]
            names = [op_of(name, kind) for name in ("expert_gate_up", "expert_down")]
            expected = definition(kind).gate_up(x, ids, *up, *biases[0], num_experts=num_experts, **act)
            given = tensor(x, device), tensor(ids, device), *packed(kind, up, device)
            found = getattr(cuda, names[0])(
                *given, *[tensor(b, device) for b in biases[0]], num_experts=num_experts, **act
            )
            assert_close(array(found), expected, tolerance(kind, num_rows))
            expected = definition(kind).down(h, ids, weights, *down, *biases[1], num_experts=num_experts)
            given = tensor(h, device), tensor(ids, device), tensor(weights, device), *packed(kind, down, device)
            found = getattr(cuda, names[1])(*given, *[tensor(b, device) for b in biases[1]], num_experts=num_experts)
            assert_close(array(found), expected, tolerance(kind, num_rows))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_some_of_the_experts_add_up_to_one_with_all(device, kind):
    """Slots of experts of other ranks have no values between the products, and add nothing."""
    rng = np.random.default_rng(0)
    num_experts, (width, inner) = 5, sizes(kind)
    up, down = stacked(kind, rng, num_experts, 2 * inner, width), stacked(kind, rng, num_experts, width, inner)
    biases = floats(rng, num_experts * 2 * inner), floats(rng, num_experts * width)
    names = [op_of(name, kind) for name in ("expert_gate_up", "expert_down")]
    for num_rows, top_k in SHAPES:
        ids = np.argsort(rng.random((num_rows, num_experts)), axis=1)[:, :top_k].astype(np.int32)
        x, weights = tensor(floats(rng, num_rows, width), device), tensor(floats(rng, num_rows, top_k), device)

        def part(first, end, ids=ids, x=x, weights=weights):
            own = tensor(ids - first, device)
            rows, given = [slice(first * n, end * n) for n in (2 * inner, width)], {"num_experts": end - first}
            stacks = [packed(kind, [each[rows[i]] for each in stack], device) for i, stack in enumerate((up, down))]
            bias = [tensor(each[rows[i]], device) for i, each in enumerate(biases)]
            with forward_pass() as context:
                context.routing_of(own).num_experts = num_experts  # as `moe_route` leaves it
                h = getattr(cuda, names[0])(x, own, *stacks[0], bias[0], **given, **SILU)
                h.view(*ids.shape, inner)[(own < 0) | (own >= end - first)] = float("nan")
                return array(getattr(cuda, names[1])(h, own, weights, *stacks[1], bias[1], **given))

        assert_close(part(0, 2) + part(2, 5), part(0, 5), 1e-5)


def test_mxfp4_with_powers_that_are_too_large_to_be_packed_becomes_bfloat16_at_load(device):
    rng = np.random.default_rng(0)
    num_experts, num_rows, top_k, (width, inner) = 5, 7, 2, sizes("mxfp4")
    ids = np.argsort(rng.random((num_rows, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    x = from_bf16(to_bf16(floats(rng, num_rows, width)))
    up = stacked("mxfp4", rng, num_experts, 2 * inner, width)
    up[1][3, 1] = 200
    stored = packed("mxfp4", up, device)
    assert stored[0].dtype == torch.bfloat16
    expected = definition("mxfp4").gate_up(x, ids, *up, num_experts=num_experts, **SILU)
    given = tensor(x, device), tensor(ids, device)
    found = array(cuda.expert_gate_up_mxfp4(*given, *stored, num_experts=num_experts, **SILU))
    assert_close(found, expected, tolerance("mxfp4", num_rows))


def test_words_of_mxfp4_that_a_program_reads_at_a_time_are_contiguous(device):
    """Each code of a block of 128 columns and 16 rows is in a run of 512 words."""
    num_rows, width = 64, 320
    scale = torch.full((num_rows, width // MXFP4_GROUP), 120, dtype=torch.uint8, device=device)
    codes = torch.zeros(num_rows, width // 2, dtype=torch.uint8, device=device)
    zeros = mxfp4.pack(codes, scale)[0]
    for row, column in ((0, 0), (5, 127), (15, 128), (16, 64), (63, 319)):
        changed = codes.clone()
        changed[row, column // 2] = 1 << column % 2 * 4
        place = (mxfp4.pack(changed, scale)[0] != zeros).flatten().nonzero().item()
        assert place // 512 == row // 16 * zeros.shape[1] + column // 128
        assert place // 32 % 16 == row % 16


class definition:
    """The definition of a kind, without the rounding of activations to few bits, which GPUs do not do."""

    def __init__(self, kind):
        def int4(x, codes, scale, zero=None, bias=None):
            return reference.linear(x, reference.int4_values(codes, scale, zero)[:, : x.shape[1]], bias)

        def fp8(x, numbers, scale, bias=None):
            return reference.linear(x, from_fp8(numbers, scale), bias)

        def int8(x, codes, scale, bias=None):
            return reference.linear(x, codes * scale[:, None], bias)

        def mxfp4(x, codes, scale, bias=None):
            return reference.linear(x, from_mxfp4(codes, scale), bias)

        by_op = {"dense": reference.linear, "int4": int4, "int8": int8, "a8w8": int8, "mxfp4": mxfp4}
        product = by_op.get(kind.split()[0], fp8)
        self.gate_up, self.down = reference.expert_ops(product)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_16_bits_are_right_in_every_tile(device, kind):
    """Numbers of tokens for each way of sharing the work. BATCH_INVARIANT=1: a token has the same bits in all."""
    rng = np.random.default_rng(0)
    num_experts, top_k, width, inner = 16, 4, 512, 256
    up = packed(kind, up_arrays := stacked(kind, rng, num_experts, 2 * inner, width), device, torch.bfloat16)
    down = packed(kind, down_arrays := stacked(kind, rng, num_experts, width, inner), device, torch.bfloat16)
    as_stored = [from_bf16(to_bf16(each[0])) if kind == "dense" else each[0] for each in (up_arrays, down_arrays)]
    most = 2400
    x, h = (from_bf16(to_bf16(floats(rng, most, n))) for n in (width, top_k * inner))
    ids = np.argsort(rng.random((most, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((most, top_k)).astype(np.float32)
    names = [op_of(name, kind) for name in ("expert_gate_up", "expert_down")]
    whole = None
    for num_rows in (most, 1, 4, 5, 17, 64, 140, 300, 1200):
        part = slice(num_rows)
        for ops in (cuda, invariant):
            if ops is invariant and not hasattr(invariant, names[0]):
                continue
            given = tensor(x[part], device).bfloat16(), tensor(ids[part], device)
            first = getattr(ops, names[0])(*given, *up, num_experts=num_experts, **SILU)
            given = tensor(h[part], device).bfloat16(), given[1], tensor(weights[part], device)
            second = getattr(ops, names[1])(*given, *down, num_experts=num_experts)
            if ops is invariant:
                whole = whole or (first, second)
                assert torch.equal(first, whole[0][part]) and torch.equal(second, whole[1][part])
        some = np.unique(np.linspace(0, num_rows - 1, 24).astype(int))  # the definition takes long
        defined = definition(kind)
        expected = defined.gate_up(x[some], ids[some], as_stored[0], *up_arrays[1:], num_experts=num_experts, **SILU)
        assert distance(first[some], expected) < BF16_STEP
        expected = defined.down(
            h[some], ids[some], weights[some], as_stored[1], *down_arrays[1:], num_experts=num_experts
        )
        assert distance(second[some], expected) < BF16_STEP


def test_a_gated_expert_of_all_tokens_is_added(device):
    rng = np.random.default_rng(0)
    arrays = floats(rng, 3, 70), floats(rng, 3, 70), floats(rng, 3, 200), floats(rng, 1, 200)
    expected = reference.add_gated(*arrays)
    assert_close(array(cuda.add_gated(*[tensor(each, device) for each in arrays])), expected, 1e-5)
