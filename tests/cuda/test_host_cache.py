"""SWAP_SPACE: blocks that leave the KV cache for the host's memory come back as they were."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.loop import EngineLoop  # noqa: E402
from engine.core.types import Copy, Swaps  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.executors.cuda import host_cache  # noqa: E402
from engine.executors.cuda.cache import Caches  # noqa: E402
from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.executors.cuda.host_cache import HostCache  # noqa: E402
from engine.executors.cuda.host_transfers import IN_FLIGHT  # noqa: E402
from engine.executors.reference import ReferenceExecutor  # noqa: E402
from engine.models.kv_cache import ATTENTION_AXES, CacheSpec  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.test_executor import SETTINGS, generate  # noqa: E402

NUM_BLOCKS, NUM_PLACES = 12, 7
SPECS = [
    CacheSpec("kv_cache_0", "float32", (-1, 2, 4, 64, 128), ATTENTION_AXES),
    CacheSpec("kv_cache_1", "bfloat16", (-1, 2, 2, 64, 128), ATTENTION_AXES),
]


def some_of(rng, count, most):
    return rng.integers(0, count, rng.integers(0, most + 1)).tolist()


@pytest.mark.parametrize(("num_staged", "chunk_len"), [(1, 1), (3, 2), (100, 100)])
def test_blocks_go_out_are_copied_and_come_back_in_this_order(device, monkeypatch, num_staged, chunk_len):
    """Random steps are launched one after another. If several blocks go to one place, the last one stays."""
    caches = Caches(SPECS, device)
    monkeypatch.setattr(host_cache, "STAGE_BYTES", num_staged * caches.block_bytes)
    monkeypatch.setattr(host_cache, "CHUNK_BYTES", chunk_len * caches.block_bytes)
    host = HostCache(caches, Config(swap_space=(NUM_PLACES + 0.5) * caches.block_bytes / 2**30), device)
    caches.allocate(NUM_BLOCKS)
    for number, tensor in enumerate(caches.tensors.values()):
        tensor.copy_(torch.arange(NUM_BLOCKS + 1, device=device).view(-1, 1, 1, 1, 1) + 100 * number)
    rng = np.random.default_rng(0)
    expected, places = list(range(NUM_BLOCKS + 1)), [None] * NUM_PLACES
    for step in range(NUM_BLOCKS + 1, 60):
        out = [(block, int(rng.integers(NUM_PLACES))) for block in some_of(rng, NUM_BLOCKS, 6)]
        copies = [Copy(0, 0, 0, block, int(rng.integers(NUM_BLOCKS))) for block in some_of(rng, NUM_BLOCKS, 2)]
        for block, place in out:
            places[place] = expected[block]
        for copy in copies:
            expected[copy.target] = expected[copy.source]
        blocks = rng.permutation(NUM_BLOCKS)[: rng.integers(6)].tolist()
        filled = [place for place in range(NUM_PLACES) if places[place] is not None]
        back = [(block, int(rng.choice(filled))) for block in blocks if filled]
        for block, place in back:
            expected[block] = places[place]
        host.move(Swaps(out, back), copies)
        if step % IN_FLIGHT == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # as the executor does: buffers of uploads are in use for so many steps
        computed = int(rng.integers(NUM_BLOCKS))
        expected[computed] = step
        for number, tensor in enumerate(caches.tensors.values()):
            tensor[computed] = step + 100 * number
    for number, tensor in enumerate(caches.tensors.values()):
        assert tensor.flatten(1).min(1).values.tolist() == [each + 100 * number for each in expected]
        assert tensor.flatten(1).max(1).values.tolist() == [each + 100 * number for each in expected]


def test_conversations_that_do_not_fit_the_cache_go_on_as_they_would(exported, device):
    """Two take turns in a cache that holds one; against the definitions of the ops in one that holds both."""
    rng, reported = np.random.default_rng(1), {}
    turns = [rng.integers(0, 300, (2, length)).tolist() for length in (66, 9)]
    config = dataclasses.replace(SETTINGS, swap_space=0.05)
    executors = (CudaExecutor(exported("qwen2"), config, device.type), 2), (ReferenceExecutor(exported("qwen2")), 16)
    for executor, num_blocks in executors:
        executor.allocate(num_blocks)
        loop, prompts = EngineLoop(executor, num_blocks, config), [[], []]
        for turn in turns:
            for prompt, said in zip(prompts, turn, strict=True):
                prompt += said
                prompt += generate(loop, [prompt], max_new_tokens=2)[0]
        reported[executor] = prompts, loop.stats()["num_cached_tokens"]
        executor.close()
    [on_device, defined] = reported.values()
    assert on_device == defined
    assert on_device[1] == 2 * 64


def test_swap_space_for_less_than_a_block_is_refused(device):
    with pytest.raises(ConfigError, match="SWAP_SPACE is 1e-06 GiB, one block needs 0.00031"):
        HostCache(Caches(SPECS, device), Config(swap_space=1e-6), device)
