"""Latent attention and products of heads on the GPU against their definitions in numpy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")


from engine.dtypes import latent_groups  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import invariant  # noqa: E402
from tests.cuda.arrays import BF16_STEP, Ops, assert_close, floats, tensor  # noqa: E402
from tests.pure.latent_batch import LatentBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter tells of it
modules = pytest.mark.parametrize("module", [cuda, invariant], ids=["default", "invariant"])
SMALL = {"block_size": 16}
INT8 = {**SMALL, "dtype": "int8"}
BATCHES = {
    "first token": LatentBatch([0], [1], **SMALL),
    "decode": LatentBatch([0, 3, 16, 40], [1, 1, 1, 1], **SMALL, log_scale=0.1),
    "mixed": LatentBatch([0, 3, 16], [19, 1, 8], **SMALL, log_scale=0.1),
    "split": LatentBatch([7, 600], [1, 1], num_heads=3, latent_dim=32, rope_dim=16, block_size=64),
    "odd sizes": LatentBatch([5, 300], [30, 2], num_heads=6, latent_dim=38, rope_dim=6, **SMALL),
    "many heads": LatentBatch([0, 50], [4, 1], num_heads=70, nope_dim=0, **SMALL),
    "many heads in decode": LatentBatch([0, 50], [1, 1], num_heads=70, nope_dim=0, **SMALL),
    "int8 decode": LatentBatch([0, 3, 15, 16, 40], [1, 1, 1, 1, 1], **INT8, log_scale=0.1),
    "int8 mixed": LatentBatch([0, 3, 16], [19, 1, 8], **INT8, log_scale=0.1),
    "int8 split": LatentBatch([7, 600], [1, 1], num_heads=3, latent_dim=132, rope_dim=68, block_size=64, dtype="int8"),
    "int8 groups": LatentBatch([5, 300], [30, 2], num_heads=6, latent_dim=100, rope_dim=16, **INT8),
}


@modules
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_latent_attention(device, module, batch):
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    expected, found = batch.run(reference, expected_cache), batch.run(Ops(device, module), cache)
    if batch.dtype != "int8":
        assert_close(found, expected, 3e-6)
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)
        return
    assert_close(found, expected, 1e-3)  # what is rounded may fall on the other side of a border
    groups = latent_groups(batch.latent_dim, batch.rope_dim)
    codes, scales = zip(*(reference.latent_parts(each, groups) for each in (cache, expected_cache)), strict=True)
    assert np.abs(codes[0].astype(int) - codes[1]).max() <= 1 and np.mean(codes[0] != codes[1]) < 1e-3
    assert np.mean(scales[0] != scales[1]) < 1e-2


@modules
@pytest.mark.parametrize("counts", [[11, 1], [1, 1]], ids=["prefill", "decode"])
def test_rows_beyond_a_token_are_never_read(device, module, counts):
    batch, ops = LatentBatch([0, 13], counts, **SMALL), Ops(device, module)
    clean = np.zeros_like(batch.kv_cache)
    dirty = np.full_like(clean, np.nan)
    for position in range(13):
        dirty[batch.tables[1, position // 16], position % 16] = 0
    assert np.array_equal(batch.run(ops, dirty), batch.run(ops, clean))


@modules
@pytest.mark.parametrize("num_rows", [0, 1, 18, 70, 130])
@pytest.mark.parametrize("sizes", [(24, 40, 48), (70, 70, 33)])
def test_products_of_heads(device, module, num_rows, sizes):
    width, stride, columns = sizes
    rng = np.random.default_rng(num_rows)
    x, weight = floats(rng, num_rows, 3 * stride), floats(rng, 3 * columns, width)
    found = Ops(device, module).head_linear(x, weight, num_heads=3)
    assert_close(found, reference.head_linear(x, weight, num_heads=3), 1e-5)


@modules
@pytest.mark.parametrize("has_int8_cache", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": [1000, 8, 300], "count": [1, 1, 1], "num_heads": 16},
        {"context": [0, 70, 300], "count": [200, 1, 70], "num_heads": 16},
        {"context": [100, 70], "count": [50, 1], "num_heads": 20, "latent_dim": 512},
        {"context": [500, 70], "count": [1, 1], "num_heads": 128, "latent_dim": 512},
        {"context": [0, 70], "count": [90, 1], "num_heads": 128, "latent_dim": 256},
    ],
    ids=["decode", "mixed", "of 20 heads", "of 128 heads", "prefill of 128 heads"],
)
def test_16_bits_lose_no_more_than_their_precision(device, module, dtype, has_int8_cache, sizes):  # noqa: PLR0913
    """Against the definition in float32 on the same rounded inputs, in the sizes of released models."""
    if device.type != "cuda":
        pytest.skip("the interpreter does not know bf16")
    stored = {"dtype": "int8"} if has_int8_cache else {}
    batch = LatentBatch(**{"latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "block_size": 64, **stored, **sizes})
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    batch.attributes["scale"] = 0.05

    def rounded(numbers):
        return tensor(numbers, device).to(wide).float().cpu().numpy()

    batch.rows, cache = [rounded(each) for each in batch.rows], batch.kv_cache
    cache = cache.copy() if has_int8_cache else rounded(cache)
    given = [batch.cos_sin, cache, batch.starts, batch.lens, batch.tables]
    norm, attributes = batch.norm_weight, {**batch.attributes, "log_scale_from": 20}
    rows = [tensor(each, device, wide) for each in batch.rows]
    on_device = [tensor(norm, device), *(tensor(each, device) for each in given)]
    on_device[2] = on_device[2] if has_int8_cache else on_device[2].to(wide)
    found, written = module.latent_attention(*rows, *on_device, **attributes)
    expected, wanted = reference.latent_attention(*batch.rows, norm, *given, **attributes)
    assert np.linalg.norm(found.float().cpu().numpy() - expected) < BF16_STEP * np.linalg.norm(expected)
    written = written.float().cpu().numpy()
    if has_int8_cache:
        groups = latent_groups(batch.latent_dim, batch.rope_dim)
        written, wanted = (
            reference.from_latent_int8(*reference.latent_parts(each, groups), groups)
            for each in (written.astype(np.int8), wanted)
        )
    assert np.linalg.norm(written - wanted) < BF16_STEP * np.linalg.norm(wanted)
    x, weight = rounded(batch.rows[1]), rounded(floats(np.random.default_rng(0), 40 * batch.num_heads, 128))
    found = module.head_linear(*(tensor(each, device, wide) for each in (x, weight)), num_heads=batch.num_heads)
    expected = reference.head_linear(x, weight, num_heads=batch.num_heads)
    assert np.linalg.norm(found.float().cpu().numpy() - expected) < BF16_STEP * np.linalg.norm(expected)
