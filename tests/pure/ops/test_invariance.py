"""Row t of an output depends on token t alone, bit for bit: not on its neighbours, chunks or threads."""

import numpy as np
import pytest

from engine.dtypes import to_bf16
from engine.ops import cpu
from tests.pure.ops.test_cpu import OF_FEW_BITS, weight_inputs
from tests.pure.paged_batch import PagedBatch

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())
RNG = np.random.default_rng(0)


@pytest.fixture(params=[1, 3], autouse=True)
def num_threads(request):
    before = cpu.num_threads()
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(before)


def random(*shape):
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


def random_pieces(size: int) -> list[slice]:
    cuts = np.sort(RNG.choice(np.arange(1, size), min(size - 1, 6), replace=False))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


def assert_rows_are_independent(op, x):
    together = op(x)
    for piece in random_pieces(len(x)):
        assert np.array_equal(op(np.ascontiguousarray(x[piece])), together[piece])
    one_by_one = np.concatenate([op(x[t : t + 1]) for t in range(0, len(x), 7)])
    assert np.array_equal(one_by_one, together[::7])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("width", "num_out"), [(130, 100), (896, 64), (70, 700), (5000, 19)])
def test_linear_rows_are_independent(isa, dtype, width, num_out):
    weight = random(num_out, width)
    weight = to_bf16(weight) if dtype == "bf16" else weight
    ops, bias = cpu.load(isa), random(num_out)
    assert_rows_are_independent(lambda x: ops.linear(x, weight, bias), random(150, width))


@pytest.mark.parametrize("op", OF_FEW_BITS)
@pytest.mark.parametrize(("width", "num_out"), [(130, 100), (896, 64), (70, 700), (5000, 19)])
def test_linear_rows_of_few_bits_are_independent(isa, op, width, num_out):
    """Few rows read the codes as they are stored, many make bf16 of them first."""
    function, weight = getattr(cpu.load(isa), op.split()[0]), weight_inputs(op, num_out, width)
    assert_rows_are_independent(lambda x: function(x, *weight, random(num_out)), random(150, width))


def test_layer_norm_rows_are_independent(isa):
    weight, bias = random(900), random(900) + 1
    assert_rows_are_independent(lambda x: cpu.load(isa).layer_norm(x, weight, bias, epsilon=1e-5), random(150, 900))


def test_linear_does_not_depend_on_threads(isa, num_threads):
    x, weight = random(70, 300), to_bf16(random(900, 300))
    found = cpu.load(isa).linear(x, weight)
    cpu.set_num_threads(1)
    assert np.array_equal(found, cpu.load(isa).linear(x, weight))


def test_other_rows_are_independent(isa):
    ops, weight, q_weight, k_weight = cpu.load(isa), random(384), random(24), random(24)
    assert_rows_are_independent(lambda x: ops.rms_norm(x, weight, epsilon=1e-6), random(150, 384))
    assert_rows_are_independent(lambda x: ops.add_rms_norm(x, x.copy(), weight, epsilon=1e-6)[0], random(150, 384))
    assert_rows_are_independent(ops.swiglu, random(150, 386))
    heads = {"num_heads": 8, "num_kv_heads": 4, "epsilon": 1e-6}
    assert_rows_are_independent(lambda x: ops.head_norm(x, q_weight, k_weight, **heads), random(150, 384))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"), [(4, 16, 8), (14, 64, 64), (2, 24, 16)], ids=["small", "usual", "odd"]
)
def test_attention_does_not_depend_on_chunks(isa, dtype, num_heads, head_dim, block_size):  # noqa: PLR0913
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "rotary_dim": head_dim, "block_size": block_size}
    batch = PagedBatch([0, 37, 64, 5], [130, 1, 70, 3], dtype=dtype, **sizes)
    ops, whole, cut = cpu.load(isa), batch.kv_cache.copy(), batch.kv_cache.copy()
    together = batch.run(ops, whole)
    chunks = {b: random_pieces(n) if n > 1 else [slice(0, n)] for b, n in enumerate(batch.count)}
    while chunks:  # each step takes the next chunk of some of the requests
        chosen = [b for b in chunks if len(chunks) == 1 or RNG.random() < 0.7] or [next(iter(chunks))]
        part = {b: (chunks[b][0].start, chunks[b][0].stop) for b in chosen}
        found = batch.run_part(ops, cut, part)
        rows = np.concatenate([np.arange(*part[b]) + batch.query_starts[b] for b in chosen])
        assert np.array_equal(found, together[rows])
        chunks = {b: rest for b, left in chunks.items() if (rest := left[1:] if b in part else left)}
    assert np.array_equal(cut, whole)
