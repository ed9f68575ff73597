"""Every op of the catalogue on the GPU against its definition in numpy, on sizes that divide nothing."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.dtypes import from_bf16, to_bf16  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.catalogue import OPS  # noqa: E402
from engine.ops.cuda import balanced_splits, skinny_gemm  # noqa: E402
from engine.ops.cuda.forward_context import forward_pass  # noqa: E402
from engine.ops.cuda.prefill_attention import KnownStarts  # noqa: E402
from tests.cuda.arrays import BF16_STEP, Ops, array, assert_close, floats, tensor  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.pure.paged_batch import PagedBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter tells of it


@pytest.fixture(scope="module")
def ops(device):
    return Ops(device)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_every_op_of_the_catalogue_is_here():
    of_gpus = [op.name for op in OPS.values() if op.cuda]
    assert {"embedding", "paged_attention", "all_reduce"} <= set(of_gpus)
    assert [name for name in of_gpus if not callable(getattr(cuda, name))] == []


@pytest.mark.parametrize("width", [1, 70, 4097])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_norms(ops, rng, num_rows, width):
    x, residual, weight = floats(rng, num_rows, width), floats(rng, num_rows, width), floats(rng, width)
    expected = reference.rms_norm(x, weight, epsilon=1e-5)
    assert_close(ops.rms_norm(x, weight, epsilon=1e-5), expected)
    for bias in (None, x.sum(axis=0)):
        expected = reference.layer_norm(x + 3, weight, bias, epsilon=1e-5)
        assert_close(ops.layer_norm(x + 3, weight, bias, epsilon=1e-5), expected)
    of_ops, of_reference = residual.copy(), residual.copy()
    expected, _ = reference.add_rms_norm(x, of_reference, weight, epsilon=1e-5)
    found, _ = ops.add_rms_norm(x, of_ops, weight, epsilon=1e-5)
    assert_close(found, expected)
    assert np.array_equal(of_ops, of_reference)


def test_a_residual_of_float16_does_not_overflow(device, rng):
    """Each intermediate sum is larger than a float16 can be, and so is the last one."""
    x = np.full((2, 70), 40000, np.float32)
    residual, weight = tensor(x, device, torch.float16), tensor(floats(rng, 70), device)
    for count in (2, 3):
        y, residual = cuda.add_rms_norm(tensor(x, device, torch.float16), residual, weight, epsilon=1e-5)
        assert (array(residual) == count * 40000).all()
    assert y.dtype == torch.float16
    assert_close(array(y).astype(np.float32), np.broadcast_to(array(weight), (2, 70)), 1e-3)


@pytest.mark.parametrize("first_id", [0, 5])
def test_embedding_gives_zeros_for_ids_of_others(ops, rng, first_id):
    ids = np.array([0, 5, 12, 21, 22, 30, 4], np.int32)
    table = floats(rng, 17, 1030)
    for each in (table, to_bf16(table)):
        found = ops.embedding(ids, each, first_id=first_id)
        found = from_bf16(found) if each.dtype == np.uint16 else found
        assert np.array_equal(found, reference.embedding(ids, each, first_id=first_id))


def test_rotary_angles_are_exact_far_out(ops, rng):
    positions = np.array([0, 1, 77, 4095, 131071, 1000003], np.int32)
    inv_freq = (1e6 ** -(np.arange(0, 48, 2) / 48)).astype(np.float32)
    expected = reference.rotary_angles(positions, inv_freq, attention_scaling=1.25)
    assert_close(ops.rotary_angles(positions, inv_freq, attention_scaling=1.25), expected, 5e-7)


def test_mrope_angles_are_exact_far_out(ops, rng):
    positions = rng.integers(0, 1000003, (3, 50)).astype(np.int32)
    inv_freq = (1e6 ** -(np.arange(0, 48, 2) / 48)).astype(np.float32)
    axes = rng.integers(0, 3, 24).astype(np.int32)
    expected = reference.mrope_angles(positions, inv_freq, axes, attention_scaling=1.25)
    assert_close(ops.mrope_angles(positions, inv_freq, axes, attention_scaling=1.25), expected, 5e-7)


@pytest.mark.parametrize("width", [1, 33, 2050])
def test_replaced_rows_are_those_of_the_values(ops, rng, width):
    x, values = floats(rng, 7, width), floats(rng, 3, width)
    rows = np.array([-1, 2, 0, -1, 0, 1, -1], np.int32)
    assert np.array_equal(ops.replace_rows(x, rows, values), reference.replace_rows(x, rows, values))
    assert np.array_equal(ops.replace_rows(x, np.full(7, -1, np.int32), values[:0]), x)
    of_bf16 = ops.replace_rows(to_bf16(x), rows, from_bf16(to_bf16(values)))  # the interpreter rounds others otherwise
    assert np.array_equal(of_bf16, reference.replace_rows(to_bf16(x), rows, to_bf16(values)))


@pytest.mark.parametrize("width", [1, 33, 2050])
def test_rows_of_wider_values_are_replaced_and_added(ops, rng, width):
    x, values = floats(rng, 7, width), floats(rng, 3, 3 * width)
    rows, none = np.array([-1, 2, 0, -1, 0, 1, -1], np.int32), np.full(7, -1, np.int32)
    assert np.array_equal(ops.replace_rows(x, rows, values), reference.replace_rows(x, rows, values))
    for column in (0, 2 * width):
        added = ops.add_gathered_rows(x, rows, values, column=column)
        assert_close(added, reference.add_gathered_rows(x, rows, values, column=column))
    assert np.array_equal(ops.add_gathered_rows(x, none, values[:0], column=width), x)


def test_elementwise_ops_of_families(ops, rng):
    x, y = floats(rng, 5, 70) * 3, floats(rng, 5, 70)
    for name in ("gelu", "geglu"):
        assert_close(getattr(ops, name)(x), getattr(reference, name)(x))
    assert_close(ops.relu_squared(x), reference.relu_squared(x))
    assert_close(ops.add(x, y), x + y)
    assert_close(ops.scale(x, factor=0.3), reference.scale(x, factor=0.3))
    assert_close(ops.softcap(x, cap=2.0), reference.softcap(x, cap=2.0))


def test_wide_norms_and_rotations_of_heads(ops, rng):
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10}
    qkv, q_weight, k_weight, cos_sin = floats(rng, 5, 100), floats(rng, 60), floats(rng, 20), floats(rng, 5, 4)
    sums = reference.square_sums(qkv, **heads)
    assert_close(ops.square_sums(qkv, **heads), sums)
    given = {**heads, "q_size": 120, "k_size": 40, "epsilon": 1e-6}
    expected = reference.wide_norm(qkv, sums, q_weight, k_weight, **given)
    assert_close(ops.wide_norm(qkv, sums, q_weight, k_weight, **given), expected)
    assert_close(ops.rotate_heads(qkv, cos_sin, **heads), reference.rotate_heads(qkv, cos_sin, **heads))


@pytest.mark.parametrize("width", [1, 33, 2050])
def test_swiglu(ops, rng, width):
    x = 4 * floats(rng, 5, 2 * width)
    x[0, 0], x[1, 0] = -200, 200  # where exp overflows
    assert_close(ops.swiglu(x), reference.swiglu(x))


@pytest.mark.parametrize("num_rows", [0, 1, 3])
@pytest.mark.parametrize("width", [70, 1500])
def test_linear(ops, rng, num_rows, width):
    x, weight, bias = floats(rng, num_rows, width), floats(rng, 34, width), floats(rng, 34)
    assert_close(ops.linear(x, weight), reference.linear(x, weight), 1e-5)
    assert_close(ops.linear(x, weight, bias), reference.linear(x, weight, bias), 1e-5)
    assert_close(ops.logits(x, weight), reference.linear(x, weight), 1e-5)
    z = floats(rng, num_rows, 34)
    for each in (bias, None):
        assert_close(ops.linear_add(x, weight, each, z), reference.linear(x, weight, each) + z, 1e-5)
    for columns in (40,) if IS_INTERPRETED else (5000, 10300):  # which are shared out to programs in other ways
        wide = floats(rng, columns, 70)
        assert_close(ops.linear(x[:, :70], wide), reference.linear(x[:, :70], wide), 1e-5)
    for each in (bias, None):
        assert_close(ops.gated_linear(x, weight, each), reference.swiglu(reference.linear(x, weight, each)), 1e-5)


@pytest.mark.parametrize("width", [512, 1500])
def test_products_of_few_rows(device, rng, width):
    for num_rows in (1, 3, 8):
        x, weight, bias = (tensor(floats(rng, *shape), device) for shape in ((num_rows, width), (34, width), (34,)))
        for each, is_gated in ((bias, False), (bias, True), (None, True)):
            found = skinny_gemm.multiply(x, weight, each, x.new_full((num_rows, 34 >> is_gated), 7), is_gated=is_gated)
            expected = reference.linear(array(x), array(weight), None if each is None else array(each))
            assert_close(array(found), reference.swiglu(expected) if is_gated else expected, 1e-5)


@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_bf16_logits_are_not_rounded(device, rng, num_rows):
    if device.type != "cuda":
        pytest.skip("the interpreter does not know bf16")
    x, weight = (from_bf16(to_bf16(floats(rng, n, 1500))) for n in (num_rows, 33))
    found = cuda.logits(*(tensor(each, device, torch.bfloat16) for each in (x, weight)))
    assert_close(array(found), reference.linear(x, weight), 1e-5)


def test_gather_rows(ops, rng):
    x, rows = floats(rng, 5, 70), np.array([4, 0, 0], np.int32)
    assert np.array_equal(ops.gather_rows(x, rows), x[rows])
    assert np.array_equal(ops.gather_rows(x, None), x)


def test_a_negative_id_stands_for_the_last_token_of_a_slot(device):
    ids = torch.tensor([7, -2, -5, 0, -1] + [-4] * 1100, dtype=torch.int32, device=device)
    last = torch.tensor([30, 31, 32, 33], dtype=torch.int32, device=device)
    assert array(cuda.last_tokens_in(ids, last)).tolist() == [7, 30, 33, 0, -1] + [32] * 1100


SMALL = {"block_size": 16}
BATCHES = [
    pytest.param(PagedBatch([0], [1], **SMALL), id="first token"),
    pytest.param(PagedBatch([0, 3, 16, 40], [1, 1, 1, 1], **SMALL), id="decode"),
    pytest.param(PagedBatch([0, 3, 16], [19, 1, 8], **SMALL), id="mixed"),
    pytest.param(PagedBatch([7, 200], [1, 1], num_heads=14, head_dim=64, rotary_dim=64, block_size=64), id="split"),
    pytest.param(PagedBatch([70], [150], num_heads=14, head_dim=64, rotary_dim=64, block_size=64), id="prefill"),
    pytest.param(PagedBatch([5, 0, 9], [3, 9, 40], head_dim=10, rotary_dim=4, **SMALL), id="odd sizes"),
    pytest.param(PagedBatch([5], [30], num_heads=3, num_kv_heads=3, head_dim=80, rotary_dim=32, **SMALL), id="mha"),
    pytest.param(PagedBatch([90], [9], num_heads=80, num_kv_heads=1, head_dim=24, rotary_dim=24, **SMALL), id="mqa"),
    pytest.param(PagedBatch([300], [7], head_dim=128, block_size=256), id="large blocks"),
    pytest.param(PagedBatch([9, 90], [70, 3], head_dim=256, rotary_dim=64, block_size=64), id="wide heads"),
    pytest.param(PagedBatch([9], [70], head_dim=256, rotary_dim=64, block_size=64, dtype="int8"), id="wide int8"),
    pytest.param(PagedBatch([0, 3, 16, 40], [1, 1, 1, 1], dtype="int8", **SMALL), id="int8 decode"),
    pytest.param(PagedBatch([5, 90, 0, 9], [3, 1, 9, 40], head_dim=10, rotary_dim=4, dtype="int8", **SMALL), id="int8"),
    pytest.param(PagedBatch([0, 3, 66], [19, 1, 28], window=5, **SMALL), id="window"),
    pytest.param(PagedBatch([0, 3, 66], [19, 1, 28], window=16, **SMALL), id="window of blocks"),
    pytest.param(PagedBatch([40, 90, 200], [1, 1, 1], window=37, **SMALL, dtype="int8"), id="window in decode"),
    pytest.param(PagedBatch([9, 70], [60, 1], window=1, **SMALL), id="window of one"),
    pytest.param(PagedBatch([0, 40], [19, 9], softcap=2.0, **SMALL), id="soft cap"),
    pytest.param(
        PagedBatch([0, 40, 90], [19, 9, 1], softcap=2.0, window=20, **SMALL, dtype="int8"), id="capped window int8"
    ),
    pytest.param(PagedBatch([0, 40, 90], [19, 9, 1], has_sinks=True, window=20, **SMALL), id="sinks"),
    pytest.param(PagedBatch([300, 7], [1, 1], has_sinks=True, softcap=3.0, **SMALL), id="sinks in decode"),
    pytest.param(PagedBatch([15, 500, 0, 16, 31], [1] * 5, num_heads=6, **SMALL), id="a long one in decode"),
]


@pytest.mark.parametrize("window", [0, 40])
def test_contexts_are_divided_into_as_many_pieces_of_equal_length_as_there_are_programs(device, window):
    lens = [900, 15, 16, 0, 300]
    ids = torch.tensor(lens, dtype=torch.int32, device=device)
    for num_programs in (5, 7, 20, 200):
        division = array(balanced_splits.divide(ids, num_programs, 16, window)).tolist()
        length, pieces, starts = division[0], division[1 : num_programs + 1], division[num_programs + 1 :]
        tiles = [each // 16 + 1 - (max(0, each - window + 1) // 16 if window else 0) for each in lens]
        counts = [-(-each // length) for each in tiles]
        assert starts == [sum(counts[:number]) for number in range(len(lens) + 1)]
        expected = [number | part << 16 for number, count in enumerate(counts) for part in range(count)]
        assert pieces == expected + [-1] * (num_programs - len(expected))
        assert length == 1 or sum(-(-each // (length - 1)) for each in tiles) > num_programs


def test_contexts_are_divided_once_in_a_forward_pass(device):
    lens, others = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([900, 15], [20, 600]))
    with forward_pass():
        division = balanced_splits.divide(lens, 5, 16, 0)
        assert balanced_splits.divide(lens, 5, 16, 0) is division
        assert not torch.equal(balanced_splits.divide(lens, 5, 16, 40), division)
        assert not torch.equal(balanced_splits.divide(others, 5, 16, 0), division)
    with forward_pass():
        assert balanced_splits.divide(lens, 5, 16, 0) is not division


@pytest.mark.parametrize("batch", BATCHES)
def test_paged_attention(ops, batch):
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    expected, found = batch.run(reference, expected_cache), batch.run(ops, cache)
    assert_close(found, expected, 3e-6)
    if batch.dtype == "int8":
        assert np.array_equal(cache, expected_cache)
    else:
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("counts", [[11, 1], [1, 1]], ids=["prefill", "decode"])
def test_positions_beyond_a_token_are_never_read(ops, counts, dtype):
    """A block is handed over without being cleared, so data of an earlier owner must not reach the answer."""
    batch = PagedBatch([0, 13], counts, num_heads=6, dtype=dtype, **SMALL)
    clean = np.zeros_like(batch.kv_cache)
    dirty = np.full_like(clean, -1 if dtype == "int8" else np.nan)  # whose bits are a scale that is no number
    for position in range(13):
        dirty[batch.block_tables[1, position // 16], :, :, position % 16] = 0
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


@pytest.mark.parametrize("counts", [[5, 1, 20], [1, 1, 1]], ids=["prefill", "decode"])
def test_head_norm_is_a_part_of_the_attention(device, rng, counts):
    batch = PagedBatch([3, 17, 0], counts, head_dim=24, rotary_dim=24, **SMALL)
    q_weight, k_weight = floats(rng, 24), floats(rng, 24)
    sizes = {"num_heads": 4, "num_kv_heads": 2}
    rest = (batch.query_starts, batch.context_lens, batch.block_tables)
    cache = batch.kv_cache.copy()
    normed = reference.head_norm(batch.qkv, q_weight, k_weight, **sizes, epsilon=1e-6)
    expected, _ = reference.paged_attention(normed, batch.cos_sin, cache, *rest, **sizes, scale=0.2)
    qkv, q_weight, k_weight, cos_sin, kv_cache, *rest = (
        tensor(each, device) for each in (batch.qkv, q_weight, k_weight, batch.cos_sin, batch.kv_cache, *rest)
    )
    given = (qkv, q_weight, k_weight, cos_sin, kv_cache, *rest)
    found, _ = cuda.head_norm_paged_attention(*given, **sizes, epsilon=1e-6, scale=0.2)
    assert_close(array(found), expected)
    assert_close(array(kv_cache), cache)


FEW = [
    PagedBatch([300, 7, 40, 0], [4, 1, 3, 2], num_heads=14, head_dim=64, rotary_dim=64, block_size=64),
    PagedBatch([0, 30, 17], [4, 2, 11], window=20, has_sinks=True, **SMALL),  # more than a few
    PagedBatch([90, 5], [5, 1], num_heads=48, num_kv_heads=2, **SMALL),
]


@pytest.mark.parametrize("batch", FEW)
def test_attention_of_a_few_tokens_of_each_request(device, batch):
    """The last tokens are those of a step that is filled up: a request in a block of its own."""
    cache, cos_sin = batch.kv_cache.copy(), np.concatenate([batch.cos_sin, batch.cos_sin[:3]])
    expected, count = batch.run(reference, cache), len(batch.qkv)
    lens, tables = np.append(batch.context_lens, 0), np.concatenate([batch.block_tables, batch.block_tables[:1] * 0])
    starts, kv_cache = np.append(batch.query_starts, count + 3), np.concatenate([batch.kv_cache, batch.kv_cache[:1]])
    tables[-1] = len(cache)
    qkv, cos_sin, found_cache, starts, lens, tables = (
        tensor(each, device)
        for each in (np.concatenate([batch.qkv, batch.qkv[:3]]), cos_sin, kv_cache, starts, lens, tables)
    )
    sinks = None if batch.sinks is None else tensor(batch.sinks, device)
    given = (qkv, cos_sin, found_cache, KnownStarts(starts.int(), usual_tokens=4), lens.int(), tables.int(), sinks)
    found, _ = cuda.paged_attention(*given, **batch.attributes)
    assert_close(array(found)[:count], expected, 3e-6)
    assert_close(array(found_cache)[:-1].astype(np.float32), cache.astype(np.float32))


@pytest.mark.parametrize("batch", [each for each in BATCHES if each.id in ("decode", "mixed", "split", "wide heads")])
def test_bf16_attention_loses_no_more_than_its_precision(device, batch):
    """Against the definition on the same rounded inputs."""
    if device.type != "cuda":
        pytest.skip("the interpreter does not know bf16")
    inputs = [from_bf16(to_bf16(batch.qkv)), batch.cos_sin, to_bf16(batch.kv_cache)]
    inputs += [batch.query_starts, batch.context_lens, batch.block_tables]
    sizes = {"num_heads": batch.num_heads, "num_kv_heads": batch.num_kv_heads, "scale": batch.head_dim**-0.5}
    qkv, *rest = (tensor(each, device) for each in inputs)
    found, _ = cuda.paged_attention(qkv.to(torch.bfloat16), *rest, **sizes)
    expected, _ = reference.paged_attention(*inputs, **sizes)
    found = from_bf16(array(found))
    assert np.linalg.norm(found - expected) < BF16_STEP * np.linalg.norm(expected)
