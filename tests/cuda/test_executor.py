"""The executor of the GPU: what transformers says of the golden checkpoints, through batches, chunks and graphs."""

import dataclasses
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Arrival, Batch, Request, Row, Sampling  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.cuda.step_graphs import StepGraphs  # noqa: E402
from engine.executors.fingerprint import fingerprint  # noqa: E402
from engine.executors.memory import allocate_cache  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.executors.speculation.executor import with_speculation  # noqa: E402
from engine.exporting.manifest import Manifest  # noqa: E402
from engine.ops import reference  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen2_untied", "qwen3", "ernie4_5"]
SETTINGS = Config(device="cpu", batch_size=8, block_bs=2.0, max_num_batched_tokens=96, cudagraph_capture_sizes="1,2,4")


def golden_cases(family, lengths):
    arrays = golden(family)
    return {n: (arrays[f"prompt_{n}"].tolist(), arrays[f"tokens_{n}"].tolist()) for n in lengths}


def a_loop(graph_dir, device, **settings):
    config = dataclasses.replace(SETTINGS, **settings)
    executor = with_speculation(CudaExecutor(graph_dir, config, device.type), config)
    return EngineLoop(executor, allocate_cache(executor, config, 512), config)


def generate(loop, prompts, **sampling):
    """Return the tokens of the answers."""
    fields = {"max_new_tokens": 64, "temperature": 0, **sampling}
    requests = [Request(str(n), list(prompt), len(prompt), Sampling(**fields)) for n, prompt in enumerate(prompts)]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        loop.step()
    return [request.token_ids[request.prompt_len :] for request in requests]


@pytest.mark.parametrize("use_cudagraph", [True] if IS_INTERPRETED else [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(exported, device, family, use_cudagraph):
    """All prompts run at once: longer ones in chunks next to the decodes of others."""
    lengths, count = ([7, 130], 4) if IS_INTERPRETED else ([1, 7, 63, 64, 65, 130, 200], 64)
    loop = a_loop(exported(family), device, use_cudagraph=use_cudagraph)
    cases = golden_cases(family, lengths)
    found = generate(loop, [prompt for prompt, _ in cases.values()], max_new_tokens=count)
    assert found == [tokens[:count] for _, tokens in cases.values()]


def test_the_fingerprint_is_the_same_again_and_answers_after_it_are_those_of_transformers(exported, device):
    [(prompt, tokens)] = golden_cases("qwen2", [7]).values()
    loop = a_loop(exported("qwen2"), device)
    bounds = 512, SETTINGS.max_num_batched_tokens, loop.scheduler.pool.num_blocks
    found = fingerprint(loop.executor, Manifest.read(exported("qwen2")).vocab_size, bounds)
    assert found > 0
    assert fingerprint(loop.executor, Manifest.read(exported("qwen2")).vocab_size, bounds) == found
    assert generate(loop, [prompt], max_new_tokens=4) == [tokens[:4]]


def test_a_prompt_alone_is_read_in_steps_that_choose_nothing(exported, device):
    [(prompt, tokens)] = golden_cases("qwen2", [130]).values()
    loop = a_loop(exported("qwen2"), device, max_num_batched_tokens=48)
    assert generate(loop, [prompt], max_new_tokens=3) == [tokens[:3]]
    assert loop.stats()["num_steps"] == 3 + 2


MIXED = [
    {"temperature": 0.9, "seed": 7, "num_logprobs": 3},
    {"temperature": 0.7, "top_p": 0.8, "seed": 8, "repetition_penalty": 1.3, "num_logprobs": 0},
    {"temperature": 0, "frequency_penalty": 0.9, "presence_penalty": 0.4},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 9, "logit_bias": ((5, 4.0), (6, -3.0))},
    {"temperature": 0, "stop_token_ids": (3, 4), "min_new_tokens": 5, "bad_words": ((8,), (9, 10))},
]


USUAL = [
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8, "seed": 8},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 9},
]


def requests_with(settings, count, num_forks=0):
    rng = np.random.default_rng(5)
    requests = []
    for number, fields in enumerate(settings):
        prompt = rng.integers(0, 300, 5 + 56 * (number % 3)).tolist()
        answers = [
            Request(f"{number}-{fork}", list(prompt), len(prompt), Sampling(max_new_tokens=count, **fields))
            for fork in range(1 + num_forks * (number == 0))
        ]
        answers[0].forks = answers[1:]
        requests += answers
    return requests


def answers_of(loop, requests):
    """Return the token ids, and the rounded log-probabilities that came with them."""
    logprobs = {}
    for request in requests:
        if not any(request in other.forks for other in requests):
            loop.add(request)
    while not loop.is_idle:
        for update in loop.step():
            logprobs.setdefault(update.request.request_id, []).extend(update.logprobs or ())
    tokens = {request.request_id: request.token_ids[request.prompt_len :] for request in requests}
    return tokens, logprobs


@pytest.mark.parametrize("how", ["plain", "usual", "ahead", "forks", "drafts", "preempted"])
def test_every_way_of_choosing_gives_what_the_definition_gives(exported, device, how):
    """Against the executor that runs the definitions of the ops, one request at a time."""
    count = 6 if IS_INTERPRETED and how != "preempted" else 20
    settings = {"drafts": {"speculate_method": "ngram"}, "preempted": {"block_bs": 7 / 8, "block_ratio": 0.99}}
    settings = settings.get(how, {})
    loop = a_loop(exported("qwen2"), device, **settings)
    requests = requests_with(USUAL if how == "usual" else MIXED, count, num_forks=2 * (how == "forks"))
    if how == "ahead":
        requests = [request for request in requests if not request.needs_output_tokens]
    tokens, logprobs = answers_of(loop, requests)
    assert (loop.stats()["num_preemptions"] > 0) == (how == "preempted")
    oracle = ReferenceExecutor(exported("qwen2"))
    oracle.allocate(64)
    for request in requests:
        prompt = request.token_ids[: request.prompt_len]
        alone = Request(request.request_id, prompt, len(prompt), request.sampling)
        expected, expected_logprobs = answers_of(EngineLoop(oracle, 64, SETTINGS), [alone])
        assert tokens[request.request_id] == expected[request.request_id]
        for found, wanted in zip(logprobs[request.request_id], expected_logprobs[request.request_id], strict=True):
            assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
            assert found.chosen == pytest.approx(wanted.chosen, abs=1e-3)


@pytest.mark.parametrize("drafts", [{}, {"speculate_method": "ngram"}], ids=["plain", "drafts"])
def test_choices_of_experts_are_counted_also_in_captured_steps_without_their_padding(exported, device, drafts):
    """Against the definitions. Some decode steps have three requests, and are padded; drafts may be rejected."""
    chosen = []

    def moe_route(*inputs, **attributes):
        ids, weights = reference.moe_route(*inputs, **attributes)
        chosen.append(ids)
        return ids, weights

    ops = ModuleType("noting")
    vars(ops).update(__getattr__=lambda name: getattr(reference, name), moe_route=moe_route)
    graph_dir, rng = exported("qwen3_moe"), np.random.default_rng(0)
    prompts = [rng.integers(0, 300, length).tolist() for length in (20, 7, 1)]
    oracle = ReferenceExecutor(graph_dir, ops)
    oracle.allocate(64)
    expected_tokens = generate(EngineLoop(oracle, 64, SETTINGS), prompts, max_new_tokens=5)
    loop = a_loop(graph_dir, device, **drafts)
    assert generate(loop, prompts, max_new_tokens=5) == expected_tokens
    found = loop.executor.expert_usage.counts()
    expected = [
        np.bincount(np.concatenate([ids.ravel() for ids in chosen[layer :: len(found)]]), minlength=len(counts))
        for layer, counts in enumerate(found)
    ]
    if drafts:
        assert (found >= expected).all()
    else:
        assert np.array_equal(found, expected)
        loop.stats()
        torch.cuda.synchronize() if device.type == "cuda" else None
        assert loop.stats()["num_expert_choices"] == np.sum(expected)
    loop.executor.close()


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter records nothing")
def test_of_decode_steps_usual_choices_are_recorded(exported, device, monkeypatch):
    loop, tokens, cuts = a_loop(exported("qwen2"), device), [], []
    choose = StepGraphs.choose
    monkeypatch.setattr(
        StepGraphs,
        "choose",
        lambda graphs, captured, cut, count: cuts.append(cut) or choose(graphs, captured, cut, count),
    )
    for settings in USUAL, [{**fields, "num_logprobs": 0} for fields in USUAL]:
        requests = requests_with(settings, 12)
        tokens.append(answers_of(loop, requests)[0])
    assert tokens[0] == tokens[1]
    assert 8 <= len(cuts) <= 13
    assert cuts[0] == (True, True, True)


def test_masks_come_after_the_launch(exported, device):
    executor = CudaExecutor(exported("qwen2"), SETTINGS, device.type)
    executor.allocate(8)
    sampling = Sampling(4, temperature=0)
    mask = np.zeros((2, -(-Manifest.read(exported("qwen2")).vocab_size // 32)), np.uint32)
    mask[0, 3], mask[1, 7] = 1 << 5, 1 << 31
    arrivals = [Arrival(0, [1, 2, 3], 3, sampling), Arrival(1, [4, 5], 2, sampling)]
    step = executor.launch(Batch([Row(0, 0, [1, 2, 3], [[0]]), Row(1, 0, [4, 5], [[1]])], arrivals, has_mask=True))
    step.mask(mask)
    assert step.result().token_ids == [[3 * 32 + 5], [7 * 32 + 31]]


# Mean error of the log-probabilities of the five likeliest tokens, of transformers 5.23 in bfloat16 on a CPU, against
# itself in float32, over the same prompts.
BF16_ERRORS = {
    "llama": 0.0944,
    "llama3": 0.0512,
    "mistral": 0.0670,
    "qwen2": 0.0442,
    "qwen2_untied": 0.0430,
    "qwen3": 0.0605,
    "ernie4_5": 0.0476,
}


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_float32_as_transformers_in_bf16(exported, device, family):
    assert error_of(exported(family, "bfloat16"), device, family) < 1.25 * BF16_ERRORS[family]


@pytest.mark.skipif(IS_INTERPRETED, reason="on the CPU torch gives no logits of float16 in float32")
@pytest.mark.parametrize("family", FAMILIES)
def test_float16_is_nearer_by_the_three_bits_that_it_has_more(exported, device, family):
    assert error_of(exported(family, "float16"), device, family) < 1.25 / 8 * BF16_ERRORS[family]


def error_of(graph_dir, device, family):
    """Return the error of the five likeliest tokens."""
    arrays = golden(family)
    cases = [(arrays[f"prompt_{n}"].tolist(), arrays[f"logits_{n}"][-1]) for n in (1, 7, 63, 64, 65, 130, 200)]
    loop = a_loop(graph_dir, device)
    requests = [
        Request(str(n), prompt, len(prompt), Sampling(1, temperature=0, num_logprobs=5))
        for n, (prompt, _) in enumerate(cases)
    ]
    _, found = answers_of(loop, requests)
    errors = []
    for number, (_, logits) in enumerate(cases):
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        errors += [abs(value - logprobs[token]) for token, value in found[str(number)][0].top]
    assert len(errors) == 5 * len(cases)
    return np.mean(errors)
