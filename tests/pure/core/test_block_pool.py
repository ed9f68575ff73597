"""The block pool counts the holders of KV blocks and finds blocks by their tokens."""

import random

import pytest

from engine.core.block_pool import BlockPool, OutOfBlocks, hash_block, root_hash
from engine.core.host_blocks import HostBlocks
from engine.core.types import Swaps

SIZE = 4


def keys_of(token_ids, salt=""):
    """Return the keys of the full blocks of `token_ids`."""
    keys = []
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        keys.append(hash_block(keys[-1] if keys else root_hash(salt), token_ids[start : start + SIZE]))
    return keys


def publish(pool, blocks, token_ids):
    for block, key in zip(blocks, keys_of(token_ids), strict=False):
        pool.publish(block, key)


def test_taking_is_all_or_nothing():
    pool = BlockPool(3, SIZE)
    pool.take(2)
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 of 3 are available"):
        pool.take(2)
    assert (pool.num_available, pool.num_held) == (1, 2)
    pool.check()


def test_every_block_is_given_out_once():
    pool = BlockPool(5, SIZE)
    assert sorted(pool.take(2) + pool.take(3)) == [0, 1, 2, 3, 4]


def test_giving_a_block_back_twice_is_loud():
    pool = BlockPool(2, SIZE)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(KeyError):
        pool.give_back(blocks)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_is_needed_for_every_begun_four_tokens(num_tokens, num_blocks):
    assert BlockPool(1, 4).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("num_blocks", range(5))
def test_so_many_blocks_are_found_as_begin_the_tokens(num_blocks):
    pool, token_ids = BlockPool(4, SIZE), list(range(16))
    blocks = pool.take(4)
    publish(pool, blocks[:3], token_ids)
    pool.give_back(blocks)
    keys = keys_of(token_ids)[:num_blocks]
    assert pool.find(keys) == min(num_blocks, 3)
    assert pool.take(0, keys[:3]) == blocks[: min(num_blocks, 3)]


def test_a_block_is_found_by_all_tokens_before_it_not_by_its_own():
    pool = BlockPool(4, SIZE)
    publish(pool, pool.take(2), [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.find(keys_of([3, 3, 3, 3, 2, 2, 2, 2])) == 0
    assert pool.find(keys_of([1, 1, 1, 1, 3, 3, 3, 3, 2, 2, 2, 2])) == 1


def test_a_block_that_is_held_twice_is_shared_until_one_gives_it_back():
    pool = BlockPool(2, SIZE)
    blocks = pool.take(1)
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.give_back(blocks)
    assert not pool.is_shared(blocks[0])
    assert pool.num_held == 1
    pool.check()


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back():
    pool, token_ids = BlockPool(3, SIZE), list(range(9))
    first = pool.take(2)
    publish(pool, first, token_ids)
    keys = keys_of(token_ids)
    assert pool.num_held_of(keys) == 2
    second = pool.take(1, keys)
    assert second[:2] == first
    pool.give_back(first)
    assert pool.num_held == 3
    pool.give_back(second)
    assert (pool.num_held, pool.num_held_of(keys)) == (0, 0)
    pool.check()


def test_a_cached_block_that_is_shared_is_not_available_for_more():
    pool, token_ids = BlockPool(3, SIZE), list(range(9))
    blocks = pool.take(2)
    publish(pool, blocks, token_ids)
    pool.give_back(blocks)
    assert pool.num_available == 3
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 of 3"):
        pool.take(2, keys_of(token_ids))
    pool.check()
    assert pool.num_held == 0


def test_room_is_made_from_the_least_recently_used_block_and_from_the_end_of_a_prefix():
    pool = BlockPool(4, SIZE)
    old, new = list(range(9)), list(range(100, 109))
    for token_ids in (old, new):
        blocks = pool.take(2)
        publish(pool, blocks, token_ids)
        pool.give_back(blocks)
    held = pool.take(1)
    assert (pool.find(keys_of(old)), pool.find(keys_of(new))) == (1, 2)
    pool.give_back(pool.take(0, keys_of(old)[:1]))  # used again: now the other one is older
    held += pool.take(1)
    assert (pool.find(keys_of(old)), pool.find(keys_of(new))) == (1, 1)
    pool.give_back(held)
    pool.check()


def test_the_first_block_of_a_key_stays_and_the_second_is_freed():
    pool, token_ids = BlockPool(2, SIZE), [7] * 5
    first, second = pool.take(1), pool.take(1)
    publish(pool, first, token_ids)
    publish(pool, second, token_ids)
    pool.give_back(second)
    assert pool.take(0, keys_of(token_ids)) == first
    pool.check()


def test_without_caching_nothing_is_found():
    pool = BlockPool(2, SIZE, caching=False)
    blocks = pool.take(1)
    publish(pool, blocks, [7] * 4)
    pool.give_back(blocks)
    assert pool.find(keys_of([7] * 4)) == 0
    pool.check()


def test_publishing_a_block_without_holder_is_loud():
    with pytest.raises(AssertionError, match="block 1 is published but not held"):
        BlockPool(2, SIZE).publish(1, b"key")


def computed(pool, token_ids):
    """Return the blocks of a request that was computed and has ended."""
    blocks = pool.take(pool.blocks_for(len(token_ids)))
    publish(pool, blocks, token_ids)
    pool.give_back(blocks)
    return blocks


def test_evicted_blocks_are_found_on_the_host_and_swapped_in_into_new_ones():
    pool, token_ids = BlockPool(3, SIZE, num_host_blocks=2), list(range(8))
    first, second = computed(pool, token_ids)
    held = pool.take(2)  # one was free
    assert pool.take_swaps() == Swaps([(second, 0)], [])
    assert pool.take_swaps() is None
    keys = keys_of(token_ids)
    assert (pool.find(keys), pool.num_held_of(keys), pool.num_available) == (2, 0, 1)
    with pytest.raises(OutOfBlocks, match="need 1 blocks, 0 of 3 are available"):
        pool.take(0, keys)
    pool.give_back(held[:1])
    assert pool.take(0, keys) == [first, held[0]]
    assert pool.take_swaps() == Swaps([], [(held[0], 0)])
    pool.check()


def test_a_block_that_has_been_swapped_in_is_still_on_the_host():
    pool, token_ids = BlockPool(1, SIZE, num_host_blocks=1), list(range(4))
    computed(pool, token_ids)
    for moves in (Swaps([(0, 0)], []), Swaps([], [(0, 0)]), None):  # out, in, and nothing to copy the second time
        pool.give_back(pool.take(0, keys_of(token_ids)) if moves and moves.ins else pool.take(1))
        assert pool.take_swaps() == moves
    assert pool.find(keys_of(token_ids)) == 1


def test_the_host_forgets_what_was_used_least_recently_but_nothing_that_is_being_swapped_in():
    pool = BlockPool(2, SIZE, num_host_blocks=2)
    for first in (0, 10, 20, 30):
        computed(pool, list(range(first, first + 8)))
    pool.give_back(pool.take(2))
    assert [pool.find(keys_of(list(range(first, first + 8)))) for first in (0, 10, 20, 30)] == [0, 0, 0, 2]
    pool.take_swaps()
    computed(pool, list(range(40, 48)))
    blocks = pool.take(0, keys_of(list(range(30, 38))))  # there is no place for those that were in the cache
    assert pool.take_swaps() == Swaps([], [(blocks[0], 1), (blocks[1], 0)])
    assert pool.find(keys_of(list(range(40, 48)))) == 0
    pool.give_back(blocks)
    pool.check()


def test_swapped_in_blocks_stay_on_the_host_longest_and_the_beginning_of_a_prefix_longer_than_its_end():
    host, known = HostBlocks(3), [b"first", b"second", b"other"]
    for block, key in enumerate(known):
        host.swap_out(key, block)
    host.protect(known[:2])
    host.take_swaps()
    for block, left in ((3, [b"first", b"second"]), (4, [b"first"])):
        host.swap_out(b"new %d" % block, block)
        assert [key for key in known if key in host] == left


def test_another_salt_finds_nothing_on_the_host():
    pool, token_ids = BlockPool(1, SIZE, num_host_blocks=4), list(range(4))
    for salt in ("", "a"):
        [block] = pool.take(1)
        pool.publish(block, keys_of(token_ids, salt=salt)[0])
        pool.give_back([block])
    pool.give_back(pool.take(1))
    assert [pool.find(keys_of(token_ids, salt=salt)) for salt in ("", "a", "b")] == [1, 1, 0]


class Contents:
    """Model of the contents of a pool and of the host: the key in each block and place."""

    def __init__(self):
        self.of_block, self.of_place = {}, {}

    def begin_step(self, swaps):
        for block, place in swaps.outs if swaps else ():
            self.of_place[place] = self.of_block[block]
        for block, place in swaps.ins if swaps else ():
            self.of_block[block] = self.of_place[place]
        return len(swaps.ins) if swaps else 0


@pytest.mark.parametrize("num_host_blocks", [0, 1, 4, 30])
def test_the_books_agree_after_any_history(num_host_blocks):
    num_swap_ins = 0
    for seed in range(8):
        rng = random.Random(f"{num_host_blocks} {seed}")
        pool = BlockPool(rng.randrange(1, 12), SIZE, bool(num_host_blocks) or rng.random() < 0.8, num_host_blocks)
        held, contents = [], Contents()
        for _ in range(200):
            new = []
            for _ in range(rng.randrange(1, 4)):  # between two steps
                if held and rng.random() < 0.5:
                    pool.give_back(held.pop(rng.randrange(len(held))))
                    continue
                token_ids = [rng.randrange(3)] * rng.randrange(1, 20)
                keys = keys_of(token_ids[:-1])
                keys = keys[: pool.find(keys)]
                need = pool.blocks_for(len(token_ids)) - len(keys)
                available = pool.num_available - (len(keys) - pool.num_held_of(keys))
                if need > available:
                    with pytest.raises(OutOfBlocks):
                        pool.take(need, keys)
                else:
                    new.append((pool.take(need, keys), token_ids, len(keys)))
            num_swap_ins += contents.begin_step(pool.take_swaps())
            for blocks, token_ids, num_found in new:
                keys = keys_of(token_ids)
                assert [contents.of_block[block] for block in blocks[:num_found]] == keys[:num_found]
                contents.of_block |= dict(zip(blocks[num_found:], [*keys[num_found:], None], strict=False))
                publish(pool, blocks, token_ids)
                held.append(blocks)
            pool.check()
            assert pool.num_held == len({block for blocks in held for block in blocks})
    assert num_swap_ins > 20 or not num_host_blocks


def test_a_discarded_block_is_found_neither_here_nor_on_the_host():
    pool = BlockPool(2, 4, num_host_blocks=1)

    def cache(key):
        block = pool.take(1)
        pool.publish(block[0], key)
        pool.give_back(block)

    cache(b"key")
    pool.give_back(pool.take(2))  # swaps it out
    cache(b"key")
    cache(b"other")
    pool.discard(b"key")
    pool.discard(b"unknown")
    assert [key in pool for key in (b"key", b"other")] == [False, True]
    pool.take_swaps()
    pool.check()
    [block] = pool.take(1)
    assert not pool.is_published(block) and b"other" in pool  # the block of the key was free
    pool.take(1)
    assert b"other" in pool and not pool.is_on_device(b"other")  # its place on the host, too


def test_a_discarded_block_on_the_host_is_not_overwritten_before_it_is_swapped_in():
    pool = BlockPool(3, 4, num_host_blocks=1)
    block = pool.take(1)
    pool.publish(block[0], b"key")
    pool.give_back(block)
    pool.give_back(pool.take(3))
    pool.take_swaps()
    pool.take(0, [b"key"])
    pool.discard(b"key")
    block = pool.take(1)
    pool.publish(block[0], b"other")
    pool.give_back(block)
    pool.take(2)
    assert pool.take_swaps().outs == [] and b"other" not in pool


def test_spare_blocks_are_evicted_first_until_they_have_been_found():
    pool = BlockPool(4, SIZE)
    for name in (b"spare", b"found", b"other"):
        [block] = pool.take(1)
        pool.publish(block, name, is_spare=name != b"other")
        pool.give_back([block])
    pool.give_back(pool.take(0, [b"found"]))
    pool.check()
    pool.take(2)
    assert [name in pool for name in (b"spare", b"found", b"other")] == [False, True, True]
    pool.take(1)
    assert [name in pool for name in (b"spare", b"found", b"other")] == [False, True, False]
    pool.check()
