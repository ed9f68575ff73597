"""Counts of chosen experts: those of the definition, whatever the steps, and the file that they are written to."""

import json
from collections import Counter
from types import ModuleType

import numpy as np
import pytest

from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.expert_usage import MIN_TOKENS, ExpertUsage, HostCounter, RoutedLayer
from engine.executors.reference import ReferenceExecutor
from engine.ops import reference
from engine.settings.config import Config

NUM_BLOCKS = 100


def run(executor, config):
    """Answer three prompts and return the number of tokens that were computed."""
    executor.allocate(NUM_BLOCKS)
    loop, rng = EngineLoop(executor, NUM_BLOCKS, config), np.random.default_rng(0)
    requests = [
        Request(str(index), rng.integers(0, 300, length).tolist(), length, Sampling(max_new_tokens=5, temperature=0))
        for index, length in enumerate((40, 7, 1))
    ]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        loop.step()
    return loop, sum(len(request.token_ids) - 1 for request in requests)


@pytest.mark.parametrize("settings", [{}, {"speculate_method": "ngram"}])
def test_the_counts_are_those_of_the_definition(exported, settings):
    graph_dir, chosen = exported("qwen3_moe", block_size=16), []

    def moe_route(*inputs, **attributes):
        ids, weights = reference.moe_route(*inputs, **attributes)
        chosen.append(ids)
        return ids, weights

    ops = ModuleType("noting")
    vars(ops).update(__getattr__=lambda name: getattr(reference, name), moe_route=moe_route)
    config = Config(max_num_batched_tokens=24, batch_size=4, max_dec_len=8, device="cpu")
    _, num_tokens = run(ReferenceExecutor(graph_dir, ops), config)
    executor = make_executor(graph_dir, Config(**vars(config) | settings), owns_process=False)
    loop, _ = run(executor, config)
    counts = executor.expert_usage.counts()
    num_layers, top_k = len(counts), chosen[0].shape[1]
    if settings:  # some drafts were rejected, and chose experts as well
        assert (counts.sum(1)[:-1] >= num_tokens * top_k).all()
        return
    assert (counts.sum(1)[:-1] == num_tokens * top_k).all()  # the last layer has rows of logits only
    for layer, found in enumerate(counts):
        expected = Counter(np.concatenate([ids.ravel() for ids in chosen[layer::num_layers]]).tolist())
        assert dict(enumerate(found.tolist())) == {expert: expected[expert] for expert in range(len(found))}
    stats = loop.stats()
    assert stats["num_expert_choices"] == counts.sum()
    assert stats["num_busiest_expert_choices"] == stats["num_busiest_rank_choices"] - counts.sum() + counts.max(1).sum()
    executor.close()


def usage_of(counts, num_ranks=1):
    counter = HostCounter(*np.shape(counts))
    counter.count([np.repeat(np.arange(len(layer)), layer)[:, None] for layer in counts])
    layers = [RoutedLayer(f"layers.{index}.router.weight", len(layer), 0) for index, layer in enumerate(counts)]
    return ExpertUsage(layers, counter, num_ranks)


def test_the_busiest_rank_is_that_with_most_choices_of_its_experts():
    """The first of two ranks has three of the five experts."""
    usage = usage_of([[5, 0, 1, 2, 2], [0, 1, 0, 4, 5]], num_ranks=2)
    expected = {"num_expert_choices": 20, "num_busiest_expert_choices": 10, "num_busiest_rank_choices": 6 + 9}
    assert usage.stats() == expected
    usage.clear()
    assert usage.stats() == dict.fromkeys(expected, 0)


def test_counts_are_written_unless_they_are_few_or_the_disk_is_full(tmp_path, caplog):
    path = tmp_path / "usage.json"
    usage_of([[MIN_TOKENS - 2, 1]]).write(path, "m")
    assert not path.exists()
    usage = usage_of([[MIN_TOKENS, 1]])
    usage.write(path, "m")
    assert json.loads(path.read_text()) == {"model": "m", "layers": {"layers.0.router.weight": [MIN_TOKENS, 1]}}
    usage.write(tmp_path / "none" / "usage.json", "m")
    assert "the usage of experts cannot be written" in caplog.text


def test_a_model_without_experts_counts_none(exported):
    executor = make_executor(exported("qwen2", block_size=16), Config(device="cpu"), owns_process=False)
    assert executor.expert_usage is None
    stats = EngineLoop(executor, NUM_BLOCKS, Config()).stats()
    assert "num_expert_choices" not in stats
    executor.close()
