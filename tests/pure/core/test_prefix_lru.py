"""The eviction order that all caches of prefixes share."""

from engine.core.prefix_lru import PrefixLRU


def in_order_of_eviction(cache):
    return [cache.evict()[0] for _ in range(len(cache))]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning_and_the_older_prefix_first():
    cache = PrefixLRU()
    cache.put([("a0", 0), ("a1", 1)])
    cache.put([("b0", 2), ("b1", 3)])
    assert in_order_of_eviction(cache) == ["a1", "a0", "b1", "b0"]


def test_entries_that_were_used_again_are_evicted_last():
    cache = PrefixLRU()
    cache.put([("a0", 0), ("a1", 1), ("b0", 2)])
    cache.use(["a0", "a1"])
    assert in_order_of_eviction(cache) == ["b0", "a1", "a0"]


def test_an_entry_that_is_replaced_counts_as_used():
    cache = PrefixLRU()
    cache.put([("a", 0), ("b", 1)])
    cache.put([("b", 2)])
    assert [cache.evict(), cache.evict()] == [("a", 0), ("b", 2)]
