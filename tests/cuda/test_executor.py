"""The executor of the GPU against the golden checkpoints: what transformers says, through batches, chunks and graphs."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import Loop  # noqa: E402
from engine.core.types import Request, Sampling  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.memory import allocate_cache  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen2_untied", "qwen3"]
SETTINGS = Config(device="cpu", batch_size=8, block_bs=2.0, max_num_batched_tokens=96, cudagraph_capture_sizes="1,2,4")


def golden(family, lengths):
    with np.load(ROOT / f"tests/golden/{family}.npz") as arrays:
        return {n: (arrays[f"prompt_{n}"].tolist(), arrays[f"tokens_{n}"].tolist()) for n in lengths}


def a_loop(graph_dir, device, **settings):
    config = dataclasses.replace(SETTINGS, **settings)
    executor = CudaExecutor(graph_dir, config, device.type)
    return Loop(executor, allocate_cache(executor, config, 512), config)


def generate(loop, prompts, **sampling):
    """The answers' tokens."""
    fields = {"max_new_tokens": 64, "temperature": 0, **sampling}
    requests = [Request(str(n), list(prompt), len(prompt), Sampling(**fields)) for n, prompt in enumerate(prompts)]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        loop.turn()
    return [request.token_ids[request.prompt_len :] for request in requests]


@pytest.mark.parametrize("use_cudagraph", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(exported, device, family, use_cudagraph):
    """All prompts together: longer ones in chunks beside the decodes of others."""
    lengths, count = ([7, 64, 130], 6) if IS_INTERPRETED else ([1, 7, 63, 64, 65, 130, 200], 64)
    loop = a_loop(exported(family), device, use_cudagraph=use_cudagraph)
    cases = golden(family, lengths)
    found = generate(loop, [prompt for prompt, _ in cases.values()], max_new_tokens=count)
    assert found == [tokens[:count] for _, tokens in cases.values()]
