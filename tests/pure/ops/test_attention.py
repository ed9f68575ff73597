"""Paged attention against its definition, which sees one token at a time."""

import numpy as np
import pytest

from engine.dtypes import from_bf16
from engine.ops import cpu, reference
from engine.ops.reference import from_cached_int8, to_cached_int8
from tests.pure.paged_batch import PagedBatch

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())

BATCHES = [
    pytest.param(PagedBatch([0], [1]), id="first token"),
    pytest.param(PagedBatch([0, 3, 16], [19, 1, 8]), id="mixed"),
    pytest.param(PagedBatch([0, 3, 16], [19, 1, 8], dtype="bf16"), id="mixed bf16"),
    pytest.param(PagedBatch([7, 100], [1, 1], num_heads=14, head_dim=64, rotary_dim=64, block_size=64), id="decode"),
    pytest.param(PagedBatch([70], [150], num_heads=14, head_dim=64, rotary_dim=64, block_size=64), id="prefill"),
    pytest.param(PagedBatch([5, 0], [3, 9], head_dim=10, rotary_dim=4, block_size=5, dtype="bf16"), id="odd sizes"),
    pytest.param(PagedBatch([5], [30], num_heads=3, num_kv_heads=3, head_dim=80, rotary_dim=32), id="multi-head"),
    pytest.param(PagedBatch([90], [9], num_heads=80, num_kv_heads=1, head_dim=24, rotary_dim=24), id="multi-query"),
    pytest.param(PagedBatch([0, 3, 16], [19, 1, 8], dtype="int8"), id="mixed int8"),
    pytest.param(PagedBatch([5, 0], [3, 9], head_dim=10, rotary_dim=4, block_size=5, dtype="int8"), id="odd int8"),
    pytest.param(PagedBatch([300], [7], head_dim=128, block_size=256, dtype="int8"), id="large blocks int8"),
    pytest.param(PagedBatch([300], [7], head_dim=128, block_size=256, dtype="bf16"), id="large blocks"),
    pytest.param(PagedBatch([70], [150], num_heads=14, head_dim=64, block_size=64, dtype="int8"), id="prefill int8"),
    pytest.param(PagedBatch([7, 100], [1, 2], num_heads=6, head_dim=36, block_size=24, dtype="bf16"), id="few bf16"),
    pytest.param(PagedBatch([7, 100], [1, 2], num_heads=6, head_dim=70, block_size=24, dtype="int8"), id="few int8"),
    pytest.param(PagedBatch([0, 3, 66], [19, 1, 28], window=5), id="window"),
    pytest.param(PagedBatch([0, 3, 66], [19, 1, 28], window=16, dtype="bf16"), id="window of blocks"),
    pytest.param(PagedBatch([40, 90, 200], [1, 1, 1], window=37, dtype="int8"), id="window in decode"),
    pytest.param(PagedBatch([9, 70], [60, 1], window=1), id="window of one"),
    pytest.param(PagedBatch([0, 40], [19, 9], softcap=2.0), id="soft cap"),
    pytest.param(PagedBatch([0, 40, 90], [19, 9, 1], softcap=2.0, window=20, dtype="int8"), id="capped window int8"),
    pytest.param(PagedBatch([0, 40, 90], [19, 9, 1], has_sinks=True, window=20), id="sinks"),
    pytest.param(PagedBatch([300, 7], [1, 1], has_sinks=True, softcap=3.0), id="sinks in decode"),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_paged_attention_matches_reference(isa, batch):
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    expected = batch.run(reference, expected_cache)
    found = batch.run(cpu.load(isa), cache)
    error = np.abs(found - expected)
    if batch.dtype == "bf16":  # what is rounded may fall on the other side of a border
        assert error.max() < 2e-3 and error.mean() < 1e-4
    elif batch.dtype == "int8":  # queries and weights have 16 bits
        assert error.max() < 3e-4 and error.mean() < 2e-5
    else:
        assert error.max() < 3e-6
    if batch.dtype == "bf16":
        cache, expected_cache = from_bf16(cache), from_bf16(expected_cache)
        assert np.mean(cache != expected_cache) < 1e-3
        assert np.allclose(cache, expected_cache, rtol=2**-7)
    elif batch.dtype == "int8":
        cache, expected_cache = from_cached_int8(cache), from_cached_int8(expected_cache)
        assert np.mean(cache != expected_cache) < 1e-3
        assert np.allclose(cache, expected_cache, rtol=2**-6)
    else:
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "nan"), [("f32", np.nan), ("bf16", 0x7FC0), ("int8", -1)])
def test_positions_beyond_a_token_are_never_read(isa, dtype, nan):
    """A block is handed over without being cleared, so data of an earlier owner must not reach the answer."""
    batch = PagedBatch([0, 13], [11, 1], num_heads=6, dtype=dtype)
    clean, dirty = np.zeros_like(batch.kv_cache), np.full_like(batch.kv_cache, nan)
    for position in range(13):
        block = batch.block_tables[1, position // 8]
        dirty[block, :, :, position % 8] = clean[block, :, :, position % 8]
    ops = cpu.load(isa)
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


@pytest.mark.parametrize(("dtype", "nan"), [("f32", np.nan), ("bf16", 0x7FC0), ("int8", -1)])
def test_blocks_behind_a_window_are_never_read(isa, dtype, nan):
    """They have been freed, and their current owner may write anything."""
    batch = PagedBatch([45, 30], [9, 1], dtype=dtype, window=10)
    freed = [[0, 1, 2, 3], [0, 1]]  # positions up to 31 and 15
    clean, dirty = batch.kv_cache.copy(), batch.kv_cache.copy()
    for table, blocks in zip(batch.block_tables, freed, strict=True):
        dirty[table[blocks]] = nan
    ops = cpu.load(isa)
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


def test_chunks_of_a_prompt_see_the_same_window(isa):
    batch = PagedBatch([3], [60], num_heads=6, window=21, softcap=4.0, has_sinks=True)
    ops, whole, cut = cpu.load(isa), batch.kv_cache.copy(), batch.kv_cache.copy()
    parts = [batch.run_part(ops, cut, {0: part}) for part in ((0, 7), (7, 8), (8, 41), (41, 60))]
    assert np.array_equal(np.concatenate(parts), batch.run(ops, whole))


def test_keys_and_values_of_bytes_are_half_a_step_from_their_numbers(isa):
    batch = PagedBatch([0], [30], dtype="int8", rotary_dim=0)
    batch.cos_sin = batch.cos_sin[:, :0]
    batch.qkv *= np.geomspace(1e-6, 1e6, 30, dtype=np.float32)[:, None]
    batch.qkv[3] = 0
    batch.run(cpu.load(isa), cache := batch.kv_cache.copy())
    kept = from_cached_int8(cache)[batch.block_tables[0]]  # [blocks, 2, heads, rows, D]
    kept = np.moveaxis(kept, 3, 1).reshape(-1, 2, 2, 16)[:30]
    wanted = batch.qkv.reshape(30, 8, 16)[:, 4:].reshape(kept.shape)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    assert (np.abs(kept - wanted) <= 0.51 / 127 * largest).all()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("what", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("head", [5, 7], ids=["key", "value"])
def test_what_is_not_a_number_in_the_cache_is_none_in_the_answer(isa, dtype, what, head):
    batch = PagedBatch([0], [12], dtype=dtype)
    batch.qkv[4, head * 16 : (head + 1) * 16] = what
    found = batch.run(cpu.load(isa), batch.kv_cache.copy())
    assert np.isfinite(found[:4]).all() and not np.isfinite(found[4:, 2 * 16 :]).any()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 9], ids=["few rows", "many"])
def test_sums_of_bytes_fit_into_32_bits(isa, count):
    batch = PagedBatch([1014], [count], head_dim=1024, rotary_dim=0, block_size=1024, dtype="int8")
    batch.cos_sin = batch.cos_sin[:, :0]
    batch.qkv[:] = 1
    batch.kv_cache[:] = to_cached_int8(np.ones((1024,), np.float32))
    assert np.allclose(batch.run(cpu.load(isa), batch.kv_cache), 1, rtol=1e-3)
    batch.qkv[:, : 2 * 1024] = -1  # half of the queries: those of the first key head
    batch.kv_cache[:, 0, :, ::2] = to_cached_int8(np.full((1024,), -1, np.float32))
    expected = batch.run(reference, batch.kv_cache.copy())
    assert np.allclose(batch.run(cpu.load(isa), batch.kv_cache), expected, rtol=1e-2)


def test_scores_may_be_large(isa):
    batch = PagedBatch([20], [5])
    batch.qkv *= 100
    found = batch.run(cpu.load(isa), batch.kv_cache.copy())
    expected = batch.run(reference, batch.kv_cache.copy())
    assert np.allclose(found, expected, rtol=1e-3, atol=0.2)
