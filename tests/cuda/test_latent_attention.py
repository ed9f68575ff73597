"""Latent attention and products of heads on the GPU against their definitions in numpy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")


from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import invariant  # noqa: E402
from tests.cuda.arrays import BF16_STEP, Ops, assert_close, floats, tensor  # noqa: E402
from tests.pure.latent_batch import LatentBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter tells of it
modules = pytest.mark.parametrize("module", [cuda, invariant], ids=["default", "invariant"])
SMALL = {"block_size": 16}
BATCHES = {
    "first token": LatentBatch([0], [1], **SMALL),
    "decode": LatentBatch([0, 3, 16, 40], [1, 1, 1, 1], **SMALL, log_scale=0.1),
    "mixed": LatentBatch([0, 3, 16], [19, 1, 8], **SMALL, log_scale=0.1),
    "split": LatentBatch([7, 600], [1, 1], num_heads=3, latent_dim=32, rope_dim=16, block_size=64),
    "odd sizes": LatentBatch([5, 300], [30, 2], num_heads=6, latent_dim=38, rope_dim=6, **SMALL),
    "many heads": LatentBatch([0, 50], [4, 1], num_heads=70, nope_dim=0, **SMALL),
    "many heads in decode": LatentBatch([0, 50], [1, 1], num_heads=70, nope_dim=0, **SMALL),
}


@modules
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_latent_attention(device, module, batch):
    expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
    expected, found = batch.run(reference, expected_cache), batch.run(Ops(device, module), cache)
    assert_close(found, expected, 3e-6)
    assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


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
def test_16_bits_are_as_good_as_they_are(device, module, dtype, sizes):
    """Against the definition in float32 on the same rounded inputs, in the sizes of released models."""
    if device.type != "cuda":
        pytest.skip("the interpreter does not know bf16")
    batch = LatentBatch(**{"latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "block_size": 64, **sizes})
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    batch.attributes["scale"] = 0.05

    def rounded(numbers):
        return tensor(numbers, device).to(wide).float().cpu().numpy()

    batch.rows, cache = [rounded(each) for each in batch.rows], rounded(batch.kv_cache)
    given = [batch.cos_sin, cache, batch.starts, batch.lens, batch.tables]
    norm, attributes = batch.norm_weight, {**batch.attributes, "log_scale_from": 20}
    rows = [tensor(each, device, wide) for each in batch.rows]
    on_device = [tensor(norm, device), *(tensor(each, device) for each in given)]
    on_device[2] = on_device[2].to(wide)
    found, written = module.latent_attention(*rows, *on_device, **attributes)
    expected, wanted = reference.latent_attention(*batch.rows, norm, *given, **attributes)
    assert np.linalg.norm(found.float().cpu().numpy() - expected) < BF16_STEP * np.linalg.norm(expected)
    assert np.linalg.norm(written.float().cpu().numpy() - wanted) < BF16_STEP * np.linalg.norm(wanted)
    x, weight = rounded(batch.rows[1]), rounded(floats(np.random.default_rng(0), 40 * batch.num_heads, 128))
    found = module.head_linear(*(tensor(each, device, wide) for each in (x, weight)), num_heads=batch.num_heads)
    expected = reference.head_linear(x, weight, num_heads=batch.num_heads)
    assert np.linalg.norm(found.float().cpu().numpy() - expected) < BF16_STEP * np.linalg.norm(expected)
