"""Families whose layers differ from Llama's, on the GPU, against what transformers computes for them."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.family_checkpoints import FEW_BLOCKS, ON_GPUS, prompt_lens  # noqa: E402
from tests.golden_arrays import golden  # noqa: E402

SETTINGS = Config(batch_size=8, max_num_batched_tokens=24, cudagraph_capture_sizes="1,2,4,8", block_ratio=0.99)
MAX_ERROR = 2e-4  # of log-probabilities in float32
SMALL, LARGE = 20, 150  # blocks of each group: requests are preempted, or all prompts fit


def lens(family: str) -> list[int]:
    """Return the lengths of prompts, the interpreter being too slow for more than the window's borders."""
    return [n for n in prompt_lens(family) if not IS_INTERPRETED or n in (7, 129)]


def run(loop: EngineLoop, requests: list[Request]) -> dict[str, list[float]]:
    """Answer all requests. Return the log-probabilities of the tokens of each."""
    logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        for update in loop.step():
            logprobs[update.request.request_id] += [each.chosen for each in update.logprobs or ()]
    loop.scheduler.check()
    return logprobs


@pytest.fixture(scope="module", params=ON_GPUS)
def case(request, exported, device):
    """Return the golden answers of a family, its lengths of prompts, an executor and a small number of blocks."""
    family = request.param
    executor = CudaExecutor(exported(family, block_size=16), SETTINGS, device.type)
    yield golden(f"families/{family}"), lens(family), executor, FEW_BLOCKS.get(family, SMALL)
    executor.close()


def requests_of(known: dict[str, np.ndarray], lengths: list[int], count: int, **sampling: int) -> list[Request]:
    prompts = {n: known[f"prompt_{n}"].tolist() for n in lengths}
    return [Request(str(n), each, n, Sampling(count, temperature=0, **sampling)) for n, each in prompts.items()]


@pytest.mark.parametrize(("num_blocks", "method"), [(LARGE, "none"), (LARGE, "ngram"), (SMALL, "none")])
def test_tokens_are_those_of_transformers(case, num_blocks, method):
    """All prompts run at once in chunks of 24 tokens, then again from the prefix cache, with drafts, and with
    preemption.
    """
    known, lengths, executor, few_blocks = case
    if IS_INTERPRETED and (num_blocks, method) != (LARGE, "none"):
        pytest.skip("takes minutes with the interpreter")
    count, num_groups = 4 if IS_INTERPRETED else 64, len(executor.cache_groups)
    total = (few_blocks if num_blocks == SMALL else num_blocks) * num_groups
    executor.allocate(total)
    loop = EngineLoop(executor, total, dataclasses.replace(SETTINGS, speculate_method=method))
    for _ in range(1 if num_blocks == SMALL or IS_INTERPRETED else 2):
        requests = requests_of(known, lengths, count)
        run(loop, requests)
        for n, request in zip(lengths, requests, strict=True):
            assert request.token_ids[n:] == known[f"tokens_{n}"][:count].tolist(), f"prompt of {n}"
    if num_blocks == SMALL:
        assert loop.stats()["num_preemptions"] > 0
    elif not IS_INTERPRETED:
        assert loop.stats()["num_cached_tokens"] > 0


def test_log_probabilities_are_those_of_transformers(case):
    """They are compared for the first token behind each prompt, and for the prompt itself."""
    known, lengths, executor, _ = case
    num_groups = len(executor.cache_groups)
    executor.allocate(LARGE * num_groups)
    loop = EngineLoop(executor, LARGE * num_groups, SETTINGS)
    requests = requests_of(known, lengths, 1, num_logprobs=0)
    found = run(loop, requests)
    for n in lengths:
        expected = known[f"logprobs_{n}"][-1]
        assert found[str(n)] == [pytest.approx(float(expected[known[f"tokens_{n}"][0]]), abs=MAX_ERROR)]
