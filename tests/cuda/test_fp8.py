"""Weights of 8-bit floats on the GPU: products against their definition, a model against the definitions of its ops."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.dtypes import FP8_BLOCK, from_bf16, from_fp8, to_bf16  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.exporting.export import ExportOptions, export  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import a8w8_fp8, fp8, invariant  # noqa: E402
from tests.cuda.arrays import BF16_STEP, array, assert_close, distance, floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.cuda.test_executor import SETTINGS, generate, golden_cases  # noqa: E402
from tests.quantized_checkpoints import make_fp8  # noqa: E402

# The interpreter tells of what a GPU does without a word.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what} encountered") for what in ("overflow", "invalid value")]


def stored(rng, columns, width, is_blocked):
    """Return a stored weight as the catalogue defines it, with numbers below the smallest normal one."""
    numbers = rng.integers(0, 256, (columns, width), np.uint8)
    numbers[numbers & 127 == 127] = 0  # those that are none
    groups = -(-width // FP8_BLOCK) if is_blocked else 1
    return numbers, rng.uniform(1e-3, 4e-3, (columns, groups)).astype(np.float32)


def packed(arrays, device):
    return fp8.pack(*[tensor(each, device) for each in arrays])


# Rows, columns and width: of each way of sharing the work, none a multiple of anything.
SIZES = [(0, 34, 70), (1, 35, 2600), (1, 34, 4096), (3, 50, 2048), (16, 20, 300), (17, 70, 1500), (45, 34, 70)]


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_products_are_those_of_the_definition(device, monkeypatch, is_blocked):
    """This includes the gate, and so many rows that the weights are widened for cuBLAS. In the other cases the scale is
    applied to a sum and not to each weight, which would be rounded then.
    """
    monkeypatch.setattr(fp8, "MAX_PACKED_ROWS", 40)
    rng = np.random.default_rng(0)
    for num_rows, columns, width in SIZES:
        x, bias = floats(rng, num_rows, width), floats(rng, columns)
        arrays = stored(rng, columns, width, is_blocked)
        weights = from_fp8(*arrays) if num_rows <= fp8.MAX_PACKED_ROWS else from_bf16(to_bf16(from_fp8(*arrays)))
        expected = from_bf16(to_bf16(x)).astype(np.float64) @ weights.T
        for each in (bias, None):
            given = tensor(x, device), *packed(arrays, device), tensor(each, device)
            wanted = expected + (0 if each is None else each)
            # The tensor cores' own sums of 8-bit floats are not those of float32.
            tolerance = 1e-5 if IS_INTERPRETED or not fp8.MAX_SKINNY_ROWS < num_rows <= fp8.MAX_PACKED_ROWS else 1e-3
            assert_close(array(cuda.linear_fp8(*given)), wanted, tolerance)
            if columns % 2 == 0:
                assert_close(array(cuda.gated_linear_fp8(*given)), reference.swiglu(wanted), tolerance)


@pytest.mark.parametrize("ops", [a8w8_fp8, invariant], ids=["usual", "invariant"])
@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_products_of_rounded_activations_are_those_of_the_definition(device, ops, is_blocked):
    """Products of a few rows are not rounded, unless BATCH_INVARIANT=1."""
    rng = np.random.default_rng(0)
    for num_rows, columns, width in [(0, 34, 70), (3, 50, 300), (66, 70, 1500), (70, 34, 70)]:
        x, bias = floats(rng, num_rows, width), floats(rng, columns)
        arrays = stored(rng, columns, width, is_blocked)
        define = (
            reference.linear_fp8
            if ops is a8w8_fp8 and num_rows <= a8w8_fp8.MAX_SKINNY_ROWS
            else reference.linear_a8w8_fp8
        )
        given = tensor(x, device), *packed(arrays, device), tensor(bias, device)
        tolerance = 1e-3 if define is reference.linear_a8w8_fp8 and not IS_INTERPRETED else 4e-3
        assert_close(array(ops.linear_a8w8_fp8(*given)), define(x, *arrays, bias), tolerance)
        assert_close(array(ops.gated_linear_a8w8_fp8(*given)), reference.swiglu(define(x, *arrays, bias)), tolerance)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_rounded_activations_of_16_bits_are_multiplied_in_every_tile(device, is_blocked):
    """The shapes reach the tiles of real models. With BATCH_INVARIANT=1 a row has the same bits at every batch size."""
    rng = np.random.default_rng(0)
    for columns, width in ((4096, 896), (10240, 1024)):
        arrays = stored(rng, columns, width, is_blocked)
        weight = packed(arrays, device)
        x = from_bf16(to_bf16(floats(rng, 600, width)))
        all_rows = invariant.linear_a8w8_fp8(tensor(x, device).bfloat16(), *weight)
        for num_rows in (17, 64, 65, 200, 500):
            given = tensor(x[:num_rows], device).bfloat16(), *weight
            define = reference.linear_fp8 if num_rows <= a8w8_fp8.MAX_SKINNY_ROWS else reference.linear_a8w8_fp8
            assert distance(a8w8_fp8.linear_a8w8_fp8(*given), define(x[:num_rows], *arrays)) < BF16_STEP
            assert torch.equal(invariant.linear_a8w8_fp8(*given), all_rows[:num_rows])
        assert distance(all_rows, reference.linear_a8w8_fp8(x, *arrays)) < BF16_STEP
        assert torch.equal(invariant.linear_a8w8_fp8(tensor(x[5:6], device).bfloat16(), *weight), all_rows[5:6])


def test_a_device_that_does_not_know_8_bit_floats_has_bf16_in_their_place(device, monkeypatch):
    monkeypatch.setattr(fp8, "are_multiplied", lambda: False)
    rng = np.random.default_rng(0)
    arrays = stored(rng, 34, 200, True)
    weight, scale = packed(arrays, device)
    x = from_bf16(to_bf16(floats(rng, 3, 200)))
    found = cuda.linear_fp8(tensor(x, device), weight.float(), scale)
    assert_close(array(found), reference.linear_fp8(x, *arrays), 1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_products_of_16_bits_lose_no_more_than_their_precision(device, is_blocked, dtype):
    """The sizes are those of models, so that every kernel runs as it does there."""
    rng = np.random.default_rng(0)
    for columns, width in ((4096, 896), (10240, 1024), (24576, 256)):
        arrays = stored(rng, columns, width, is_blocked)
        weight = packed(arrays, device)
        for num_rows in (1, 5, 16, 31, 64, 200, 1500) if columns < 24576 else (1,):  # which has a tile for as many
            x = from_bf16(to_bf16(0.1 * floats(rng, num_rows, width)))  # within the range of float16
            x[:, 7] *= 300  # one that is far out, as models have them
            expected = reference.linear_fp8(x, *arrays)
            given = tensor(x, device).to(dtype), *weight
            found = cuda.linear_fp8(*given)
            assert found.dtype == dtype
            assert distance(found, expected) < BF16_STEP
            assert distance(cuda.gated_linear_fp8(*given), reference.swiglu(expected)) < BF16_STEP


def test_a_row_that_is_not_finite_gives_nan_and_one_of_zeros_zeros(device):
    rng = np.random.default_rng(0)
    x = floats(rng, 20, 70)
    x[0, 5], x[1, 69], x[2] = np.inf, np.nan, 0
    found = array(cuda.linear_fp8(tensor(x, device), *packed(stored(rng, 20, 70, False), device)))
    assert np.isnan(found[:2]).all()
    assert (found[2] == 0).all()
    assert np.isfinite(found[3:]).all()


@pytest.mark.parametrize("is_blocked", [False, True], ids=["rows", "blocks"])
def test_the_definition_takes_no_rows(is_blocked):
    numbers, steps = reference.to_fp8_rows(np.zeros((0, 300), np.float32), is_blocked=is_blocked)
    assert (numbers.shape, steps.shape) == ((0, 300), (0, 3 if is_blocked else 1))


@pytest.mark.parametrize("kind", ["a block", "weight_only_fp8"])
def test_the_tokens_are_those_of_the_definition(exported, device, kind):
    """The models are a checkpoint with blocks, and one that is rounded at export."""
    graph_dir = ROOT / "build/golden/fp8-graph" if kind == "a block" else exported("qwen2", quant_type=kind)
    if not graph_dir.exists():
        quantized, _ = make_fp8(graph_dir.with_name("fp8"), kind)
        export(quantized, graph_dir, ExportOptions("float32", "weight_only_fp8"))
    prompts = [prompt for prompt, _ in golden_cases("qwen2", [7, 65]).values()]
    executor = CudaExecutor(graph_dir, SETTINGS, device.type)
    executor.allocate(32)
    count = 2 if IS_INTERPRETED else 12
    found = generate(EngineLoop(executor, 32, SETTINGS), prompts, max_new_tokens=count)
    oracle = ReferenceExecutor(graph_dir)
    oracle.allocate(32)
    assert found == generate(EngineLoop(oracle, 32, SETTINGS), prompts, max_new_tokens=count)


@pytest.mark.parametrize("kind", ["a8w8_fp8", "block_wise_fp8", "a8w8_fp8_wint4"])
def test_log_probabilities_are_nearer_to_the_definition_than_rounding_moves_them(exported, device, kind):
    """Rounding activations to 8 bits turns a difference in the last bit of a sum into one of several percent of an
    element, so that tokens of these small random models need not be equal.
    """

    def likeliest(executor):
        executor.allocate(32)
        loop, found = EngineLoop(executor, 32, SETTINGS), {}
        for n, (prompt, _) in golden_cases("qwen2", [1, 7, 65]).items():
            loop.add(Request(str(n), list(prompt), len(prompt), Sampling(1, temperature=0, num_logprobs=20)))
        while not loop.is_idle:
            for update in loop.step():
                [first] = update.logprobs
                found |= {(update.request.request_id, token): value for token, value in first.top}
        return found

    graph_dir = exported("qwen2", quant_type=kind)
    exact, expected = (likeliest(ReferenceExecutor(each)) for each in (exported("qwen2"), graph_dir))
    found = likeliest(CudaExecutor(graph_dir, SETTINGS, device.type))

    def error(logprobs, others):
        common = logprobs.keys() & others.keys()
        assert len(common) > 30
        return np.mean([abs(logprobs[each] - others[each]) for each in common])

    assert error(found, expected) < 0.75 * error(exact, expected)
