"""Families whose layers differ from Llama's, against what transformers computes for them (tests/golden/families): all
64 tokens of an answer, log-probabilities within 2e-4, prompts around the length of the window."""

import zlib

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.speculation.executor import with_speculation
from engine.exporting.export import ExportOptions, export
from engine.ops import cpu, reference
from engine.settings.config import Config
from tests.family_checkpoints import ALL, FEW_BLOCKS, WINDOW, prompt_lens
from tests.golden_arrays import golden, log_softmax
from tests.paged_model import PagedModel
from tests.pure.models.test_ranks import answers_of_ranks

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
# Fused matrices, a gated norm behind each sum, biases, windows of their own; the others are in tests/engines.
RANKS_DIFFER = ("phi3", "gemma3_text", "starcoder2", "glm4")
HAS_WINDOW = [name for name, keys in ALL.items() if keys.get("sliding_window") == WINDOW]


def cases(family: str, most: int = 1000) -> dict[int, tuple[list[int], list[int]]]:
    """Return the cases by the lengths of the prompts, each with the tokens that follow."""
    known = golden(f"families/{family}")
    lens = [n for n in prompt_lens(family) if n <= most]
    return {n: (known[f"prompt_{n}"].tolist(), known[f"tokens_{n}"].tolist()) for n in lens}


@pytest.mark.parametrize("family", ALL)
def test_the_random_weights_are_those_transformers_saw(family, checkpoint):
    assert (
        zlib.crc32((checkpoint(family) / "model.safetensors").read_bytes()) == golden(f"families/{family}")["checksum"]
    )


@pytest.mark.parametrize("family", ALL)
def test_log_probabilities_are_those_of_transformers(family, exported):
    expected, graph_dir = golden(f"families/{family}"), exported(family, block_size=BLOCK_SIZE)
    for length, (prompt, _) in cases(family).items():
        wanted = expected[f"logprobs_{length}"]
        for ops, chunk in ((cpu, 1000), (cpu, 24), (reference, 1000))[: 2 + (length == 129)]:
            model = PagedModel.of(graph_dir, ops, num_blocks=20)
            rows = len(wanted) if chunk == 1000 else 1
            found = log_softmax(model.prefill(prompt, chunk, num_logits=rows))
            np.testing.assert_allclose(found, wanted[-rows:], rtol=0, atol=2e-4, err_msg=f"prompt of {length}")


def test_a_soft_cap_of_gemma_3_limits_the_logits(checkpoint, exported, tmp_path):
    """transformers computes cap * tanh(logits / cap), as for Gemma 2."""
    options = ExportOptions(block_size=BLOCK_SIZE, hf_overrides='{"final_logit_softcapping": 2.5}')
    export(checkpoint("gemma3_text"), tmp_path / "capped", options)
    plain = exported("gemma3_text", block_size=BLOCK_SIZE)
    (prompt, _), *_ = cases("gemma3_text").values()
    found, logits = (
        PagedModel.of(each, cpu, num_blocks=20).prefill(prompt, 1000) for each in (tmp_path / "capped", plain)
    )
    assert abs(logits).max() > 2.5
    np.testing.assert_allclose(found, 2.5 * np.tanh(logits / 2.5), rtol=0, atol=1e-5)


def generate(loop: EngineLoop, prompts: list[list[int]]) -> list[list[int]]:
    """Return the 64 likeliest tokens behind each."""
    requests = [
        Request(str(n), list(prompt), len(prompt), Sampling(64, temperature=0)) for n, prompt in enumerate(prompts)
    ]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        loop.step()
    loop.scheduler.check()
    return [request.token_ids[request.prompt_len :] for request in requests]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ALL)
def test_tokens_are_those_of_transformers_in_the_engine(family, exported):
    """All prompts run at once in chunks of 24 tokens, again from the prefix cache, with drafts, and with so few blocks
    that requests are preempted.
    """
    expected = cases(family)
    prompts, answers = zip(*expected.values(), strict=True)
    executor = make_executor(exported(family, block_size=BLOCK_SIZE), Config(block_bs=4, batch_size=8))
    num_groups = len(executor.cache_groups)
    for num_blocks, method in ((150, "none"), (150, "ngram"), (FEW_BLOCKS.get(family, 20), "none")):
        config = Config(batch_size=8, max_num_batched_tokens=24, speculate_method=method, block_ratio=0.99)
        executor.allocate(num_blocks * num_groups)
        loop = EngineLoop(with_speculation(executor, config), num_blocks * num_groups, config)
        assert generate(loop, list(prompts)) == list(answers)
        if num_blocks > 100:
            assert generate(loop, list(prompts)) == list(answers)
            assert loop.stats()["num_cached_tokens"] > 3 * 100
        else:
            assert loop.stats()["num_preemptions"] > 0
    executor.close()


def assert_two_ranks_agree(family, exported):
    [(prompt, tokens)] = cases(family, most=127).values() if family == "phi3_long" else [cases(family)[127]]
    ranks = answers_of_ranks(exported(family, block_size=BLOCK_SIZE, num_ranks=2), 2, prompt)
    model = PagedModel.of(exported(family, block_size=BLOCK_SIZE), cpu)
    logits = model.prefill(prompt, chunk=-(-len(prompt) // 2), num_logits=2)
    for found, token_ids in ranks:
        np.testing.assert_allclose(found, logits, rtol=0, atol=2e-4)
        assert token_ids == tokens[: len(token_ids)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", RANKS_DIFFER)
def test_two_ranks_compute_what_one_does(family, exported):
    assert_two_ranks_agree(family, exported)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", HAS_WINDOW)
def test_a_window_that_reaches_as_far_as_the_model_needs_no_group(family, exported):
    groups = {}
    for max_seq_len in (WINDOW, WINDOW + 1):
        graph_dir = exported(family, block_size=BLOCK_SIZE, max_seq_len=max_seq_len)
        executor = make_executor(graph_dir, Config(block_bs=1))
        groups[max_seq_len] = {group.window for group in executor.cache_groups}
        executor.close()
    assert groups[WINDOW] == {0}
    assert WINDOW in groups[WINDOW + 1]
