"""Snapshots of states at the borders of chats: the second prompt finds what an attention-only model finds."""

import pytest

from engine.core.block_pool import BlockPool
from engine.core.cache_groups import PAGED, STATE, CacheGroup
from engine.core.limits import Limits
from engine.core.prefix_cache import PrefixCache
from engine.core.scheduler import Scheduler
from engine.core.snapshots import snapshot_positions
from engine.core.spans import PromptSpan
from engine.core.types import Request, Sampling
from tests.pure.core.test_scheduler import fill, run
from tests.pure.counting_executor import CountingExecutor

BLOCK_SIZE = 16
ATTENTION, HYBRID = [CacheGroup(PAGED)], [CacheGroup(PAGED), CacheGroup(STATE), CacheGroup(STATE, num_parts=3)]
HEADER, END, NEWLINE = [1, 8], 3, 4  # of a message
SAMPLING = Sampling(3, temperature=0, stop_token_ids=(END, 5))


def a_message(num_tokens, first):
    return [*HEADER, *fill(num_tokens - 4, first), END, NEWLINE]


def a_chat(*messages, **fields):
    """Return a request for the next message of a chat."""
    prompt = [token_id for message in messages for token_id in message] + HEADER
    return Request("chat", prompt, len(prompt), SAMPLING, **fields)


def a_server(groups, max_batched_tokens=64, num_blocks=300, num_host_blocks=0):
    limits = Limits(4, max_batched_tokens, cache_groups=groups, takes_spans=True)
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks), limits)
    return scheduler, CountingExecutor(num_blocks, BLOCK_SIZE, groups)


def complete(scheduler, executor, request):
    scheduler.add(request)
    run(scheduler, executor)


def found(groups, *requests):
    """Return how many tokens of each request were found, one after another, and how many lacked only a state."""
    scheduler, executor = a_server(groups)
    for request in requests:
        complete(scheduler, executor, request)
    return [request.num_cached for request in requests], scheduler.counters.num_tokens_without_state


def system_prompt(num_tokens=40):
    return a_message(num_tokens, 1000)


EXAMPLES = [a_message(10 * count, 2000 + 100 * count) for count in range(1, 7)]
CHATS = {
    "a system prompt": [[system_prompt(), a_message(90, first)] for first in (5000, 6000, 7000)],
    "examples": [[system_prompt(), *EXAMPLES, a_message(90, first)] for first in (5000, 6000, 7000)],
    "examples without a system prompt": [[*EXAMPLES, a_message(90, first)] for first in (5000, 6000, 7000)],
    "examples behind a system prompt that is known": [
        [system_prompt(), a_message(90, 5000)],
        *([system_prompt(), *EXAMPLES, a_message(90, first)] for first in (5000, 6000, 7000)),
    ],
    "a chat that goes on": [[system_prompt(), *EXAMPLES[:count]] for count in (1, 3, 5)],
}


@pytest.mark.parametrize("chats", CHATS.values(), ids=CHATS)
def test_a_second_prompt_finds_what_an_attention_only_model_finds(chats):
    expected, _ = found(ATTENTION, *(a_chat(*each) for each in chats))
    actual, num_missed = found(HYBRID, *(a_chat(*each) for each in chats))
    assert num_missed == 0 and min(expected[1:]) >= 32
    # Behind the end of a prompt it also finds the part of a block.
    assert [each // BLOCK_SIZE * BLOCK_SIZE for each in actual] == expected


@pytest.mark.slow
def test_it_finds_at_most_the_last_block_less_whatever_the_length_of_the_system_prompt():
    """The beginning of the next message is equal, too, and may end in another block than the system prompt."""
    less = {}
    for length in range(BLOCK_SIZE, 100):
        chats = [[system_prompt(length), a_message(90, first)] for first in (5000, 6000, 7000)]
        _, expected, _ = found(ATTENTION, *(a_chat(*each) for each in chats))[0]
        [_, second, third], num_missed = found(HYBRID, *(a_chat(*each) for each in chats))
        assert third == expected and num_missed == expected - second
        less.setdefault(expected - second, []).append(length % BLOCK_SIZE)
    assert less.keys() == {0, BLOCK_SIZE}
    assert set(less[BLOCK_SIZE]) == {BLOCK_SIZE - 2, BLOCK_SIZE - 1, 0}


def extended(request, *token_ids):
    request.token_ids += token_ids
    request.prompt_len += len(token_ids)
    return request


def test_the_next_prompt_finds_the_last_one_although_the_template_has_begun_its_answer():
    """Templates of models that think begin the answer with tokens that the next prompt lacks."""
    for begun, expected in (((6, 7), 94), ((6, 7, 9), 94), ((6, 7, 9, 9), 80)):  # the next block begins at 96
        first = extended(a_chat(a_message(92, 1000)), *begun)
        second = a_chat(a_message(92, 1000), a_message(20, 2000))
        assert found(HYBRID, first, second) == ([0, expected], 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_equal", "expected"), [(78, 69, 69), (78, 68, 0), (78, 78, 77), (94, 82, 82), (94, 81, 0)]
)
def test_a_state_takes_back_what_the_last_step_has_computed_but_its_first_token(num_tokens, num_equal, expected):
    """The first step computes 68 tokens. More than MAX_REJECTED tokens cannot be taken back."""
    scheduler, executor = a_server(HYBRID, max_batched_tokens=68)
    prompt = fill(num_tokens, 100)
    for each in (prompt, prompt[:num_equal] + [7] * (num_tokens - num_equal)):
        request = Request("text", each, num_tokens, SAMPLING)
        complete(scheduler, executor, request)
    assert request.num_cached == expected


@pytest.mark.parametrize("num_answered", [1, 2, 20, 40])
def test_the_next_question_finds_the_answer_before_it(num_answered):
    first = a_chat(system_prompt(), a_message(30, 2000))
    first.sampling = Sampling(num_answered, temperature=0)
    scheduler, executor = a_server(HYBRID)
    complete(scheduler, executor, first)
    assert first.prompt_len == 72
    prompt = [*first.token_ids, END, NEWLINE, *a_message(20, 3000), *HEADER]
    second = Request("chat", prompt, len(prompt), SAMPLING)
    complete(scheduler, executor, second)
    assert second.num_cached == (72 if num_answered < 20 else 72 + num_answered - 1)  # not twice in one block


def test_the_states_of_answers_take_no_memory_from_those_of_prompts():
    scheduler, executor = a_server(HYBRID, num_blocks=72)
    first = Request("text", fill(40, 100), 40, SAMPLING)
    complete(scheduler, executor, first)
    for number in range(5):  # each leaves the states of its prompt and of its answer, 4 blocks each
        complete(scheduler, executor, Request("text", fill(40, 1000 * number), 40, Sampling(30, temperature=0)))
    again = Request("text", fill(40, 100), 40, SAMPLING)
    complete(scheduler, executor, again)
    assert again.num_cached == 39


def test_a_block_is_copied_only_when_it_has_come_back_from_the_host():
    """The executor copies blocks before it swaps others in, and would find another prefix."""
    scheduler, executor = a_server(HYBRID, max_batched_tokens=200, num_blocks=40, num_host_blocks=40)
    prompt = fill(80, 100)
    first = Request("first", list(prompt), 80, Sampling(30, temperature=0))
    complete(scheduler, executor, first)
    complete(scheduler, executor, Request("other", fill(500, 1000), 500, SAMPLING))  # takes the whole memory
    # The first one brings all blocks back, the second one needs a part of one of them.
    for name, known in (("longer", first.token_ids), ("shorter", prompt[:75])):
        scheduler.add(Request(name, [*known, 7, 7], len(known) + 2, SAMPLING))
    run(scheduler, executor)
    assert scheduler.counters.num_cached_tokens == 109 + 75


@pytest.mark.parametrize(("num_host_blocks", "num_taken"), [(0, 5), (1, 6)])
def test_the_blocks_of_two_states_are_not_mixed(num_host_blocks, num_taken):
    """They have the same keys, but may differ in what they can take back."""
    pool = BlockPool(7, BLOCK_SIZE, num_host_blocks=num_host_blocks)
    cache = PrefixCache(pool, [CacheGroup(STATE, num_parts=3)])

    def keep(num_computed):
        request = a_chat(system_prompt())
        request.num_computed, request.cache.block_ids = num_computed, [pool.take(3)]
        cache.publish_tail(request)
        pool.give_back(request.cache.block_ids[0])
        return request.cache.block_ids[0]

    keep(42)
    pool.give_back(pool.take(num_taken))  # some blocks of the state are lost
    second = keep(42)
    pool.take_swaps()
    pool.check()
    prefix = cache.find(extended(a_chat(system_prompt()), 7))
    assert prefix.tail_len == 42 % BLOCK_SIZE
    assert sorted(pool.take(0, prefix.keys[0])) == sorted(second)


@pytest.mark.parametrize("num_taken", [4, 5])
def test_a_state_that_is_not_whole_is_pulled_as_a_whole(num_taken):
    pool = BlockPool(7, BLOCK_SIZE)
    cache = PrefixCache(pool, [CacheGroup(STATE, num_parts=3)])
    request = a_chat(system_prompt(), finds_tail=True)
    request.num_computed, request.cache.block_ids = request.prompt_len - 1, [pool.take(3)]
    cache.publish_tail(request)
    pool.give_back(request.cache.block_ids[0])
    pool.give_back(pool.take(num_taken))  # 4 blocks were free
    keys, num_found = cache.longest(request)
    assert [key in pool for key in keys] == [num_taken == 4] * 3
    assert num_found == (41 if num_taken == 4 else 0)
    pool.check()


def test_prompts_without_messages_keep_states_where_they_branch_off():
    prompts = [fill(50, 100) + fill(90, first) for first in (5000, 6000, 7000)]
    assert found(HYBRID, *(Request("text", each, len(each), SAMPLING) for each in prompts)) == ([0, 0, 48], 48)


@pytest.mark.parametrize("messages", [[], [system_prompt()]], ids=["alone", "behind a system prompt"])
def test_a_second_question_about_an_image_finds_it(messages):
    def a_question(content, first):
        span = PromptSpan(len(sum(messages, [])) + len(HEADER), 50, content, embeddings=b"1")
        return a_chat(*messages, [*HEADER, *[9] * 50, *fill(70, first), END, NEWLINE], spans=[span])

    chats = [(b"one", 5000), (b"one", 6000), (b"other", 5000)]
    expected, _ = found(ATTENTION, *(a_question(*each) for each in chats))
    assert found(HYBRID, *(a_question(*each) for each in chats)) == (expected, 0)
    assert expected[1] >= 48 and (expected[2] >= 32) == bool(messages)


def test_the_forks_of_a_request_continue_its_state():
    """The executor checks that each continues the state of its own tokens."""
    requests = []
    for first in (5000, 6000):
        requests.append(a_chat(system_prompt(), a_message(90, first)))
        prompt = requests[-1].token_ids
        requests[-1].forks = [Request(name, list(prompt), len(prompt), SAMPLING) for name in ("a", "b")]
    forks = [fork for request in requests for fork in request.forks]
    assert found(HYBRID, *requests) == ([0, 32], 0)
    assert {len(fork.token_ids) - fork.prompt_len for fork in forks} == {3}


def test_a_prompt_keeps_few_states():
    request = a_chat(*[a_message(40, first) for first in range(1000, 9000, 100)])
    request.spans = [PromptSpan(start, 2, b"content") for start in range(12, 600, 50)]
    request.cache.branch_point = 640
    positions = snapshot_positions(request, BLOCK_SIZE)
    ends = [39, 79 * 40 - 1, 80 * 40 - 1]
    assert positions == {request.prompt_len, *(each // BLOCK_SIZE * BLOCK_SIZE for each in (*ends, 564, 640))}
    request.num_computed = 48  # the messages behind the first one were found, too
    assert positions - snapshot_positions(request, BLOCK_SIZE) == {ends[1] // BLOCK_SIZE * BLOCK_SIZE}


def test_without_the_prefix_cache_a_prompt_is_computed_at_once():
    scheduler = Scheduler(BlockPool(300, BLOCK_SIZE, caching=False), Limits(4, 64, cache_groups=HYBRID))
    scheduler.add(a_chat(system_prompt()))
    assert scheduler.next_batch().num_tokens == 42
