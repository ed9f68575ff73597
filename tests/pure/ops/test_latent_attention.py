"""Latent attention and products of heads against their definitions, and the order of their sums."""

import numpy as np
import pytest

from engine.dtypes import from_bf16, latent_groups, to_bf16
from engine.ops import cpu, reference
from engine.ops.cpu.calls import ArgumentError
from tests.pure.latent_batch import LatentBatch

isas = pytest.mark.parametrize("isa", cpu.available_isas())


ODD = {"latent_dim": 38, "rope_dim": 6, "block_size": 5}


@pytest.mark.slow
@isas
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": [0, 3, 16], "count": [19, 1, 8]},
        {"context": [7, 30], "count": [1, 2], "num_heads": 3, **ODD},
        {"context": [7, 63, 64, 65], "count": [60, 1, 2, 65], "latent_dim": 200, "rope_dim": 68, "block_size": 64},
        {"context": [1100], "count": [3], "num_heads": 16, "latent_dim": 64, "block_size": 64, "log_scale": 0.1},
        {"context": [0, 510], "count": [40, 30], "num_heads": 70, "nope_dim": 0},
    ],
    ids=["mixed", "odd", "groups", "long", "many heads"],
)
def test_latent_attention_matches_reference(isa, sizes, dtype):
    if dtype == "int8" and ODD.items() <= sizes.items():
        sizes = {**sizes, "latent_dim": 36, "rope_dim": 4}  # multiples of 4
    batch = LatentBatch(**sizes, dtype=dtype)
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    error = np.abs(batch.run(cpu.load(isa), cache) - batch.run(reference, expected_cache))
    if dtype == "bf16":  # what is rounded may fall on the other side of a border
        assert error.max() < 1e-2 and error.mean() < 2e-4
        cache, expected_cache = from_bf16(cache), from_bf16(expected_cache)
        assert np.mean(cache != expected_cache) < 1e-3
        assert np.allclose(cache, expected_cache, rtol=2**-7)
    elif dtype == "int8":
        assert error.max() < 2e-3 and error.mean() < 1e-4
        groups = latent_groups(batch.latent_dim, batch.rope_dim)
        codes, scales = zip(*(reference.latent_parts(each, groups) for each in (cache, expected_cache)), strict=True)
        assert np.array_equal(*scales)
        assert np.abs(codes[0].astype(int) - codes[1]).max() <= 1 and np.mean(codes[0] != codes[1]) < 1e-3
    else:
        assert error.max() < (5e-6 if batch.latent_dim < 100 else 5e-5)
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


@isas
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_latent_attention_is_the_expanded_attention(isa, dtype):
    """The op, with the products of heads around it, computes attention with keys and values of each head."""
    batch, rng = LatentBatch([0], [40], dtype=dtype), np.random.default_rng(2)
    ops, w_k = cpu.load(isa), rng.standard_normal((4, 10, 24), np.float32)
    w_v = rng.standard_normal((4, 12, 24), np.float32) / 4
    batch.rows[0] = ops.head_linear(batch.rows[1], w_k.swapaxes(1, 2).reshape(-1, 10).copy(), num_heads=4)
    out = ops.head_linear(batch.run(ops, batch.kv_cache.copy()), w_v.reshape(-1, 24), num_heads=4)
    q, latent = batch.rows[1].reshape(40, 4, 18), batch.rows[2]
    normed = reference.rms_norm(latent[:, :24], batch.norm_weight, epsilon=1e-6)
    turned = reference.rotate(latent[:, None, 24:], batch.cos_sin)
    keys = np.concatenate([np.einsum("tl,hnl->thn", normed, w_k), np.repeat(turned, 4, axis=1)], axis=-1)
    queries = np.concatenate([q[..., :10], reference.rotate(q[..., 10:], batch.cos_sin)], axis=-1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) * 0.3 + np.where(np.tri(40), 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum(
        "hqk,khv->qhv", weights / weights.sum(-1, keepdims=True), np.einsum("tl,hvl->thv", normed, w_v)
    )
    assert np.abs(out - expected.reshape(40, -1)).max() < (2e-5 if dtype == "f32" else 0.15)


@isas
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_latent_attention_does_not_depend_on_chunks_threads_and_batch(isa, dtype, num_threads):
    """Long contexts are shared by the threads of a small step, and read by one thread in a large one."""
    batch = LatentBatch([0, 1020, 505, 70], [130, 1, 24, 3], num_heads=12, dtype=dtype)
    ops, whole, cut, before = cpu.load(isa), batch.kv_cache.copy(), batch.kv_cache.copy(), cpu.num_threads()
    together = batch.run(ops, whole)
    cpu.set_num_threads(num_threads)
    try:
        for b, count in enumerate(batch.count):
            for first in range(0, count, 24):
                part = first, min(first + 24, count)
                found = batch.run(ops, cut, {b: part})
                assert np.array_equal(found, together[batch.starts[b] + part[0] : batch.starts[b] + part[1]])
    finally:
        cpu.set_num_threads(before)
    assert np.array_equal(cut, whole)


@isas
@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("num_heads", [2, 12])
def test_rows_of_the_cache_beyond_a_token_are_never_read(isa, dtype, num_heads):
    batch = LatentBatch([0, 13], [11, 1], num_heads=num_heads, dtype=dtype)
    clean, dirty = np.zeros_like(batch.kv_cache), np.full_like(batch.kv_cache, -1 if dtype == "int8" else np.nan)
    parts = [clean], [dirty]
    if dtype == "int8":  # two bytes of -1 are a scale that is NaN
        parts = [reference.latent_parts(each, latent_groups(24, 8)) for each in (clean, dirty)]
    for position in range(13):
        at = batch.tables[1, position // 8], position % 8
        for before, after in zip(*parts, strict=True):
            after[at] = before[at]
    ops = cpu.load(isa)
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


@isas
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("num_tokens", "width", "num_out"), [(1, 128, 512), (70, 33, 130), (9, 512, 20)])
def test_products_of_heads_match_reference_row_by_row(isa, dtype, num_tokens, width, num_out):  # noqa: PLR0913
    rng, ops = np.random.default_rng(0), cpu.load(isa)
    x = rng.standard_normal((num_tokens, 3 * (width + 5)), np.float32)
    weight = rng.standard_normal((3 * num_out, width), np.float32)
    weight = to_bf16(weight) if dtype == "bf16" else weight
    found = ops.head_linear(x, weight, num_heads=3)
    assert np.abs(found - reference.head_linear(x, weight, num_heads=3)).max() < 1e-4
    one_by_one = [ops.head_linear(x[t : t + 1], weight, num_heads=3) for t in range(num_tokens)]
    assert np.array_equal(found, np.concatenate(one_by_one))


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match=r"head_linear: K is 12, stride is 10, needs K <= stride"):
        cpu.load().head_linear(np.zeros((2, 30), np.float32), np.zeros((6, 12), np.float32), num_heads=3)
    batch = LatentBatch([3, 0], [1, 3])
    batch.tables[:] = 99
    with pytest.raises(ArgumentError, match=r"latent_attention: block_tables holds 99, needs 0 .. 3"):
        batch.run(cpu.load(), batch.kv_cache)
