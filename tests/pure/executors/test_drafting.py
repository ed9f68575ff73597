"""Drafts: what is guessed, and that steps overlap although their number of tokens is not known."""

import random
import threading
from dataclasses import replace

import pytest

from engine.core.loop import EngineLoop
from engine.core.types import PENDING, Arrival, Batch, Request, Row, Sampling, StepOutput
from engine.executors import make_executor
from engine.executors.speculation.executor import SpeculativeExecutor, with_speculation
from engine.executors.speculation.lookup import LookupProposer
from engine.executors.speculation.ngram import NgramDrafter
from engine.executors.speculation.policy import DraftPolicy
from engine.settings.config import Config
from tests.patience import PATIENCE_S
from tests.pure.counting_executor import CountingExecutor, answer

GREEDY = Sampling(20, temperature=0)


def test_drafts_that_no_step_has_verified_are_proposed_again():
    """A request whose mask is late is left out of a step that it was scheduled for."""
    drafter = NgramDrafter(Config(speculate_max_ngram_size=3, speculate_max_draft_token_num=4))
    token_ids = [1, 2, 3, 1, 2]
    assert drafter.propose(token_ids, 4) == drafter.propose(token_ids, 4) == [3]
    token_ids += [3, 1]
    assert drafter.propose(token_ids, 4) == [2, 3]  # it was right, so that the next one is longer


class Counting:
    """Drafts the next numbers, of which the last one is wrong."""

    level = 0

    def propose(self, token_ids, max_drafts):
        return [*range(token_ids[-1] + 1, token_ids[-1] + max_drafts), 0]

    def end(self, token_ids):
        pass


class Blocked(CountingExecutor):
    """Computes a step when the test says so."""

    def __init__(self):
        super().__init__()
        self.may_compute = threading.Semaphore(0)
        self.batches_seen = []

    def launch(self, batch):
        assert self.may_compute.acquire(timeout=PATIENCE_S)
        self.batches_seen.append(batch)
        return super().launch(batch)


def a_batch(start, *token_ids, max_drafts=3, **more):
    return Batch(
        [Row(0, start, list(token_ids), [[0, 1, 2]] if more else (), max_drafts=max_drafts)], max_drafts=8, **more
    )


def test_steps_are_launched_before_the_tokens_of_those_before_are_known():
    """The second row begins where the accepted drafts of the first one end, and its token is the last of these."""
    blocked = Blocked()
    executor = SpeculativeExecutor(blocked, 3, LookupProposer("ngram", lambda arrival: Counting()))
    first = executor.launch(a_batch(0, 10, max_drafts=0, arrivals=[Arrival(0, [10], 1, GREEDY)]))
    second = executor.launch(a_batch(1, PENDING))
    third = executor.launch(a_batch(2, PENDING))
    assert blocked.batches_seen == []
    blocked.may_compute.release(3)
    assert [step.result().token_ids for step in (first, second, third)] == [[[11]], [[12, 13, 14]], [[15, 16, 17]]]
    rows = [batch.rows[0] for batch in blocked.batches_seen]
    assert [(row.start, list(row.token_ids), row.num_sampled, row.max_drafts) for row in rows] == [
        (0, [10], 1, 0),
        (1, [11, 12, 13, 0], 4, 0),
        (4, [14, 15, 16, 0], 4, 0),
    ]
    assert (third.drafts(), third.result().num_drafts) == ({0: [15, 16, 0]}, 3)
    counts = executor.draft_counts.stats()
    assert [counts[f"num_drafted_tokens/ngram/{position}"] for position in (1, 2, 3)] == [2, 2, 2]
    assert [counts[f"num_accepted_tokens/ngram/{position}"] for position in (1, 2, 3)] == [2, 2, 0]
    executor.close()
    assert blocked.is_closed


def test_a_row_that_is_launched_behind_the_last_token_stays_within_the_request():
    blocked = Blocked()
    executor = SpeculativeExecutor(blocked, 3, LookupProposer("ngram", lambda arrival: Counting()))
    blocked.may_compute.release(3)
    executor.launch(a_batch(0, 10, max_drafts=0, arrivals=[Arrival(0, [10], 1, replace(GREEDY, max_new_tokens=4))]))
    last, beyond = executor.launch(a_batch(1, PENDING)), executor.launch(a_batch(2, PENDING, max_drafts=1))
    assert last.result().token_ids == [[12, 13]]  # the third draft would have been one too many, the last one was wrong
    assert beyond.result().token_ids == [[14]]
    assert blocked.batches_seen[2].rows[0].start == 3
    blocked.may_compute.release(1)
    executor.launch(a_batch(3, PENDING, max_drafts=1)).result()
    assert (blocked.batches_seen[3].rows[0].start, blocked.batches_seen[3].rows[0].token_ids) == (3, [13])
    executor.close()


def test_all_rows_together_have_no_more_drafts_than_the_batch_may_have():
    executor = SpeculativeExecutor(CountingExecutor(), 3, LookupProposer("ngram", lambda arrival: Counting()))
    arrivals = [Arrival(slot, [10 * slot], 1, GREEDY) for slot in range(3)]
    rows = [Row(slot, 0, [10 * slot], [[slot]], max_drafts=3) for slot in range(3)]
    step = executor.launch(Batch(rows, arrivals, max_drafts=4))
    assert {slot: len(drafts) for slot, drafts in step.drafts().items()} == {0: 3, 1: 1}
    executor.close()


def test_a_step_that_fails_fails_those_behind_it():
    class Broken(CountingExecutor):
        def launch(self, batch):
            raise OSError("no device")

    executor = SpeculativeExecutor(Broken(), 3, LookupProposer("ngram", lambda arrival: Counting()))
    steps = [executor.launch(a_batch(0, 10, arrivals=[Arrival(0, [10], 1, GREEDY)])), executor.launch(a_batch(1, 11))]
    for step in steps:
        with pytest.raises(OSError, match="no device"):
            step.result()
    with pytest.raises(OSError, match="no device"):
        steps[1].drafts()
    executor.close()


def test_adapters_come_and_go_behind_the_steps_that_were_launched():
    done = []

    class WithAdapters(Blocked):
        def load_adapter(self, adapter):
            done.append(("load", len(self.batches_seen)))

        def drop_adapter(self, adapter_id):
            done.append(("drop", len(self.batches_seen)))

    blocked = WithAdapters()
    executor = SpeculativeExecutor(blocked, 3, LookupProposer("ngram", lambda arrival: Counting()))
    executor.launch(a_batch(0, 10, arrivals=[Arrival(0, [10], 1, GREEDY)]))
    executor.drop_adapter("a")
    assert done == []
    blocked.may_compute.release(1)
    executor.load_adapter(("b", ""))
    assert done == [("drop", 1), ("load", 1)]
    executor.close()


class Watched(SpeculativeExecutor):
    """Counts the steps that are launched while one before has not been asked for."""

    num_open = num_ahead = 0

    def launch(self, batch):
        step = super().launch(batch)
        self.num_ahead += self.num_open > 0
        self.num_open += 1
        result = step.result
        step.result = lambda: self.closed(result())
        return step

    def closed(self, output: StepOutput) -> StepOutput:
        self.num_open -= 1
        return output


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_with_drafts_overlap_on_the_cpu_and_change_no_bit(exported, num_ranks):
    config = Config(
        block_bs=8, batch_size=6, max_num_batched_tokens=32, mp_num=num_ranks, cpu_threads=1, speculate_method="ngram"
    )
    graph_dir = exported("qwen2", block_size=16, num_ranks=num_ranks)
    plain = replace(config, speculate_method="none")
    executor = make_executor(graph_dir, plain)
    executor.allocate(64)
    expected, _ = answers_of(executor, plain)
    watched = Watched(executor, 4, LookupProposer.of(config))
    found, stats = answers_of(watched, config)
    assert found == expected
    assert watched.num_ahead > 20
    assert 0 < stats["num_accepted_tokens"] < stats["num_drafted_tokens"]
    watched.close()


class RandomPauses(DraftPolicy):
    """Verifies all drafts, and pauses at random."""

    may_draft = True

    def __init__(self, share=0.4):
        super().__init__()
        self.rng, self.share, self.num_paused = random.Random(0), share, 0

    @property
    def is_paused(self):
        return self.rng.random() < self.share

    def observe_pause(self, seconds, rows=(), **heard):
        self.num_paused += 1

    def choose_for(self, rows, offers, draft_s=None):
        return [count for _, count in offers]


def test_steps_between_pauses_continue_those_of_the_pauses(exported):
    """A step that is launched ahead may follow one of a pause, and one of a pause may follow one with drafts."""
    config = Config(block_bs=8, batch_size=6, max_num_batched_tokens=32, cpu_threads=1, speculate_method="ngram")
    executor = make_executor(exported("qwen2", block_size=16), replace(config, speculate_method="none"))
    executor.allocate(64)
    expected, _ = answers_of(executor, config)
    policy = RandomPauses()
    drafting = SpeculativeExecutor(executor, 4, LookupProposer.of(config), policy)
    found, stats = answers_of(drafting, config)
    assert found == expected
    assert policy.num_paused > 5
    assert stats["num_accepted_tokens"] > 0
    drafting.close()


class Ahead(CountingExecutor):
    """Knows its last tokens, as a GPU does, so that the next step need not wait for them."""

    runs_ahead = True

    def __init__(self):
        super().__init__(64)
        self.num_ahead = 0

    def launch(self, batch):
        self.num_ahead += self.num_running > 0
        return super().launch(batch)


@pytest.mark.parametrize("passes_prompts", [True, False])
def test_steps_of_a_pause_overlap_on_an_executor_that_runs_ahead(passes_prompts):
    """Some of them may be followed by those of other requests in the same slots before their tokens are known."""
    config, executor, policy = Config(batch_size=3, max_num_batched_tokens=32), Ahead(), RandomPauses(0.7)
    proposer = LookupProposer("ngram", lambda arrival: Counting())
    proposer.allows_plain_step = lambda batch: passes_prompts or all(len(row.token_ids) == 1 for row in batch.rows)
    drafting = SpeculativeExecutor(executor, 3, proposer, policy)
    loop, answers = EngineLoop(drafting, 64, config), {}
    requests = [Request(str(n), [50 * n, 50 * n + 1], 2, Sampling(5 + 7 * n, temperature=n % 3 == 2)) for n in range(9)]
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        for update in loop.step():
            answers.setdefault(update.request.request_id, []).extend(update.token_ids)
    assert answers == {each.request_id: answer(each.token_ids[:2], each.sampling) for each in requests}
    assert policy.num_paused > 20 and executor.num_ahead > 10
    assert loop.stats()["num_accepted_tokens"] > 0
    drafting.close()


def test_the_policy_hears_of_steps_in_whose_time_a_source_reads():
    """The proposer begins to read at the end of the third step, while the fourth one runs."""
    config, policy, heard = Config(batch_size=1, max_num_batched_tokens=32), RandomPauses(1.0), []
    proposer = LookupProposer("mtp", lambda arrival: Counting())
    proposer.after_plain_step = lambda rows, requests, policy: len(heard) == 2
    policy.observe_pause = lambda seconds, rows, is_usual, **more: heard.append(is_usual)
    drafting = SpeculativeExecutor(Ahead(), 3, proposer, policy)
    loop = EngineLoop(drafting, 64, config)
    loop.add(Request("0", [50, 51], 2, Sampling(8)))
    while not loop.is_idle:
        loop.step()
    assert heard[:6] == [True, True, False, False, False, True]
    drafting.close()


def answers_of(executor, config):
    """Return greedy answers, which soon repeat themselves, and seeded ones, which do not, with log-probabilities."""
    loop, answers = EngineLoop(executor, 64, config), {}
    for seed in range(8):
        prompt = [(11 * seed + 7 * index) % 300 for index in range(5 + 9 * seed)]
        sampling = Sampling(40 + seed, temperature=float(seed % 3 == 2), seed=seed, num_logprobs=1)
        loop.add(Request(str(seed), prompt, len(prompt), sampling))
    while not loop.is_idle:
        for update in loop.step():
            answers.setdefault(update.request.request_id, []).extend(
                zip(update.token_ids, update.logprobs, strict=True)
            )
    loop.scheduler.check()
    return answers, loop.stats()


def test_without_a_method_the_executor_stays_as_it_is():
    executor = CountingExecutor()
    assert with_speculation(executor, Config()) is executor
    drafting = with_speculation(executor, Config(speculate_method="ngram", speculate_max_draft_token_num=2))
    assert (drafting.max_drafts, drafting.runs_ahead) == (2, True)
    drafting.close()
