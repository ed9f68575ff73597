"""Cache groups: which blocks windows and states keep, which prefixes they find, how layers share the memory."""

import pytest

from engine.core import kv_cache_manager
from engine.core.block_pool import BlockPool
from engine.core.cache_groups import FREED, PAGED, SLIDING_WINDOW, STATE, CacheGroup
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.models.config_fields import ModelError
from engine.models.kv_cache import CacheLayout, LayerCache
from tests.pure.core.test_scheduler import a_request, fill, run, step
from tests.pure.counting_executor import CountingExecutor

BLOCK_SIZE = 4
PAGES, WINDOW, STATES = CacheGroup(PAGED), CacheGroup(SLIDING_WINDOW, 6), CacheGroup(STATE)


def a_server(*groups, num_blocks=200, **limits):
    limits = {"max_batch": 4, "max_batched_tokens": 16, "block_ratio": 0.99, **limits}
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), Limits(**limits, cache_groups=groups))
    return scheduler, CountingExecutor(num_blocks, BLOCK_SIZE, groups)


def num_cached(scheduler, executor, prompt, max_new_tokens=1):
    """Run a request for `prompt` to its end. Return how many of its tokens were found."""
    request = a_request(prompt, max_new_tokens)
    scheduler.add(request)
    run(scheduler, executor)
    return request.num_cached


def test_a_window_holds_only_the_blocks_that_its_next_token_reads():
    scheduler, executor = a_server(WINDOW)
    request = a_request(fill(50, 100), 30)
    scheduler.add(request)
    most = 0
    while not scheduler.is_idle:
        step(scheduler, executor)
        most = max(most, scheduler.pool.num_held)
        if request.num_new_tokens == 29:
            assert request.cache.block_ids[0][: -3 - 1] == [FREED] * (len(request.cache.block_ids[0]) - 4)
    assert most <= WINDOW.max_blocks(1000, BLOCK_SIZE, 16) == 7  # of the 20 that its tokens fill


def test_a_prefix_of_a_window_is_found_by_the_blocks_of_the_window_alone():
    scheduler, executor = a_server(WINDOW, num_blocks=8)
    prompt = fill(28, 100)
    assert num_cached(scheduler, executor, prompt) == 0
    assert num_cached(scheduler, executor, fill(11, 500)) == 0  # takes 3 of the 8 blocks, the least recently used
    assert num_cached(scheduler, executor, prompt) == 24


def test_all_groups_have_to_find_a_prefix():
    scheduler, executor = a_server(PAGES, WINDOW)
    prompt = fill(40, 100)
    num_cached(scheduler, executor, prompt)
    assert num_cached(scheduler, executor, [*prompt, 1, 2, 3]) == 40
    assert num_cached(scheduler, executor, [*prompt[:30], 1, 2, 3]) == 28


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_a_state_is_kept_at_the_end_of_a_prompt(max_new_tokens):
    scheduler, executor = a_server(PAGES, STATES)
    prompt = fill(30, 100)
    num_cached(scheduler, executor, prompt, max_new_tokens)
    assert num_cached(scheduler, executor, prompt) == 29
    assert num_cached(scheduler, executor, [*prompt, 1, 2, 3, 4, 5]) == 30


def test_a_state_is_kept_at_intervals(monkeypatch):
    monkeypatch.setattr(kv_cache_manager, "SNAPSHOT_INTERVAL", 8)
    scheduler, executor = a_server(PAGES, STATES)
    num_cached(scheduler, executor, fill(30, 100))
    executor.batches.clear()
    assert num_cached(scheduler, executor, [*fill(19, 100), 1]) == 16


def test_no_chunk_ends_where_a_state_would_be_kept_if_prefixes_are_not_cached(monkeypatch):
    monkeypatch.setattr(kv_cache_manager, "SNAPSHOT_INTERVAL", 8)
    limits = Limits(4, 16, cache_groups=(PAGES, STATES))
    scheduler = Scheduler(BlockPool(200, BLOCK_SIZE, caching=False), limits)
    executor = CountingExecutor(200, BLOCK_SIZE, (PAGES, STATES))
    assert num_cached(scheduler, executor, fill(30, 100), 3) == 0
    assert [count for rows in executor.batches for _, count in rows] == [16, 14, 1, 1]


def test_where_prompts_branch_off_a_state_is_kept_once():
    scheduler, executor = a_server(PAGES, STATES)
    shared = fill(18, 100)
    found = [num_cached(scheduler, executor, shared + fill(20, 1000 * (1 + n))) for n in range(3)]
    assert found == [0, 0, 16]  # the second one finds where attention branches off, and stops there
    assert scheduler.counters.num_tokens_without_state == 16
    chunks = [sum(count for _, count in rows) for rows in executor.batches]
    assert chunks == [16, 16, 6, 16, 16, 6, 16, 6]


@pytest.mark.parametrize(("num_blocks", "expected"), [(13, 17), (12, 0)])
def test_a_state_of_several_blocks_is_found_only_as_a_whole(num_blocks, expected):
    scheduler, executor = a_server(PAGES, CacheGroup(STATE, num_parts=3), num_blocks=num_blocks)
    prompt = fill(18, 100)
    num_cached(scheduler, executor, prompt)
    num_cached(scheduler, executor, fill(6, 500))  # takes 5 blocks; of 12, one of them is a part of the state
    assert num_cached(scheduler, executor, prompt) == expected


def test_drafts_stop_where_a_state_is_kept(monkeypatch):
    monkeypatch.setattr(kv_cache_manager, "SNAPSHOT_INTERVAL", 8)
    scheduler, executor = a_server(PAGES, STATES, max_drafts=4)
    prompt = fill(5, 100)
    scheduler.add(a_request(prompt, 20))
    most = {}
    while (batch := scheduler.next_batch()) is not None:
        [row] = batch.rows
        most[row.start] = row.max_drafts
        scheduler.apply(executor.launch(batch).result())
    assert [most[start] for start in range(5, 10)] == [2, 1, 0, 4, 4]
    assert num_cached(scheduler, executor, fill(20, 100)) == 16


def test_a_snapshot_is_copied_before_its_request_goes_on():
    scheduler, executor = a_server(STATES, max_batch=3)
    prompt = fill(17, 100)
    num_cached(scheduler, executor, prompt)
    for request_id in "abc":  # the executor checks that each continues the same state
        scheduler.add(a_request(prompt, 5, request_id))
    run(scheduler, executor)
    assert scheduler.counters.num_cached_tokens == 48


@pytest.mark.parametrize("groups", [(PAGES, WINDOW), (PAGES, STATES), (STATES, WINDOW, PAGES)])
def test_one_request_may_fill_the_whole_memory_with_any_mix_of_groups(groups):
    scheduler, executor = a_server(*groups, num_blocks=30)
    most = 30 - 7 * (WINDOW in groups) - (STATES in groups)
    request = a_request(fill(most * BLOCK_SIZE, 100), 1)
    scheduler.add(request)
    assert run(scheduler, executor) == [("100", "length")]


def layers(pattern):
    """Return the caches of layers: `f` has full attention, `s` a sliding window."""
    kinds = {"f": PAGES, "s": WINDOW}
    return [LayerCache(n, "float32", (-1, 2, 1, 4, 8), group=kinds[each]) for n, each in enumerate(pattern)]


@pytest.mark.parametrize(
    ("pattern", "num_caches", "num_groups"),
    [
        ("ffff", 4, 1),
        ("sf" * 13, 13, 2),
        ("sssf" * 16, 16, 4),
        ("sssssf" * 10 + "ss", 13, 5),
        ("sssssf" * 5 + "ssss", 5, 7),
    ],
    ids=["llama", "gemma2", "olmo3", "gemma3 27b", "gemma3 4b"],
)
def test_groups_share_caches_with_little_padding(pattern, num_caches, num_groups):
    layout = CacheLayout.of(layers(pattern))
    assert (len(layout.caches), len(layout.groups)) == (num_caches, num_groups)
    assert len(pattern) >= 0.95 * num_caches * num_groups
    assert len(set(layout.inputs.values())) == len(pattern), "two layers write to the same place"
    for layer, (_, table) in layout.inputs.items():
        group = layout.groups[int(table.removeprefix("block_tables").lstrip("_") or 0)]
        assert group == (PAGES if pattern[layer] == "f" else WINDOW)


def test_layers_with_caches_of_different_sizes_are_refused():
    unequal = [LayerCache(0, "float32", (-1, 2, 1, 4, 8)), LayerCache(1, "float32", (-1, 2, 2, 4, 8))]
    with pytest.raises(ModelError, match="differ in size"):
        CacheLayout.of(unequal)
