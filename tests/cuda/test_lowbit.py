"""Weights of 8 and 4 bits and an int8 cache on the GPU: ops against their definitions, models against the definitions
of all their ops."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.dtypes import from_bf16, to_bf16  # noqa: E402
from engine.executors.cuda import warm_up  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.models.quantize import to_int4, to_int8  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import experts_fp8, lowbit  # noqa: E402
from tests.cuda.arrays import BF16_STEP, array, assert_close, distance, floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.cuda.test_executor import SETTINGS, generate, golden_cases  # noqa: E402

# The interpreter tells of what a GPU does without a word.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what} encountered") for what in ("overflow", "invalid value")]
OPS = ["linear_int8", "linear_a8w8", "linear_int4", "linear_int4 with zeros", "linear_int4 of 32 with zeros"]


def stored(op, matrix, rng):
    """Return a stored weight as the catalogue defines it."""
    if op.startswith("linear_int4"):
        codes, scale = to_int4(matrix, 32 if "of 32" in op else 64)
        zeros = to_bf16(rng.integers(0, 16, scale.shape).astype(np.float32))
        return codes, scale, zeros if "zeros" in op else None
    return to_int8(matrix)


def packed(op, arrays, device):
    """Return the weight as the ops of the GPU take it."""
    given = [tensor(each, device) for each in arrays]
    return lowbit.PACKED_BY[op](*given)[: len(arrays)]


# Rows, columns and width: of each way of sharing the work, none a multiple of anything.
SIZES = [(0, 34, 70), (1, 35, 2600), (1, 34, 4096), (3, 50, 2048), (16, 20, 300), (17, 70, 1500), (45, 34, 70)]


@pytest.mark.parametrize("op", OPS)
def test_products_are_those_of_the_definition(device, monkeypatch, op):
    """This includes the gate, logits, and so many rows that the weights are unpacked for cuBLAS. Next to 8-bit codes
    the numbers of a single row have 13 bits.
    """
    monkeypatch.setattr(lowbit, "MAX_PACKED_ROWS", 40)
    rng = np.random.default_rng(0)
    name = op.split()[0]
    for num_rows, columns, width in SIZES:
        x, bias = floats(rng, num_rows, width), floats(rng, columns)
        arrays = stored(op, floats(rng, columns, width), rng)
        weight = packed(name, arrays, device)
        tolerance = 2e-4 if num_rows == 1 and name == "linear_int8" else 1e-5
        for each in (bias, None):
            expected = result(name, x, arrays, each)
            given = tensor(x, device), *weight, tensor(each, device)
            assert_close(array(getattr(cuda, name)(*given)), expected, tolerance)
            if columns % 2 == 0:
                assert_close(array(getattr(cuda, f"gated_{name}")(*given)), reference.swiglu(expected), tolerance)
            if name == "linear_int8":
                assert_close(array(cuda.logits_int8(*given)), expected, tolerance)


def result(op, x, arrays, bias):
    """Return the product for `x` in bf16, as a GPU computes it. An int4 weight is rounded to bf16, too, except for a
    single row where groups have 64 columns.
    """
    if op == "linear_a8w8":
        return reference.linear_a8w8(x, *arrays, bias)
    if op == "linear_int8":
        weights = arrays[0] * arrays[1][:, None]
    else:
        is_rounded = len(x) > 1 or 2 * arrays[0].shape[1] == 32 * arrays[1].shape[1]
        numbers = from_bf16(reference.int4_values(*arrays)) if is_rounded else reference.int4_numbers(*arrays)
        weights = numbers[:, : x.shape[1]]
    return reference.linear(from_bf16(to_bf16(x)), weights.astype(np.float32), bias)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [*OPS, "linear_int4 without Gluon"])
def test_products_of_16_bits_lose_no_more_than_their_precision(device, monkeypatch, op, dtype):
    """The sizes are those of models, so that every kernel runs as it does there."""
    if "without Gluon" in op:
        monkeypatch.setattr(lowbit, "int4_gemm", None)
    rng = np.random.default_rng(0)
    name = op.split()[0]
    for columns, width in ((4096, 896), (10240, 1024), (24576, 256)):
        arrays = stored(op, floats(rng, columns, width), rng)
        weight = packed(name, arrays, device)
        for num_rows in (1, 5, 16, 31, 64, 200, 1500):
            x = from_bf16(to_bf16(0.1 * floats(rng, num_rows, width)))  # within the range of float16
            expected = result(name, x, arrays, None)
            given = tensor(x, device).to(dtype), *weight
            found = getattr(cuda, name)(*given)
            assert found.dtype == dtype
            assert distance(found, expected) < BF16_STEP
            assert distance(getattr(cuda, f"gated_{name}")(*given), reference.swiglu(expected)) < BF16_STEP


int4_gemm = lowbit.int4_gemm
TILES = int4_gemm.TILES if int4_gemm else []
# Rows beyond those of a tile, columns, width, splits: several tiles, none of the sizes a multiple of one.
TILED_SIZES = [(-3, 544, 1032, 1), (5, 1056, 4096, 1), (0, 528, 1288, 2), (13, 288, 2600, 3)]


TILED_TYPES = dict(zip([op for op in OPS if "int4" in op], (torch.bfloat16, torch.float16, torch.float32), strict=True))


@pytest.mark.parametrize("op", TILED_TYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_of_the_kernel_for_hopper_gives_the_product(device, monkeypatch, tile, op):
    """Three programs compute all tiles, so that each has several and all parts of shared memory are used again."""
    if not int4_gemm.IS_SUPPORTED:
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(int4_gemm, "num_sms", lambda: 3)
    rng, dtype = np.random.default_rng(0), TILED_TYPES[op]
    limit = 1e-5 if dtype == torch.float32 else BF16_STEP / 2
    for more, columns, width, splits in TILED_SIZES:
        monkeypatch.setattr(int4_gemm, "plan", lambda *_, splits=splits: int4_gemm.Int4Plan(tile, splits))
        x = from_bf16(to_bf16(0.1 * floats(rng, tile.rows + more, width)))
        bias = floats(rng, columns) if "zeros" in op else None
        arrays = stored(op, floats(rng, columns, width), rng)
        words, scale, *zero = packed("linear_int4", arrays, device)
        given = tensor(x, device).to(dtype), words, scale, zero[0] if zero else None, tensor(bias, device)
        expected = result("linear_int4", x, arrays, bias)
        assert distance(cuda.linear_int4(*given), expected) < limit
        assert distance(cuda.gated_linear_int4(*given), reference.swiglu(expected)) < limit


def test_plans_have_no_empty_split_and_are_those_that_the_warm_up_runs(monkeypatch):
    """An empty split would wait for columns forever. A number of rows whose kernels the warm-up did not run would be
    computed while a request waits.
    """
    if not int4_gemm:
        pytest.skip("this Triton has no Gluon")
    monkeypatch.setattr(int4_gemm, "IS_SUPPORTED", True)
    monkeypatch.setattr(int4_gemm, "num_sms", lambda: 132)
    sizes = np.array(warm_up._sizes(4096))
    for columns, width in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (896, 4864), (3584, 18944)):
        for num_rows in range(65, 2049):
            blocks = -(-width // 256)
            plan = int4_gemm.plan(num_rows, columns, blocks, width)
            assert plan is None or (plan.splits - 1) * -(-blocks // plan.splits) < blocks
            ran = int(sizes[sizes <= num_rows].max())
            assert plan == int4_gemm.plan(ran, columns, blocks, width)
        assert int4_gemm.plan(64, columns, blocks, width) is None
        assert int4_gemm.plan(2049, columns, blocks, width) is None


def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_zeros(device):
    rng = np.random.default_rng(0)
    x = floats(rng, 4, 70)
    x[0, 5], x[1, 69], x[2] = np.inf, np.nan, 0
    arrays = to_int8(floats(rng, 20, 70))
    given = [tensor(x, device), *packed("linear_a8w8", arrays, device)]
    found = array(cuda.linear_a8w8(*given))
    assert np.isnan(found[:2]).all()
    assert (found[2] == 0).all()
    assert_close(found[3:], reference.linear_a8w8(x[3:], *arrays), 1e-5)


@pytest.mark.parametrize("op", OPS)
def test_a_single_row_that_is_not_finite_gives_no_number_and_one_of_zeros_zeros(device, op):
    rng = np.random.default_rng(0)
    name = op.split()[0]
    weight = packed(name, stored(op, floats(rng, 20, 70), rng), device)
    for value in (np.inf, -np.inf, np.nan, 0):
        x = np.zeros((1, 70), np.float32)
        x[0, 69] = value
        found = array(getattr(cuda, name)(tensor(x, device), *weight))
        assert not np.isfinite(found).any() if value else (found == 0).all()


MODELS = {
    "int8": ("qwen2", {"quant_type": "weight_only_int8"}),
    "int4": ("llama", {"quant_type": "weight_only_int4"}),
    "int4 in groups of 32": ("qwen2", {"quant_type": "weight_only_int4_g32"}),
    "a8w8 and an int8 cache": ("qwen3", {"quant_type": "a8w8", "int8_cache": True}),
    "an int8 cache": ("llama3", {"int8_cache": True}),
    "an int8 cache of latents": ("deepseek_v3", {"int8_cache": True}),
    "int4 with zeros": ("awq", {}),
    "int4 experts": ("qwen3_moe", {"quant_type": "weight_only_int4"}),
    "int8 experts": ("qwen3_moe", {"quant_type": "weight_only_int8"}),
}


def linear_int4_of_bf16(x, codes, scale, zero=None, bias=None):
    return result("linear_int4", x, (codes, scale, zero), bias)


def experts_int4(name):
    """Return an op of experts whose weights are rounded to bf16 if experts have many slots, as in their kernels."""

    def product(values):
        def linear(x, codes, scale, zero=None, bias=None):
            return reference.linear(x, values(codes, scale, zero)[:, : x.shape[1]], bias)

        return linear

    of_few, of_many = (
        dict(zip(("gate_up", "down"), reference.expert_ops(product(values)), strict=True))[name]
        for values in (reference.int4_numbers, reference.int4_values)
    )

    def op(x, topk_ids, *given, num_experts, **attributes):
        are_few = len(x) == 1 or experts_fp8.are_few(topk_ids.size, num_experts)
        return (of_few if are_few else of_many)(x, topk_ids, *given, num_experts=num_experts, **attributes)

    return op


def linear_int8_of_bf16(x, codes, scale, bias=None):
    return result("linear_int8", x, (codes, scale), bias)


@pytest.mark.parametrize("case", MODELS)
def test_the_tokens_are_those_of_the_definition(exported, device, case, monkeypatch):
    """The exception is activations next to quantized weights, which a GPU does not round to 8 bits. The rounding of
    int4 weights depends on the number of rows, so steps are not filled up there.
    """
    monkeypatch.setattr(reference, "linear_int4", linear_int4_of_bf16)
    monkeypatch.setattr(reference, "linear_int8", linear_int8_of_bf16)
    for name, op in zip(("gate_up", "down"), reference.expert_ops(linear_int8_of_bf16), strict=True):
        monkeypatch.setattr(reference, f"expert_{name}_int8", op)
        monkeypatch.setattr(reference, f"expert_{name}_int4", experts_int4(name))
    family, options = MODELS[case]
    graph_dir = exported(family, **options)
    lengths, count = ([7, 130], 4) if IS_INTERPRETED else ([1, 7, 63, 130], 16)
    known = "qwen2" if family in ("awq", "qwen3_moe", "deepseek_v3") else family
    prompts = [prompt for prompt, _ in golden_cases(known, lengths).values()]
    settings = replace(SETTINGS, use_cudagraph="int4" not in case)
    executor = CudaExecutor(graph_dir, settings, device.type)
    executor.allocate(32)
    found = generate(EngineLoop(executor, 32, settings), prompts, max_new_tokens=count)
    oracle = ReferenceExecutor(graph_dir)
    oracle.allocate(32)
    assert found == generate(EngineLoop(oracle, 32, SETTINGS), prompts, max_new_tokens=count)
