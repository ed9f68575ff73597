"""Batch invariance: the tokens of a request do not depend on batch composition or schedule, on the real executor."""

import random
from dataclasses import replace

import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.reference import ReferenceExecutor
from engine.executors.speculation.executor import with_speculation
from engine.settings.config import Config

BLOCK_SIZE = 16
NUM_REQUESTS = 32
VOCAB_SIZE = 300


def random_requests(seed):
    """Return greedy and seeded requests. Their prompts share beginnings and end around borders of blocks and chunks."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(70)] for _ in range(3)]
    requests = []
    for _ in range(NUM_REQUESTS):
        stem = rng.choice(stems)[: rng.choice([0, 15, 16, 17, 48, 64, 70])]
        prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        sampling = Sampling(
            max_new_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            seed=rng.randrange(2**63),
            num_logprobs=1,
        )
        requests.append((prompt, sampling))
    return requests


def run(executor, config, requests, times=1, num_blocks=400):
    """Return the answers, with their log-probabilities to the last bit, of the last of `times` rounds; and the loop."""
    loop = EngineLoop(executor, num_blocks, config)
    for _ in range(times):
        answers = {index: [] for index in range(len(requests))}
        for index, (prompt, sampling) in enumerate(requests):
            loop.add(Request(str(index), list(prompt), len(prompt), sampling))
        while not loop.is_idle:
            for update in loop.step():
                answers[int(update.request.request_id)] += zip(update.token_ids, update.logprobs, strict=True)
    return answers, loop


def an_executor(graph_dir, config, num_blocks=400):
    executor = make_executor(graph_dir, config)
    executor.allocate(num_blocks)
    return executor


@pytest.fixture(scope="module", params=["qwen2", "llama3"])
def graph_dir(request, exported):
    return exported(request.param, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def alone(graph_dir):
    config = Config(block_bs=4, max_dec_len=64, enable_prefix_caching=False)
    executor = an_executor(graph_dir, config)
    requests = random_requests(seed=1)
    answers = {}
    for index, request in enumerate(requests):
        answers[index] = run(executor, config, [request])[0][0]
    return answers


BASE = Config(max_dec_len=64, batch_size=NUM_REQUESTS, max_num_batched_tokens=64)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_blocks", "preempts"),
    [
        pytest.param({}, 400, False, id="together", marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 4096}, 400, False, id="whole prompts", marks=pytest.mark.slow),
        pytest.param({"batch_size": 7, "max_num_batched_tokens": 17}, 400, False, id="small chunks"),
        pytest.param({"block_ratio": 0.9}, 24, True, id="tiny pool"),
        pytest.param({"block_ratio": 0.9, "enable_prefix_caching": False}, 16, True, id="tiny pool without cache"),
        pytest.param({"block_ratio": 1.0}, 24, False, id="worst case reserved", marks=pytest.mark.slow),
    ],
)
def test_thirty_two_requests_together_answer_as_one_by_one(graph_dir, alone, settings, num_blocks, preempts):
    config = replace(BASE, block_bs=4, **settings)
    answers, loop = run(an_executor(graph_dir, config, num_blocks), config, random_requests(seed=1), 1, num_blocks)
    assert answers == alone
    assert (loop.stats()["num_preemptions"] > 0) == preempts


@pytest.mark.slow
def test_a_warm_prefix_cache_changes_no_bit(graph_dir, alone):
    config = replace(BASE, block_bs=8)
    answers, loop = run(an_executor(graph_dir, config), config, random_requests(seed=1), times=2)
    assert answers == alone
    assert loop.stats()["num_cached_tokens"] > 1000


@pytest.mark.slow
def test_preemption_chunks_and_a_warm_prefix_cache_change_no_bit_with_an_int8_cache_of_latents(exported):
    graph_dir, requests = exported("deepseek_v3", block_size=BLOCK_SIZE, int8_cache=True), random_requests(seed=1)
    config = Config(block_bs=4, max_dec_len=64, enable_prefix_caching=False)
    executor = an_executor(graph_dir, config)
    expected = {index: run(executor, config, [request])[0][0] for index, request in enumerate(requests)}
    for num_blocks, times in ((24, 1), (400, 2)):
        config = replace(BASE, block_bs=4, block_ratio=0.9, max_num_batched_tokens=17)
        answers, loop = run(an_executor(graph_dir, config, num_blocks), config, requests, times, num_blocks)
        assert answers == expected
        stats = loop.stats()
        assert stats["num_preemptions"] > 0 if num_blocks == 24 else stats["num_cached_tokens"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_tokens_that_are_tried_ahead_change_no_bit(graph_dir, alone, method):
    config = replace(BASE, block_bs=4, speculate_method=method, speculate_max_ngram_size=2, block_ratio=0.9)
    executor = with_speculation(an_executor(graph_dir, replace(config, speculate_method="none"), 40), config)
    answers, loop = run(executor, config, random_requests(seed=1), num_blocks=40)
    assert answers == alone
    stats = loop.stats()
    assert 0 < stats["num_accepted_tokens"] < stats["num_drafted_tokens"]
    assert stats["num_preemptions"] > 0


def test_forks_change_no_bit(graph_dir):
    """Three answers to a prompt that ends in the middle of a block, and to one that fills its last, are those that each
    has alone."""
    config = replace(BASE, block_bs=4)
    executor = an_executor(graph_dir, config)
    for prompt_len in (BLOCK_SIZE + 3, 2 * BLOCK_SIZE):
        prompt = [7 * n % VOCAB_SIZE for n in range(prompt_len)]
        samplings = [Sampling(40, temperature=1.0, seed=n, num_logprobs=1, repetition_penalty=1.2) for n in range(3)]
        alone = {n: run(executor, config, [(prompt, sampling)])[0][0] for n, sampling in enumerate(samplings)}
        loop = EngineLoop(executor, 400, config)
        leader, *forks = (Request(str(n), list(prompt), prompt_len, s) for n, s in enumerate(samplings))
        leader.forks = forks
        loop.add(leader)
        answers = {0: [], 1: [], 2: []}
        while not loop.is_idle:
            for update in loop.step():
                answers[int(update.request.request_id)] += zip(update.token_ids, update.logprobs, strict=True)
        assert answers == alone
        assert loop.stats()["num_prompt_tokens"] == prompt_len


def test_the_definition_of_the_ops_chooses_the_same_tokens(graph_dir, alone):
    few = random_requests(seed=1)[:6]
    executor = ReferenceExecutor(graph_dir)
    executor.allocate(60)
    answers, _ = run(executor, BASE, few, num_blocks=60)
    for index, answer in answers.items():
        assert [token_id for token_id, _ in answer] == [token_id for token_id, _ in alone[index]]
