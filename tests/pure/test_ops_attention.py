"""Paged attention against its definition, which sees one token at a time."""

import numpy as np
import pytest

from engine.dtypes import from_bf16
from engine.ops import cpu, reference
from engine.ops.reference import from_cached_int8
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
]


@pytest.mark.parametrize("batch", BATCHES)
def test_paged_attention_matches_reference(isa, batch):
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    expected = batch.run(reference, expected_cache)
    found = batch.run(cpu.load(isa), cache)
    assert np.abs(found - expected).max() < 3e-6
    if batch.dtype == "bf16":  # a rotated key may fall on the other side of a rounding border
        cache, expected_cache = from_bf16(cache), from_bf16(expected_cache)
        assert np.mean(cache != expected_cache) < 1e-3
        assert np.allclose(cache, expected_cache, rtol=2**-7)
    elif batch.dtype == "int8":
        cache, expected_cache = from_cached_int8(cache), from_cached_int8(expected_cache)
        assert np.mean(cache != expected_cache) < 1e-3
        assert np.allclose(cache, expected_cache, rtol=2**-6)
    else:
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


def test_positions_beyond_a_token_are_never_read(isa):
    """A block is handed on as it is: whatever an earlier owner left must not reach the answer."""
    batch = PagedBatch([0, 13], [11, 1], num_heads=6)
    clean, dirty = np.zeros_like(batch.kv_cache), np.full_like(batch.kv_cache, np.nan)
    for position in range(13):
        block = batch.block_tables[1, position // 8]
        dirty[block, :, :, position % 8] = clean[block, :, :, position % 8]
    ops = cpu.load(isa)
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


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
def test_what_is_not_a_number_in_the_cache_is_none_in_the_answer(isa, dtype):
    batch = PagedBatch([0], [12], dtype=dtype)
    batch.qkv[4, 5 * 16 + 3] = np.nan  # a key
    found = batch.run(cpu.load(isa), batch.kv_cache.copy())
    assert np.isfinite(found[:4]).all() and np.isnan(found[4:, 2 * 16 :]).all()


def test_scores_may_be_large(isa):
    batch = PagedBatch([20], [5])
    batch.qkv *= 100
    found = batch.run(cpu.load(isa), batch.kv_cache.copy())
    expected = batch.run(reference, batch.kv_cache.copy())
    assert np.allclose(found, expected, rtol=1e-3, atol=0.2)
