"""Several ranks on GPUs as one executor, each in a process of its own: the tokens of one, and one end for all. With the
interpreter the CPU is every rank's device."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Arrival, Batch, Request, Row, Sampling  # noqa: E402
from engine.executors import make_draft_model_proposer, make_host  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.distributed.ranks import RankFailed  # noqa: E402
from engine.executors.memory import allocate_cache, run_longest_step  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.executors.speculation.executor import with_speculation  # noqa: E402
from engine.exporting.manifest import Manifest  # noqa: E402
from engine.models.support import PRECISIONS  # noqa: E402
from engine.ops import cuda  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.cuda.test_adapters import answers, of_definition  # noqa: E402
from tests.cuda.test_executor import MIXED, SETTINGS, a_loop, answers_of, generate, golden_cases, requests_with  # noqa: E402
from tests.family_checkpoints import ON_GPUS, prompt_lens  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402
from tests.pure.executors.test_expert_placement import write_usage  # noqa: E402

RANKS = dataclasses.replace(SETTINGS, device="gpu", mp_num=2)
PATIENCE_S = 120
BY_EXPERTS = {"expert_parallel": True}
ON_HOST = {"experts_on_host": 2e-4}  # a few experts of each rank of qwen3_moe
ON_TWO_GPUS = [each.option for each in PRECISIONS if each.option[0] != "dtype"]


@pytest.fixture(params=[True] if IS_INTERPRETED else [True, False])
def loop_of(exported, two_devices, monkeypatch, request):
    """Return a loop over ranks of a family, which ends with the test; on GPUs with CUDA graphs and without."""
    monkeypatch.setattr("engine.executors.memory.with_device", lambda config: config)
    executors = []

    def make(family, num_ranks=2, options=None, **settings):
        config = dataclasses.replace(RANKS, mp_num=num_ranks, use_cudagraph=request.param, **settings)
        executors.append(make_host(exported(family, num_ranks=num_ranks, **(options or {})), config))
        return EngineLoop(executors[-1], allocate_cache(executors[-1], config, 512), config)

    yield make
    for executor in executors:
        executor.close()


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [("qwen2", 2), ("qwen2", 4), ("llama3", 2), ("mistral", 2), ("qwen3", 2), ("ernie4_5", 2)],
    indirect=["num_ranks"],
)
def test_the_tokens_of_ranks_are_those_of_transformers(loop_of, family, num_ranks):
    """Check a step with more tokens than the one-shot all-reduce takes."""
    lengths, count = ([7, 130], 3) if IS_INTERPRETED else ([1, 7, 63, 64, 65, 130, 200], 64)
    loop, cases = loop_of(family, num_ranks, max_num_batched_tokens=150), golden_cases(family, lengths)
    found = generate(loop, [prompt for prompt, _ in cases.values()], max_new_tokens=count)
    assert found == [tokens[:count] for _, tokens in cases.values()]


@pytest.mark.parametrize(
    ("family", "options", "settings"),
    [
        ("qwen3_moe", {}, ON_HOST),
        ("qwen3_moe", BY_EXPERTS, ON_HOST),
        ("gpt_oss", BY_EXPERTS, {}),
        ("deepseek_v2", BY_EXPERTS, {}),
    ],
)
def test_ranks_share_the_experts_or_have_some_each(loop_of, family, options, settings):
    """Some ranks have a part of their experts on the host."""
    count = 2 if IS_INTERPRETED else 64
    loop = loop_of(family, options=options, max_num_batched_tokens=150, **settings)
    known = golden(f"families/{family}")
    lengths = (24,) if IS_INTERPRETED else (1, 24, 127, 200)
    found = generate(loop, [known[f"prompt_{n}"].tolist() for n in lengths], max_new_tokens=count)
    assert found == [known[f"tokens_{n}"][:count].tolist() for n in lengths]


@pytest.mark.parametrize("family", ["qwen3_moe"] if IS_INTERPRETED else ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_experts_that_are_placed_by_their_usage_give_the_same_tokens(loop_of, exported, tmp_path, family):
    graph_dir, count = exported(family, num_ranks=2, **BY_EXPERTS), 2 if IS_INTERPRETED else 64
    write_usage(tmp_path, graph_dir, lambda size: [2**place for place in range(size)])
    loop = loop_of(family, options=BY_EXPERTS, max_num_batched_tokens=150, run_dir=str(tmp_path))
    known = golden(f"families/{family}")
    lengths = (24,) if IS_INTERPRETED else (1, 24, 127, 200)
    found = generate(loop, [known[f"prompt_{n}"].tolist() for n in lengths], max_new_tokens=count)
    assert found == [known[f"tokens_{n}"][:count].tolist() for n in lengths]
    assert any(order != [*range(len(order))] for order in loop.executor.expert_usage._orders.tolist())


@pytest.mark.usefixtures("products_are_chains_of_sums")
def test_a_draft_model_of_the_first_rank_drafts_for_all(exported, two_devices, monkeypatch):
    """Drafts are verified in steps that are launched before the host knows them."""
    monkeypatch.setattr("engine.executors.memory.with_device", lambda config: config)
    config = dataclasses.replace(RANKS, batch_size=2, speculate_method="draft", speculate_max_draft_token_num=3)
    graph_dir, draft_dir = (exported("qwen2", block_size=16, **ranks) for ranks in ({"num_ranks": 2}, {}))
    executor, found = make_host(graph_dir, config), []
    proposer = make_draft_model_proposer(draft_dir, Manifest.read(graph_dir), config, executor)
    drafting = with_speculation(executor, config, None, proposer)
    for each in (executor, drafting):
        each.allocate(12)
        loop = EngineLoop(each, 12, config)
        found.append(generate(loop, [[5, 6, 7], [9] * 20], max_new_tokens=6 if IS_INTERPRETED else 60))
    drafting.close()
    assert found[0] == found[1]
    assert loop.stats()["num_accepted_tokens"] > 0


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes with the interpreter")
@pytest.mark.parametrize("family", ON_GPUS)
def test_the_tokens_of_two_ranks_of_every_family_are_those_of_transformers(exported, two_devices, family):
    config = dataclasses.replace(RANKS, max_num_batched_tokens=24)
    executor = make_host(exported(family, num_ranks=2, block_size=16), config)
    known = golden(f"families/{family}")
    lengths = [n for n in prompt_lens(family) if n > 1]
    prompts, expected = ([known[f"{name}_{n}"].tolist() for n in lengths] for name in ("prompt", "tokens"))
    num_blocks = 150 * len(executor.cache_groups)
    executor.allocate(num_blocks)
    found = generate(EngineLoop(executor, num_blocks, config), prompts, max_new_tokens=24)
    executor.close()
    assert found == [each[:24] for each in expected]


def likeliest(loop, prompts):
    """Return the log-probabilities of the likeliest first tokens of the answers, by the number of the prompt and the
    token.
    """
    fields = {"temperature": 0, "num_logprobs": 5}
    requests = [Request(str(n), list(each), len(each), Sampling(1, **fields)) for n, each in enumerate(prompts)]
    _, logprobs = answers_of(loop, requests)
    return {(name, token): value for name, [first] in logprobs.items() for token, value in first.top}


def median_error(found, expected):
    errors = [abs(found[each] - expected[each]) for each in found.keys() & expected.keys()]
    assert len(errors) > 0.5 * len(expected)
    return np.median(errors)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not know bf16")
@pytest.mark.parametrize("options", [{}, BY_EXPERTS], ids=["width", "experts"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_two_ranks_in_16_bits_are_as_near_to_32_bits_as_one_is(loop_of, exported, device, family, options):  # noqa: PLR0913
    """Compare the median: where the scores of two experts are nearly equal, rounding decides which one is chosen.

    The bound leaves room for the all-reduce of many rows, which rounds the sums to 16 bits between two ranks.
    """
    known = golden(f"families/{family}")
    prompts = [known[f"prompt_{n}"].tolist() for n in (1, 24, 127, 200)]
    exact, one = (likeliest(a_loop(exported(family, dtype), device), prompts) for dtype in ("float32", "bfloat16"))
    two = loop_of(family, options={"dtype": "bfloat16", **options}, max_num_batched_tokens=150)
    assert median_error(likeliest(two, prompts), exact) < 2 * median_error(one, exact)


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes with the interpreter")
@pytest.mark.parametrize("option", ON_TWO_GPUS, ids=lambda option: str(option[1]))
def test_two_ranks_with_fewer_bits_are_as_near_to_32_bits_as_one_is(loop_of, exported, device, option):
    """Matrices are divided before they are quantized, so that groups and scales of two ranks are not those of one.
    Only experts can be stored as MXFP4."""
    family = "gpt_oss" if "mxfp4" in option else "qwen2"
    prompts = [prompt for prompt, _ in golden_cases("qwen2", [1, 7, 65, 130]).values()]
    exact, one = (likeliest(a_loop(exported(family, **options), device), prompts) for options in ({}, dict([option])))
    two = likeliest(loop_of(family, options=dict([option]), max_num_batched_tokens=150), prompts)
    assert median_error(two, exact) < 2 * median_error(one, exact)


def test_sampled_answers_are_those_of_one_rank_while_steps_overlap(loop_of, exported):
    """A token that the first rank sampled must reach the next step of the others before any host has it."""
    count = 4 if IS_INTERPRETED else 30
    requests = [request for request in requests_with(MIXED, count) if not request.needs_output_tokens]
    tokens, _ = answers_of(loop_of("qwen2"), requests)
    oracle = ReferenceExecutor(exported("qwen2"))
    oracle.allocate(64)
    alone = [request for request in requests_with(MIXED, count) if not request.needs_output_tokens]
    assert tokens == answers_of(EngineLoop(oracle, 64, SETTINGS), alone)[0]


def test_the_logits_of_a_share_are_made_in_float32(exported, device, monkeypatch):
    """One rank computes them with the last op of the graph; here the shares are gathered behind it."""
    seen, logits = [], cuda.logits
    monkeypatch.setattr(cuda, "logits", lambda x, weight, *bias: seen.append(len(weight)) or logits(x, weight, *bias))
    executor = CudaExecutor(exported("qwen2", num_ranks=2), SETTINGS, device.type)
    executor.allocate(1)
    executor.launch(Batch([Row(0, 0, [1, 2, 3], [[0]])], [Arrival(0, [1, 2, 3], 3, Sampling(1))])).result()
    assert set(seen) == {160}  # captured, too


def test_ranks_have_their_shares_of_an_adapter(loop_of, adapted):
    """One request has an adapter for every matrix, another one none."""
    graphs, adapters = adapted
    [(prompt, _)] = golden_cases("qwen2", [7]).values()
    loop = loop_of("qwen2", lora_dir="/adapters", max_loras=1)
    wanted = [of_definition(graph_dir, [prompt])[0] for graph_dir in graphs[:2]]
    assert answers(loop, [(prompt, ()), (prompt, adapters[0])]) == wanted


def test_a_mask_is_the_first_ranks_business(loop_of):
    executor = loop_of("qwen2", max_num_batched_tokens=8).executor
    mask = np.zeros((1, 10), np.uint32)
    mask[0, 3] = 1 << 5
    row, arrival = Row(0, 0, [1, 2, 3], [[0]]), Arrival(0, [1, 2, 3], 3, Sampling(4, temperature=0))
    step = executor.launch(Batch([row], [arrival], has_mask=True))
    step.mask(mask)
    assert step.result().token_ids == [[3 * 32 + 5]]
    assert executor.free_bytes() > 0  # the other rank has got through the step and can be asked


def test_a_rank_that_cannot_load_is_named_before_anybody_waits_for_it(exported, two_devices, tmp_path):
    broken = shutil.copytree(exported("qwen2", num_ranks=2), tmp_path / "broken")
    program = broken / "rank_1" / "model.json"
    program.write_text(program.read_text()[:1000])
    with pytest.raises(RankFailed, match=f"rank 1: {program} is cut off or not JSON"):
        make_host(broken, RANKS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_ends_the_first_in_the_middle_of_a_step(exported, two_devices, number):
    first = subprocess.Popen(a_group(exported("qwen2", num_ranks=2)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "runs\n"
        [rank] = ranks_of(first.pid)
        os.kill(rank, number)
        assert first.wait(PATIENCE_S) == 1
    finally:
        first.kill()
        first.communicate()


def test_a_first_rank_that_fails_says_why_and_ends_the_others_in_the_middle_of_a_step(loop_of, monkeypatch):
    loop = loop_of("qwen2", max_num_batched_tokens=8)
    [rank] = ranks_of(os.getpid())

    def fail(inputs):
        raise ValueError("out of luck")

    monkeypatch.setattr(loop.executor.first.runner, "compute", fail)
    with pytest.raises(ValueError, match="out of luck"):
        run_longest_step(loop.executor, RANKS, 200, 8)  # more tokens than a graph that was captured takes
    deadline = time.monotonic() + PATIENCE_S
    while ranks_of(os.getpid()) == [rank]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks_of(pid):
    """Return the processes of the other ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def a_group(graph_dir):
    """Return the command of a process that starts two ranks, reports it, and computes without end."""
    code = f"""
import dataclasses
from pathlib import Path
from engine.executors import make_host
from engine.executors.memory import run_longest_step
from tests.cuda.test_ranks import RANKS
executor = make_host(Path({str(graph_dir)!r}), RANKS)
executor.allocate(8)
print("runs", flush=True)
while True:
    run_longest_step(executor, RANKS, 64, 8)
"""
    return [sys.executable, "-c", code]
