"""Prompt spans: what a block with embeddings of its own is found by, and what the executor learns of them."""

import random
from dataclasses import replace

import pytest

from engine.core.block_pool import BlockPool
from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.core.spans import PromptSpan, hash_with_spans
from engine.errors import InvalidRequest
from tests.pure.core.test_scheduler import a_request, run, step
from tests.pure.counting_executor import CountingExecutor, answer

BLOCK_SIZE = 4
PLACEHOLDER = 7


def a_server(num_blocks=60, num_host_blocks=0, **limits):
    limits = {"max_batch": 4, "max_batched_tokens": 16, "block_ratio": 0.99, "takes_spans": True, **limits}
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks), Limits(**limits))
    return scheduler, CountingExecutor(num_blocks, BLOCK_SIZE)


def a_prompt(*spans, length=32):
    """Return a request whose token ids are the same whatever its spans are."""
    request = a_request([PLACEHOLDER] * length, 1)
    request.spans = spans
    return request


def num_found(*requests):
    """Return how many tokens of the last request were found after the others have run."""
    scheduler, executor = a_server()
    for request in requests:
        scheduler.add(request)
        run(scheduler, executor)
    return requests[-1].num_cached


CAT = PromptSpan(6, 11, b"cat")  # covers a part of block 1, blocks 2 and 3, a part of block 4


def test_equal_spans_are_found():
    assert num_found(a_prompt(CAT), a_prompt(CAT)) == 28
    assert num_found(a_prompt(CAT), a_prompt(CAT, length=19)) == 16


@pytest.mark.parametrize(
    ("other", "num_cached"),
    [
        ([], 4),
        ([replace(CAT, content_hash=b"dog")], 4),
        ([replace(CAT, start=5)], 4),
        ([replace(CAT, start=9)], 4),
        ([replace(CAT, start=2)], 0),
        ([replace(CAT, length=10)], 16),  # the last token is an ordinary one with the placeholder's id
        ([replace(CAT, length=2), replace(CAT, start=8, length=9)], 8),  # block 2 is at another offset
        ([CAT, PromptSpan(17, 3, b"cat")], 16),
        ([CAT, PromptSpan(25, 1, b"dog")], 24),
        ([replace(CAT, grid=(1, 1, 11))], 4),  # another position
    ],
)
def test_a_block_with_other_content_is_not_found_and_the_blocks_before_it_are(other, num_cached):
    assert num_found(a_prompt(CAT), a_prompt(*other)) == num_cached
    assert num_found(a_prompt(*other), a_prompt(CAT)) == num_cached


def test_text_keeps_its_hash():
    assert hash_with_spans(b"hash", [CAT], 0, 6) == hash_with_spans(b"hash", [CAT], 17, 20) == b"hash"


def test_blocks_of_the_host_are_found_by_their_content():
    scheduler, executor = a_server(num_blocks=9, num_host_blocks=40)
    dog = replace(CAT, content_hash=b"dog")
    for request in (a_prompt(CAT), a_prompt(dog), a_request(range(100, 132), 1)):
        scheduler.add(request)
        run(scheduler, executor)
    for span in (CAT, dog):
        again = a_prompt(span)
        scheduler.add(again)
        run(scheduler, executor)  # the executor checks what the blocks hold
        assert again.num_cached == 28


@pytest.mark.parametrize("seed", range(8))
def test_random_spans_never_share_a_wrong_block(seed):
    """Few contents and places, so that many blocks nearly agree; preemption, forks and swapping to the host."""
    rng = random.Random(seed)
    scheduler, executor = a_server(num_blocks=rng.choice([20, 30]), num_host_blocks=rng.choice([0, 15]))
    requests = []
    for index in range(30):
        request = a_request([PLACEHOLDER] * rng.randint(16, 32), rng.randint(1, 20), str(index))
        spans, position = [], rng.choice([0, 2, 4])
        while position < 12:
            span = PromptSpan(position, rng.choice([1, 3, 4]), rng.choice([b"cat", b"dog"]))
            spans.append(span)
            position = span.end + rng.choice([0, 0, 5])
        request.spans = spans
        forks = [a_request(request.token_ids, 5, f"{index}.{n}") for n in range(rng.choice([0, 0, 2]))]
        for fork in forks:
            fork.spans = spans
        request.forks = list(forks)
        scheduler.add(request)
        requests += [request, *forks]
        step(scheduler, executor)
    run(scheduler, executor)
    for request in requests:
        prompt = request.token_ids[: request.prompt_len]
        assert request.token_ids[request.prompt_len :] == answer(prompt, request.sampling)
    assert scheduler.counters.num_cached_tokens > 0


def test_embeddings_are_sent_with_a_slot_unless_the_prefix_cache_has_the_span():
    scheduler, executor = a_server()
    first, second = (
        PromptSpan(1, 5, b"cat", b"numbers", pixels=b"pixels"),
        PromptSpan(6, 12, b"dog", b"more", pixels=b"pixels"),
    )
    sent = []
    for prompt_len in (20, 20, 30):
        request = a_prompt(first, second, length=prompt_len)
        request.request_id = str(len(sent))
        scheduler.add(request)
        batch = scheduler.next_batch()
        scheduler.apply(executor.launch(batch).result())
        assert all(span.pixels == (span.embeddings and b"pixels") for span in batch.arrivals[0].spans)
        sent.append([span.embeddings for span in batch.arrivals[0].spans])
        run(scheduler, executor)
    assert sent == [[b"numbers", b"more"], [b"", b"more"], [b"", b""]]  # 0, 16 and 20 tokens are found


def test_forks_need_no_embeddings():
    scheduler, _ = a_server()
    leader, fork = a_prompt(replace(CAT, embeddings=b"numbers")), a_prompt(replace(CAT, embeddings=b"numbers"))
    leader.forks, fork.request_id = [fork], "fork"
    scheduler.add(leader)
    arrivals = scheduler.next_batch().arrivals
    assert [arrival.spans[0].embeddings for arrival in arrivals] == [b"numbers", b""]


def test_a_model_without_spans_refuses_them():
    scheduler, _ = a_server(takes_spans=False)
    with pytest.raises(InvalidRequest, match="the model takes text only"):
        scheduler.add(a_prompt(CAT))
    scheduler.add(a_prompt())


@pytest.mark.parametrize(
    "spans",
    [[PromptSpan(25, 8, b"")], [CAT, PromptSpan(16, 1, b"")], [PromptSpan(0, 0, b"")], [replace(CAT, grid=(1, 2, 5))]],
)
def test_spans_that_do_not_fit_are_a_mistake_of_the_caller(spans):
    scheduler, _ = a_server()
    with pytest.raises(AssertionError):
        scheduler.add(a_prompt(*spans))
