"""Suffix drafts: the longest match wins, and answers are shared within one scope only."""

from benchmarks.speculation import MIN_SOURCE_BYTES, SOURCES, code_edit
from engine.core.types import Arrival, Sampling
from engine.executors.speculation.executor import with_speculation
from engine.executors.speculation.ngram import NgramDrafter
from engine.executors.speculation.suffix import RecentAnswers, SuffixDrafter
from engine.settings.config import Config
from tests.pure.counting_executor import CountingExecutor

NUM_DRAFTS = 4
ALICE, BOB = ("alice", ""), ("bob", "")


def drafter_of(answers=None, scope=ALICE, prompt_len=0):
    return SuffixDrafter(Arrival(0, [], prompt_len, Sampling(8), scope=scope), answers or RecentAnswers())


def test_the_longest_match_wins_over_the_most_recent_one():
    text = [1, 2, 3, 4, 50, 51, 52, 9, 2, 3, 4, 60, 61, 62, 8, 1, 2, 3, 4]
    assert drafter_of().propose(text, 3) == [50, 51, 52]
    assert drafter_of().propose([*text[:-4], 7, 2, 3, 4], 3) == [60, 61, 62]  # both match alike: the most recent
    assert drafter_of().propose([1, 2, 3, 9, 4, 3], 3) == []  # one token predicts too little


def test_occurrences_that_match_alike_vote():
    text = [9, 1, 2, 3, 30, 8, 1, 2, 3, 30, 31, 7, 1, 2, 3, 40, 0, 1, 2]
    assert drafter_of().propose(text, 4) == [3, 30, 31, 7]
    disagreeing = [token_id for last in range(30, 40) for token_id in (1, 2, last)]
    assert drafter_of().propose([*disagreeing, 0, 1, 2], 4) == []


def test_a_match_goes_on_where_its_drafts_end_although_it_is_too_long_ago():
    """The pair (1, 2) occurs so often that the search does not reach the first one again."""
    start = [*range(100, 120), 1, 2, 7, 7, 7]
    text = [*start, *([1, 2, 3] * 50), *range(100, 119)]
    drafter = drafter_of()
    assert drafter.propose(text, 2) == [119, 1]
    text += [119, 1, 2]
    assert drafter.propose(text, 2) == [7, 7]
    assert drafter_of().propose(text, 2) == [3, 1]


def test_only_answers_of_the_same_owner_and_salt_are_drafted():
    answers, text, prompt = RecentAnswers(), [1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 4, 5]
    drafter = drafter_of(answers, prompt_len=2)
    drafter.propose(text, 4)
    drafter.end(text)
    assert drafter_of(answers).propose(prompt, 4) == [6, 7, 8]
    assert drafter_of(answers).propose([9, 1, 2], 4) == []  # that was the prompt
    for scope in (BOB, ("alice", "salt"), ("", "")):
        assert drafter_of(answers, scope).propose(prompt, 4) == []


def num_steps(drafter, prompt, answer):
    """Return the steps in which an answer is written whose first token is known, if each verifies all drafts."""
    text, whole, steps = [*prompt, answer[0]], [*prompt, *answer], 0
    while len(text) < len(whole):
        drafts = drafter.propose(text, min(NUM_DRAFTS, len(whole) - len(text) - 1))
        num_correct = next(
            (place for place, each in enumerate(drafts) if each != whole[len(text) + place]), len(drafts)
        )
        text, steps = whole[: len(text) + num_correct + 1], steps + 1
    return steps


def test_edits_of_code_take_fewer_steps_than_with_ngram():
    """The answers are source files of the engine with renamed variables and new lines, 192 tokens each."""
    config, suffix, ngram, num_tokens = Config(speculate_max_draft_token_num=NUM_DRAFTS), 0, 0, 0
    for path in (path for path in sorted(SOURCES.glob("*.py")) if path.stat().st_size > MIN_SOURCE_BYTES):
        prompt, answer = code_edit(path.read_text())
        suffix += num_steps(drafter_of(prompt_len=len(prompt)), prompt, answer)
        ngram += num_steps(NgramDrafter(config), prompt, answer)
        num_tokens += len(answer) - 1
    assert num_tokens / suffix > 1.4 * num_tokens / ngram > 1.4 * 1.8


def test_the_memory_of_all_answers_is_bounded():
    answers = RecentAnswers(max_tokens=1000)
    for index in range(100):
        answers.add((f"owner {index % 3}",), range(1000 * index, 1000 * index + 60))
        assert answers.num_tokens <= 1000
    for index in range(100):
        answers.add(("owner 1",), range(1000 * index, 1000 * index + 60))
        assert answers.num_tokens <= 1000
    assert answers.of(("owner 0",)) is None
    assert drafter_of(answers, ("owner 1",)).propose([99_010, 99_011], 2) == [99_012, 99_013]


def test_the_engine_drafts_an_answer_again_for_its_owner_only():
    """Every answer counts up from the end of its prompt."""
    from engine.core.loop import EngineLoop
    from engine.core.types import Request

    config = Config(speculate_method="suffix", batch_size=1, max_num_batched_tokens=16)
    loop = EngineLoop(with_speculation(CountingExecutor(64, 4), config), 64, config)

    def num_accepted(owner, salt=""):
        before = loop.stats()["num_accepted_tokens"]
        loop.add(Request("r", [5, 6, 7], 3, Sampling(20, temperature=0), owner=owner, salt=salt))
        answer = []
        while not loop.is_idle:
            answer += [token_id for update in loop.step() for token_id in update.token_ids]
        assert answer == list(range(8, 28))
        return loop.stats()["num_accepted_tokens"] - before

    assert [num_accepted("alice"), num_accepted("bob"), num_accepted("alice", "salt")] == [0, 0, 0]
    assert num_accepted("alice") > 8
    loop.executor.close()
