"""BATCH_INVARIANT=1: batch composition, chunks, drafts, preemption and the number of programs change no bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.types import Request, Sampling  # noqa: E402
from engine.dtypes import latent_groups  # noqa: E402
from engine.ops.cuda import invariant  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.cuda.test_executor import a_loop, answers_of  # noqa: E402
from tests.pure.paged_batch import PagedBatch  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("products_are_chains_of_sums"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"]),
]


def randn(device, dtype, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(getattr(torch, dtype)).to(device)


def test_a_row_of_a_product_is_the_same_bits_among_any_others(device, dtype):
    """Every tile is tested, for columns and widths that it does not divide."""
    sizes = [(150, 70), (136, 70)] if IS_INTERPRETED else [(1500, 70), (4096, 6144), (1032, 14000)]
    for width, columns in sizes:
        x, weight = randn(device, dtype, 600, width), randn(device, dtype, columns, width)
        bias = randn(device, dtype, columns)
        for op in (invariant.linear, invariant.gated_linear, lambda *of: invariant.logits(*of[:2])):
            whole = op(x, weight, bias)
            is_last = op not in (invariant.linear, invariant.gated_linear)
            expected = x.double() @ weight.double().t() + (0 if is_last else bias.double())
            if op is invariant.gated_linear:
                gate, up = expected.chunk(2, 1)
                expected = torch.nn.functional.silu(gate) * up
            error = (whole.double() - expected).abs().max() / expected.abs().max()
            assert error < (5e-5 if whole.dtype == torch.float32 else 2**-6)
            for count in (1, 8, 9, 64, 65, 200, 300):
                for start in (0, 5, 70, 600 - count):
                    rows = slice(start, start + count)
                    assert torch.equal(op(x[rows].contiguous(), weight, bias), whole[rows])


HEADS = [(4, 2, 20), (6, 1, 64)] if IS_INTERPRETED else [(4, 2, 20), (32, 8, 128), (14, 2, 64), (80, 1, 24)]


@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_the_same_bits_in_chunks_and_in_any_batch(device, dtype, heads):
    num_heads, num_kv_heads, head_dim = heads
    length, others = (300, 12) if IS_INTERPRETED else (1100, 150)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "scale": head_dim**-0.5}
    num_blocks = -(-length // 16)
    qkv = randn(device, dtype, length, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = randn(device, "float32", length, head_dim)

    def attend(chunks, num_others=0):
        """Compute attention where every other request has the first tokens of the same prompt, in blocks of its own."""
        cache = randn(device, dtype, (1 + num_others) * num_blocks, 2, num_kv_heads, 16, head_dim)
        tables = torch.arange(len(cache), dtype=torch.int32, device=device).view(-1, num_blocks)
        found, start = [], 0
        for count in chunks:
            rows = torch.tensor([*range(start, start + count), *[0] * num_others], device=device)
            starts = torch.tensor([0, *range(count, len(rows) + 1)], dtype=torch.int32, device=device)
            contexts = torch.tensor([start] + [0] * num_others, dtype=torch.int32, device=device)
            out, _ = invariant.paged_attention(qkv[rows], angles[rows], cache, starts, contexts, tables, **sizes)
            found.append(out[:count])
            start += count
        return torch.cat(found)

    whole = attend([length])
    assert torch.isfinite(whole).all()
    assert torch.equal(attend([length - 43, 1, 1, 1, 39, 1]), whole)
    assert torch.equal(attend([7, 250, 1, 1, length - 259], others), whole)

    # A decode step of every position at once, of requests that have the same blocks.
    cache = randn(device, dtype, num_blocks, 2, num_kv_heads, 16, head_dim)
    starts, tables = (torch.arange(count, dtype=torch.int32, device=device) for count in (length + 1, num_blocks))
    invariant.paged_attention(qkv, angles, cache, starts[[0, length]], starts[:1], tables[None], **sizes)
    at = starts[: length : 29 if IS_INTERPRETED else 1].contiguous()
    steps = starts[: len(at) + 1], at, tables.repeat(len(at), 1)
    found, _ = invariant.paged_attention(qkv[at], angles[at], cache, *steps, **sizes)
    assert torch.equal(found, whole[at])


@pytest.mark.parametrize("has_int8_cache", [False, True])
@pytest.mark.parametrize("num_heads", [3] if IS_INTERPRETED else [3, 16, 20, 128])
def test_latent_attention_is_the_same_bits_in_chunks_and_in_any_batch(device, dtype, num_heads, has_int8_cache):
    if IS_INTERPRETED and dtype == "float16":
        pytest.skip("takes minutes with the interpreter")
    length, latent_dim, rope_dim = (265, 40, 8) if IS_INTERPRETED else (1100, 512, 64)
    num_blocks, row = -(-length // 16), latent_dim + rope_dim
    sizes = {"num_heads": num_heads, "epsilon": 1e-6, "scale": 0.1, "log_scale": 0.1, "log_scale_from": 100}
    rows = [randn(device, dtype, length, width) for width in (num_heads * latent_dim, num_heads * (rope_dim + 8), row)]
    norm, angles = randn(device, "float32", latent_dim), randn(device, "float32", length, rope_dim)
    numbers = torch.arange(length + 1, dtype=torch.int32, device=device)

    def attend(rows_of, cache, starts, contexts, tables):
        given = [each[rows_of] for each in rows]
        return invariant.latent_attention(*given, norm, angles[rows_of], cache, starts, contexts, tables, **sizes)[0]

    def in_chunks(chunks, num_others=0):
        """Compute attention where every other request has the first token of the same prompt, in blocks of its own."""
        cache = randn(device, dtype, (1 + num_others) * num_blocks, 16, row)
        if has_int8_cache:
            row_bytes = row + 2 * len(latent_groups(latent_dim, rope_dim))
            cache = torch.zeros(len(cache), 16, row_bytes, dtype=torch.int8, device=device)
        tables = torch.arange(len(cache), dtype=torch.int32, device=device).view(-1, num_blocks)
        found, start = [], 0
        for count in chunks:
            rows_of = torch.tensor([*range(start, start + count), *[0] * num_others], device=device)
            starts = torch.tensor([0, *range(count, len(rows_of) + 1)], dtype=torch.int32, device=device)
            contexts = torch.tensor([start] + [0] * num_others, dtype=torch.int32, device=device)
            found.append(attend(rows_of, cache, starts, contexts, tables)[:count])
            start += count
        return torch.cat(found), cache

    whole, cache = in_chunks([length])
    assert torch.isfinite(whole).all()
    assert torch.equal(in_chunks([length - 43, 1, 1, 1, 39, 1])[0], whole)
    assert torch.equal(in_chunks([7, 250, 1, 1, length - 259], 3 if IS_INTERPRETED else 150)[0], whole)
    at = numbers[: length : 29 if IS_INTERPRETED else 1].contiguous()  # a decode step of every position at once
    tables = numbers[:num_blocks].repeat(len(at), 1)
    assert torch.equal(attend(at, cache, numbers[: len(at) + 1], at, tables), whole[at])


def test_products_of_heads_are_the_same_bits_among_any_others(device, dtype):
    sizes = [(24, 40, 48)] if IS_INTERPRETED else [(128, 192, 512), (512, 512, 128), (192, 256, 512)]
    for width, stride, columns in sizes:
        x, weight = randn(device, dtype, 300, 4 * stride), randn(device, dtype, 4 * columns, width)
        whole = invariant.head_linear(x, weight, num_heads=4)
        for count in (1, 16, 17, 64, 65, 200):
            for start in (0, 5, 300 - count):
                rows = slice(start, start + count)
                found = invariant.head_linear(x[rows].contiguous(), weight, num_heads=4)
                assert torch.equal(found, whole[rows])


def test_attention_is_as_the_definition_says(device, dtype):
    if dtype != "float32":
        pytest.skip("the definition rounds 16 bits elsewhere; the executor's tests compare them")
    from engine.ops import reference
    from tests.cuda.arrays import Ops, assert_close

    ops = Ops(device, invariant)
    for context, count in (([270, 3, 0], [1, 1, 1]), ([250, 3, 0], [19, 1, 8])):
        batch = PagedBatch(context, count, block_size=16)
        expected_cache, cache = batch.kv_cache.copy(), batch.kv_cache.copy()
        assert_close(batch.run(ops, cache), batch.run(reference, expected_cache), 3e-6)
        assert np.allclose(cache, expected_cache, rtol=1e-6, atol=1e-6)


FIELDS = [
    {"temperature": 0.9, "seed": 7, "num_logprobs": 3},
    {"temperature": 0, "num_logprobs": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 8, "repetition_penalty": 1.3, "num_logprobs": 0},
]
WAYS = {
    "in a batch": {},
    "in other chunks": {"max_num_batched_tokens": 32},
    "preempted": {"block_ratio": 0.99},
    "with drafts": {"speculate_method": "ngram"},
    "launched op by op": {"use_cudagraph": False},
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_answers_and_their_scores_are_those_of_a_request_alone(exported, device, dtype, family):
    rng = np.random.default_rng(3)
    count, lengths = (8, (61, 62, 5)) if IS_INTERPRETED else (40, (61, 318, 5))
    prompts = [rng.integers(0, 300, length).tolist() for length in lengths]

    def ask(*numbers, **settings):
        loop = a_loop(exported(family, dtype), device, batch_invariant=True, **settings)
        asked = [Sampling(max_new_tokens=count, **FIELDS[number]) for number in numbers]
        requests = [
            Request(str(number), list(prompts[number]), len(prompts[number]), sampling)
            for number, sampling in zip(numbers, asked, strict=True)
        ]
        tokens, logprobs = answers_of(loop, requests)
        assert loop.stats()["num_preemptions"] > 0 or "block_ratio" not in settings
        return tokens, logprobs

    blocks = sum(-(-(len(prompt) + count) // 64) for prompt in prompts)
    WAYS["preempted"]["block_bs"] = (blocks - 1) / 8  # 8 are those of the longest request
    alone = [ask(number) for number in range(len(prompts))]
    for way, settings in WAYS.items():
        if IS_INTERPRETED and (way == "launched op by op" or (dtype != "float32" and way != "in a batch")):
            continue
        tokens, logprobs = ask(*range(len(prompts)), **settings)
        for number, (own_tokens, own_logprobs) in enumerate(alone):
            name = str(number)
            assert tokens[name] == own_tokens[name], way
            assert logprobs[name] == own_logprobs[name], way
