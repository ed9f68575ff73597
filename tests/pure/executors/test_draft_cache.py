"""Draft cache: computed positions of shared, copied, rejected and reused blocks."""

import pytest

from engine.core.types import Arrival, Batch, Copy, Row, Sampling, Swaps
from engine.executors.speculation.draft_cache import DraftCache

SIZE = 4
TOKENS = list(range(100, 110))


@pytest.fixture
def cache():
    made = DraftCache(num_slots=3, max_blocks=4, block_size=SIZE, group=1)
    made.allocate(8)
    arrive(made, 0, [5, 6, 7])
    return made


def arrive(cache, slot, block_ids, start=0, copies=()):
    """Give a slot to a request whose first `start` positions are in the blocks already."""
    arrival = Arrival(slot, TOKENS, len(TOKENS), Sampling(8))
    row = Row(slot, start, TOKENS[start:], [[9], block_ids])
    return cache.place(Batch([row], [arrival], copies))


def test_a_rejected_draft_is_computed_again(cache):
    assert cache.start(0, TOKENS) == 0
    cache.advance(0, 10)
    cache.guess(0, 110)
    cache.guess(0, 111)
    assert cache.start(0, [*TOKENS, 110, 7, 8]) == 11


def test_the_last_token_is_computed_even_if_it_was_guessed(cache):
    cache.advance(0, 10)
    cache.guess(0, 110)
    assert cache.start(0, [*TOKENS, 110]) == 10
    assert cache.start(0, [*TOKENS, 110, 5]) == 11


def test_a_prefix_hit_begins_where_the_draft_model_had_stopped(cache):
    cache.advance(0, 6)
    arrive(cache, 1, [5, 6, 3], start=8)
    assert cache.start(1, TOKENS) == 6
    cache.advance(1, 10)
    arrive(cache, 2, [5, 6, 4], start=8)
    assert cache.start(2, TOKENS) == 8


def test_a_block_of_another_request_is_empty(cache):
    cache.advance(0, 10)
    arrive(cache, 1, [5, 7, 3], start=4)  # which the draft model does not compute
    arrive(cache, 2, [5, 7, 4], start=8)
    assert cache.start(2, TOKENS) == 4


def test_a_copied_block_keeps_what_is_computed_of_it(cache):
    cache.advance(0, 10)
    copies = [Copy(1, 0, 2, 1, 2), Copy(1, 1, 2, 7, 3)]  # the first one is of another group
    assert arrive(cache, 1, [5, 6, 3], start=10, copies=copies) == [(7, 3)]
    assert cache.start(1, [*TOKENS, 50]) == 10
    assert cache.tables[1, :3].tolist() == [5, 6, 3]


def test_blocks_that_come_back_from_the_host_are_empty(cache):
    cache.advance(0, 10)
    cache.place(Batch([], swaps=Swaps([], [(6, 0)])))
    arrive(cache, 1, [5, 6, 3], start=8)
    assert cache.start(1, TOKENS) == 4


def test_behind_the_blocks_of_a_slot_its_table_has_the_null_block(cache):
    arrive(cache, 1, [1, 2, 3, 4])
    arrive(cache, 1, [7])
    assert cache.tables_of([1, 0], 5, 8).tolist() == [[7, 8, 8, 8, 8], [5, 6, 7, 8, 8]]
