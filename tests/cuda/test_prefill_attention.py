"""Long prompts that begin in a step: their attention takes another way, to the same sums."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.dtypes import from_bf16, to_bf16  # noqa: E402
from engine.ops import cuda, reference  # noqa: E402
from engine.ops.cuda import prefill_attention  # noqa: E402
from engine.ops.cuda.prefill_attention import KnownStarts, PromptChunk  # noqa: E402
from tests.cuda.arrays import array, tensor  # noqa: E402
from tests.cuda.test_executor import a_loop, generate, golden_cases  # noqa: E402
from tests.pure.paged_batch import PagedBatch  # noqa: E402


@pytest.fixture
def ways(monkeypatch):
    """Let short prompts count as long. Return a list with the number of tokens of each call of `attend`."""
    taken = []
    attend = prefill_attention.attend
    monkeypatch.setattr(prefill_attention, "SHORTEST", 30)
    monkeypatch.setattr(prefill_attention, "SHORTEST_CHUNK", 20)
    monkeypatch.setattr(prefill_attention, "STEP", 32)
    monkeypatch.setattr(
        prefill_attention, "attend", lambda query, *rest: taken.append(len(query)) or attend(query, *rest)
    )
    return taken


@pytest.mark.parametrize(
    ("contexts", "counts", "found", "num_fresh"),
    [
        ([0], [30], [PromptChunk(0, 0, 30)], 1),
        ([0], [29], [PromptChunk(0, 0, 29)], 0),
        ([0], [19], [], 0),
        ([1], [30], [PromptChunk(0, 0, 30, 1)], 0),
        ([9, 0, 0], [1, 40, 64], [PromptChunk(1, 1, 41), PromptChunk(2, 41, 105)], 2),
        ([0, 4, 0], [19, 40, 31], [PromptChunk(1, 19, 59, 4), PromptChunk(2, 59, 90)], 1),
        ([0, 9, 0], [50, 5, 2], [PromptChunk(0, 0, 50), PromptChunk(1, 50, 55, 9), PromptChunk(2, 55, 57)], 0),
        ([0, 9], [50, 1], [], 0),
    ],
)
def test_found_are_the_last_ones_from_a_long_one_on(ways, contexts, counts, found, num_fresh):
    chunks = prefill_attention.find(np.cumsum([0, *counts]), np.array(contexts))
    assert chunks == found
    assert KnownStarts(torch.zeros(1), chunks).fresh == found[len(found) - num_fresh :]


@pytest.mark.parametrize(
    "batch",
    [
        PagedBatch([0], [64], head_dim=64, rotary_dim=64, block_size=16),
        PagedBatch([9, 3, 0, 0], [1, 1, 37, 75], num_heads=8, head_dim=128, rotary_dim=128, block_size=16),
        PagedBatch([20, 0], [19, 50], num_heads=3, num_kv_heads=3, head_dim=80, rotary_dim=32, block_size=16),
        PagedBatch([0], [64], num_heads=2, num_kv_heads=1, head_dim=256, rotary_dim=64, block_size=16),
    ],
    ids=["alone", "behind decodes", "behind a chunk", "wide heads"],
)
def test_their_attention_is_that_of_the_definition(device, ways, batch):
    """The contents of a block behind the last token, which are NaN here, do not reach the result."""
    is_gpu = device.type == "cuda"
    cache = np.full_like(batch.kv_cache, np.nan)
    for request, context in enumerate(batch.context):
        for position in range(context):
            at = batch.block_tables[request, position // 16], slice(None), slice(None), position % 16
            cache[at] = from_bf16(to_bf16(batch.kv_cache[at]))
    qkv = from_bf16(to_bf16(batch.qkv)) if is_gpu else batch.qkv
    where = batch.query_starts, batch.context_lens, batch.block_tables
    sizes = {"num_heads": batch.num_heads, "num_kv_heads": batch.num_kv_heads, "scale": batch.head_dim**-0.5}
    expected_cache = cache.copy()
    expected, _ = reference.paged_attention(qkv, batch.cos_sin, expected_cache, *where, **sizes)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    starts, contexts, tables = (tensor(each, device) for each in where)
    known = KnownStarts(starts, prefill_attention.find(*where[:2]))
    kv_cache = tensor(cache, device).to(dtype)
    found, _ = cuda.paged_attention(
        tensor(qkv, device).to(dtype), tensor(batch.cos_sin, device), kv_cache, known, contexts, tables, **sizes
    )
    assert ways == [n for n, context in zip(batch.count, batch.context, strict=True) if not context]
    error = np.linalg.norm(array(found.float()) - expected) / np.linalg.norm(expected)
    assert error < (4e-3 if is_gpu else 1e-6)
    assert np.allclose(array(kv_cache.float()), expected_cache, rtol=8e-3 if is_gpu else 1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "batch",
    [
        PagedBatch([0], [40], head_dim=14, rotary_dim=14, dtype="int8", block_size=16),  # with its scales 16 bytes wide
        PagedBatch([0], [40], head_dim=10, rotary_dim=4, block_size=16),
        PagedBatch([0], [40], head_dim=264, block_size=16),
    ],
    ids=["int8", "odd heads", "large heads"],
)
def test_prompts_that_it_cannot_compute_use_the_ordinary_kernel(device, ways, batch):
    where = [tensor(each, device) for each in (batch.query_starts, batch.context_lens, batch.block_tables)]
    known = KnownStarts(where[0], [PromptChunk(0, 0, 40)])
    sizes = {"num_heads": 4, "num_kv_heads": 2, "scale": 0.25}
    outs = [
        cuda.paged_attention(
            *(tensor(each, device) for each in (batch.qkv, batch.cos_sin, batch.kv_cache)), starts, *where[1:], **sizes
        )[0]
        for starts in (known, where[0])
    ]
    assert torch.equal(*outs) and not ways


def test_the_tokens_stay_those_of_transformers(exported, device, ways):
    """Prompts are whole in a step, in chunks, or too short. On a GPU float32 uses the ordinary kernel."""
    cases = golden_cases("qwen2", [7, 130, 200])
    loop = a_loop(exported("qwen2"), device, max_num_batched_tokens=160, use_cudagraph=False)
    found = generate(loop, [prompt for prompt, _ in cases.values()], max_new_tokens=3)
    assert found == [tokens[:3] for _, tokens in cases.values()]
    assert bool(ways) == (device.type != "cuda")
