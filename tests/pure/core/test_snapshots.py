"""Snapshots of states at the borders of chats: the second prompt finds what an attention-only model finds."""

import pytest

from engine.core.block_pool import BlockPool
from engine.core.cache_groups import PAGED, STATE, CacheGroup
from engine.core.limits import Limits
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


def found(groups, *requests, caching=True):
    """Return how many tokens of each request were found, one after another, and how many lacked only a state."""
    scheduler = Scheduler(BlockPool(300, BLOCK_SIZE, caching), Limits(4, 64, cache_groups=groups, takes_spans=True))
    executor = CountingExecutor(300, BLOCK_SIZE, groups)
    for request in requests:
        scheduler.add(request)
        run(scheduler, executor)
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
    assert found(HYBRID, *(a_chat(*each) for each in chats)) == (expected, 0)
    assert min(expected[1:]) >= 32


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


def test_the_next_prompt_finds_the_last_one_although_the_template_has_begun_its_answer():
    """Templates of models that think begin the answer with tokens that the next prompt lacks."""
    first = a_chat(a_message(92, 1000))  # ends at 91
    first.token_ids += [6, 7]
    first.prompt_len += 2  # 96, so that the last full block is the one before it
    longer = a_chat(a_message(92, 1000))
    longer.token_ids += [6, 7, 8]
    longer.prompt_len += 3  # the last full block has two of these tokens
    for request in (first, longer):
        second = a_chat(a_message(92, 1000), a_message(9, 2000), a_message(9, 3000))
        assert found(HYBRID, request, second) == ([0, 80], 0)


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
    request.branch_point = 640
    positions = snapshot_positions(request, BLOCK_SIZE)
    ends, last = [39, 79 * 40 - 1, 80 * 40 - 1], request.prompt_len - 1
    assert positions == {each // BLOCK_SIZE * BLOCK_SIZE for each in (*ends, 564, 640, last)}
    request.num_computed = 48  # the messages behind the first one were found, too
    assert positions - snapshot_positions(request, BLOCK_SIZE) == {ends[1] // BLOCK_SIZE * BLOCK_SIZE}


def test_without_the_prefix_cache_a_prompt_is_computed_at_once():
    scheduler = Scheduler(BlockPool(300, BLOCK_SIZE, caching=False), Limits(4, 64, cache_groups=HYBRID))
    scheduler.add(a_chat(system_prompt()))
    assert scheduler.next_batch().num_tokens == 42
