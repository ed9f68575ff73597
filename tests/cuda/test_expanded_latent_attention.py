"""Latent attention of long prompts in expanded form against the definition, which is in absorbed form."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import expanded_mla, prefill_attention  # noqa: E402
from engine.ops.cuda.prefill_attention import KnownStarts  # noqa: E402
from tests.cuda.arrays import BF16_STEP, array, assert_close, floats, tensor  # noqa: E402
from tests.cuda.test_executor import a_loop, generate, golden_cases  # noqa: E402
from tests.pure.latent_batch import LatentBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter tells of it
ATTRIBUTES = {"log_scale_from": 20}
SMALL = {"block_size": 16}


@pytest.fixture
def expanded(monkeypatch):
    """Return the requests that are computed in expanded form. Chunks of 20 tokens count as long."""
    taken = []
    attend = expanded_mla._attend_to_expanded
    monkeypatch.setattr(prefill_attention, "SHORTEST_CHUNK", 20)
    monkeypatch.setattr(
        expanded_mla,
        "_attend_to_expanded",
        lambda step, chunks, *rest: taken.extend(each.request for each in chunks) or attend(step, chunks, *rest),
    )
    return taken


def weights_of(batch, value_dim):
    rng = np.random.default_rng(2)
    key_weight = floats(rng, batch.num_heads * batch.latent_dim, batch.nope_dim) / batch.nope_dim**0.5
    return key_weight, floats(rng, batch.num_heads * value_dim, batch.latent_dim) / batch.latent_dim**0.5


def wanted(batch, weights, cache):
    heads = {"num_heads": batch.num_heads}
    absorbed = reference.head_linear(batch.rows[1], weights[0], **heads)
    own = copy.copy(batch)
    own.rows = [absorbed, *batch.rows[1:]]
    return reference.head_linear(own.run(reference, cache), weights[1], **heads)


def computed(batch, weights, cache, device, dtype=torch.float32):
    """Return the attention, and the cache with what was written."""
    known = KnownStarts(tensor(batch.starts, device), prefill_attention.find(batch.starts, batch.lens))
    x, latent, key_weight, value_weight = (tensor(each, device).to(dtype) for each in (*batch.rows[1:], *weights))
    of_all, kv_cache = (tensor(each, device) for each in (batch.norm_weight, batch.cos_sin)), tensor(cache, device)
    kv_cache = kv_cache if batch.dtype == "int8" else kv_cache.to(dtype)
    given = latent, *of_all, kv_cache, known, tensor(batch.lens, device), tensor(batch.tables, device)
    found, same = cuda.projected_latent_attention(
        x, key_weight, x, *given, value_weight, **batch.attributes, **ATTRIBUTES
    )
    assert same is kv_cache
    return array(found.float()), kv_cache


BATCHES = {
    "alone": (LatentBatch([0], [40], **SMALL), [0]),
    "a chunk": (LatentBatch([37], [20], **SMALL, log_scale=0.1), [0]),
    "behind decodes": (LatentBatch([0, 9, 16, 0], [1, 1, 33, 75], **SMALL), [2, 3]),
    "behind a short prompt": (LatentBatch([50, 0, 100], [19, 64, 21], **SMALL, log_scale=0.1), [1, 2]),
    "before a short prompt": (LatentBatch([9, 50, 30, 0], [1, 22, 3, 17], **SMALL), [1, 2, 3]),
    "powers of two": (LatentBatch([3, 70], [50, 20], latent_dim=32, rope_dim=16, nope_dim=16, **SMALL), [0, 1]),
    "heads of another number": (LatentBatch([0, 60], [20, 35], num_heads=3, rope_dim=6, **SMALL), [0, 1]),
    "int8": (LatentBatch([20, 0, 70], [1, 40, 30], latent_dim=100, rope_dim=16, dtype="int8", **SMALL), [1, 2]),
}


@pytest.mark.parametrize(("batch", "long"), BATCHES.values(), ids=BATCHES)
def test_it_is_that_of_the_definition(device, expanded, batch, long):
    """Blocks contain NaN behind the last token of a request."""
    weights, cache = weights_of(batch, 13), batch.kv_cache.copy()
    if batch.dtype != "int8":
        for request, context in enumerate(batch.context):
            cache[batch.tables[request]] = np.where(
                np.arange(batch.tables.shape[1] * 16).reshape(-1, 16, 1) < context, cache[batch.tables[request]], np.nan
            )
    written = cache.copy()
    expected = wanted(batch, weights, written)
    found, kv_cache = computed(batch, weights, cache, device)
    assert expanded == long
    assert_close(found, expected, 1e-3 if batch.dtype == "int8" else 1e-5)
    if batch.dtype != "int8":
        assert np.allclose(array(kv_cache), written, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("most", [1, 3 * 128 * (10 + 16) * 4, 6 * 128 * (10 + 16) * 4])
def test_computing_some_heads_at_a_time_gives_the_same_result(device, expanded, monkeypatch, most):
    """1, 3 and 6 heads of 6 fit."""
    batch = LatentBatch([60, 0], [30, 38], num_heads=6, **SMALL)
    weights = weights_of(batch, 16)
    whole, _ = computed(batch, weights, batch.kv_cache, device)
    monkeypatch.setattr(expanded_mla, "MOST_BYTES", most)
    assert_close(computed(batch, weights, batch.kv_cache, device)[0], whole, 1e-6)
    assert expanded == [0, 1, 0, 1]


def test_without_long_prompts_it_is_in_absorbed_form(device, expanded):
    batch = LatentBatch([20, 5], [1, 19], **SMALL)
    weights, cache = weights_of(batch, 16), batch.kv_cache
    assert_close(computed(batch, weights, cache, device)[0], wanted(batch, weights, cache.copy()), 1e-5)
    assert expanded == []


@pytest.mark.parametrize(
    "batch",
    [
        LatentBatch([3, 70], [50, 20], num_heads=2, latent_dim=32, rope_dim=16, nope_dim=16, **SMALL),
        LatentBatch([25, 0], [30, 31], num_heads=3, rope_dim=6, **SMALL),
    ],
    ids=["by the copy engine", "by threads"],
)
def test_float16_loses_no_more_than_its_precision(device, expanded, batch):
    """Tiles of 16 bits are loaded by the copy engine if their sizes are powers of two."""
    weights = weights_of(batch, 16)
    batch.attributes["scale"] = 0.05
    found, _ = computed(batch, weights, batch.kv_cache, device, torch.float16)
    expected = wanted(batch, weights, batch.kv_cache.copy())
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)
    assert expanded == [0, 1]


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": [0], "count": [700], "num_heads": 16},
        {"context": [70, 0, 300], "count": [1, 200, 70], "num_heads": 16},
        {"context": [100, 70], "count": [50, 130], "num_heads": 20, "nope_dim": 192},
        {"context": [0, 70], "count": [90, 40], "num_heads": 32, "latent_dim": 256, "nope_dim": 64},
    ],
    ids=["alone", "mixed", "glm4_moe_lite", "mistral4"],
)
def test_16_bits_lose_no_more_than_their_precision(device, expanded, dtype, is_int8, sizes):  # noqa: PLR0913
    """Against the definition in float32 on the same rounded inputs, in the sizes of released models. In 16 bits, keys
    and values are rounded here, queries and sums in the absorbed form."""
    if device.type != "cuda":
        pytest.skip("the interpreter does not know bf16")
    stored = {"dtype": "int8"} if is_int8 else {}
    batch = LatentBatch(**{"latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "block_size": 64, **stored, **sizes})
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    batch.attributes["scale"] = 0.05

    def rounded(numbers):
        return tensor(numbers, device).to(wide).float().cpu().numpy()

    weights = [rounded(each) for each in weights_of(batch, 128)]
    batch.rows, cache = [rounded(each) for each in batch.rows], batch.kv_cache
    cache = cache if is_int8 else rounded(cache)
    expected = wanted(batch, weights, cache.copy())
    found, _ = computed(batch, weights, cache, device, wide)
    assert np.linalg.norm(found - expected) < BF16_STEP * np.linalg.norm(expected)
    assert expanded


def test_the_tokens_stay_the_same(exported, device, expanded):
    """Prompts are whole in a step, in chunks, or too short."""
    prompts = [prompt for prompt, _ in golden_cases("qwen2", [7, 63]).values()]

    def answers():
        loop = a_loop(exported("deepseek_v2"), device, max_num_batched_tokens=40, use_cudagraph=False)
        return generate(loop, prompts, max_new_tokens=2)

    found = answers()
    assert expanded
    expanded.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "SHORTEST_CHUNK", 1 << 20)
        assert answers() == found
    assert not expanded
