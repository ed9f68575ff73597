"""Places of experts on ranks by their usage: equal loads, and the same parameters in another order."""

import json

import numpy as np
import pytest

from engine import graph as graphs
from engine.executors.expert_placement import GatheredRows, balanced_order, orders_by_usage, read_usage, reorder_experts
from engine.exporting.manifest import Manifest
from engine.models.weights import experts_of_rank
from engine.settings.config import Config
from engine.settings.processes import EXPERT_USAGE_FILE


@pytest.mark.parametrize(
    ("counts", "num_ranks", "order"),
    [
        ([9, 8, 1, 2], 2, [0, 2, 1, 3]),
        ([9, 1, 1, 1], 2, [0, 3, 1, 2]),  # equal numbers of experts
        ([0, 0, 0, 7, 5], 2, [1, 2, 3, 0, 4]),  # the first rank has one more
        ([5, 0, 0, 0], 1, [0, 1, 2, 3]),
        ([0, 0, 0, 0], 2, [0, 1, 2, 3]),
    ],
)
def test_the_busiest_expert_first_goes_to_the_rank_with_the_lowest_load(counts, num_ranks, order):
    assert balanced_order(counts, num_ranks) == order


def test_groups_of_the_router_stay_together_and_on_one_rank():
    counts = [9, 9, 0, 8, 0, 0, 1, 0]  # groups of 18, 8, 0 and 1
    assert balanced_order(counts, 2, num_groups=4) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert balanced_order(counts, 4, num_groups=2) == list(range(8))  # no rank has a whole group


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_loads_of_a_skewed_router_are_nearly_equal(num_ranks):
    rng = np.random.default_rng(0)
    counts = rng.permutation(10_000 / np.arange(1, 129) ** 0.5).astype(int)
    order = balanced_order(counts.tolist(), num_ranks)
    assert sorted(order) == list(range(128))
    places = [experts_of_rank(128, rank, num_ranks) for rank in range(num_ranks)]
    loads = [counts[order[each.start : each.stop]].sum() for each in places]
    assert max(loads) < 1.06 * np.mean(loads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {}),  # biases, and six experts
        *(
            pytest.param("qwen3_moe", {"dtype": "bfloat16", "quant_type": quant_type}, marks=pytest.mark.slow)
            for quant_type in ("weight_only_int4", "weight_only_fp8")
        ),
    ],
)
def test_ranks_read_the_experts_of_their_places_from_the_files_of_all(family, options, exported):
    num_ranks = 2 if options else 4
    graph_dir = exported(family, block_size=16, num_ranks=num_ranks, expert_parallel=True, **options)
    loaded = [graphs.load(graph_dir, rank) for rank in range(num_ranks)]
    routers = [name for name in loaded[0][0].parameters if name.endswith("router.weight")]
    num_experts = len(loaded[0][1][routers[0]])
    order = np.random.default_rng(0).permutation(num_experts).tolist()
    found = [reorder_experts(graph, params, {routers[0]: order}, graph_dir) for graph, params in loaded]
    layer = routers[0].removesuffix("router.weight")
    changed = [name for name in found[0] if name.startswith((f"{layer}experts.", f"{layer}router."))]
    assert len(changed) >= 3
    for (_, before), after in zip(loaded, found, strict=True):
        assert all(after[name] is before[name] for name in before if name not in changed)
    for name in changed:
        before = [np.asarray(params[name]) for _, params in loaded]
        after = [np.asarray(params[name]) for params in found]
        if ".router." in name:
            assert all(np.array_equal(each, before[0][order]) for each in after)
        else:
            experts = np.concatenate(before).reshape(num_experts, -1, *before[0].shape[1:])
            assert np.array_equal(np.concatenate(after), np.concatenate(experts[order]))
            assert [each.shape for each in after] == [each.shape for each in before]


def test_rows_of_a_gathered_parameter_can_be_read():
    parts = [np.arange(6).reshape(3, 2), np.arange(10, 12).reshape(1, 2), np.arange(20, 28).reshape(4, 2)]
    gathered, whole = GatheredRows(parts), np.concatenate(parts)
    assert (gathered.shape, gathered.nbytes) == (whole.shape, whole.nbytes)
    for start in range(8):
        for stop in range(start + 1, 10):
            assert np.array_equal(gathered[start:stop], whole[start:stop])


def write_usage(directory, graph_dir, counts_of):
    """Write a usage file with counts for each router of a model. Return its path."""
    files = Manifest.read(graph_dir).graph()
    graph = graphs.read_graph(graph_dir / "rank_0" / files.program, files.outputs)
    sizes = {name: value.shape[0] for name, value in graph.parameters.items() if name.endswith("router.weight")}
    layers = {name: counts_of(size) for name, size in sizes.items()}
    path = directory / EXPERT_USAGE_FILE
    path.write_text(json.dumps({"model": graph_dir.name, "layers": layers}))
    return path


@pytest.mark.slow
def test_orders_are_those_of_the_model_in_the_run_directory(exported, tmp_path, caplog):
    graph_dir = exported("qwen3_moe", block_size=16, num_ranks=2, expert_parallel=True)
    config = Config(run_dir=str(tmp_path), mp_num=2)
    assert orders_by_usage(graph_dir, config) == {}
    path = write_usage(tmp_path, graph_dir, lambda size: [2**place for place in range(size)])
    caplog.set_level("INFO")
    orders = orders_by_usage(graph_dir, config)
    assert set(map(tuple, orders.values())) == {(0, 1, 2, 7, 3, 4, 5, 6)}
    assert "the busiest rank has 1.06 times the mean load, not 1.88" in caplog.text
    assert orders_by_usage(graph_dir, Config(run_dir=str(tmp_path), splitwise_role="prefill")) == {}
    assert orders_by_usage(exported("qwen3_moe", block_size=16, num_ranks=2), config) == {}
    assert read_usage(path, "another model") == {}
    path.write_text("[1]")
    assert orders_by_usage(graph_dir, config) == {}
    assert "cannot be read, experts stay in their order" in caplog.text
