"""Runs of a draft model on a device that runs ahead: the step that verifies the drafts is launched before they are
known."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.types import PENDING, Arrival, Batch, Copy, Row, Sampling, StepOutput
from engine.executors.speculation.draft_cache import DraftCache
from engine.executors.speculation.draft_model import DraftRow
from engine.executors.speculation.executor import SpeculativeExecutor
from engine.executors.speculation.model_proposer import DraftModelProposer
from engine.executors.speculation.mtp_proposer import MAX_PLAIN_STEPS, MtpProposer, PendingStates
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedRequest
from engine.executors.speculation.verified_rows import VerifiedRow
from tests.patience import PATIENCE_S

GREEDY, IDS, TOKENS = Sampling(50), [-10, -11, -12], [6, 7, 8]


class FakeModel:
    """Draft model that always drafts the same tokens."""

    max_seq_len, block_bytes, chunk, can_run_ahead = 100, 0, 100, False

    def __init__(self, events):
        self.cache, self._events = DraftCache(1, 16, 4, 0), events

    def allocate(self, num_blocks):
        self.cache.allocate(num_blocks)

    def place(self, batch):
        self.cache.place(batch)

    def launch(self, rows, num_drafts):
        self._events.append("launch")
        return [IDS[:num_drafts]]

    def wait(self):
        self._events.append("wait")
        return [TOKENS]

    def run(self, rows, num_drafts):
        self._events.append("run")
        return [TOKENS[:num_drafts]]


class FakeExecutor:
    """Executor that runs ahead, notes the tokens of a step at its launch and at its end, and accepts two drafts."""

    block_size, block_bytes, max_prompt_logits = 4, 0, 0
    cache_groups, takes_spans, runs_ahead, thread = FULL_ATTENTION, False, True, None
    vision = expert_usage = draft_counts = None

    def __init__(self, events):
        self._events = events

    def allocate(self, num_blocks):
        pass

    def launch(self, batch):
        self._row = batch.rows[0]
        self._events.append(list(self._row.token_ids))
        return self

    def result(self):
        self._events.append(list(self._row.token_ids))
        return StepOutput([[6, 7, 9]], [None])

    def close(self):
        pass


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param(Sampling(50), ["launch", [5, *IDS], "wait", [5, *TOKENS]], id="usual"),
        pytest.param(Sampling(50, repetition_penalty=1.1), ["run", [5, *TOKENS], [5, *TOKENS]], id="with a penalty"),
    ],
)
def test_a_step_is_launched_before_its_drafts_are_known_unless_its_sampling_needs_them(sampling, expected):
    events = []
    executor = SpeculativeExecutor(FakeExecutor(events), 3, DraftModelProposer(FakeModel(events), 100))
    executor.allocate(4)
    batch = Batch([Row(0, 2, [5], [[0, 1]], max_drafts=3)], [Arrival(0, [3, 4, 5], 2, sampling)], max_drafts=3)
    step = executor.launch(batch)
    assert step.result().token_ids == [[6, 7, 9]]
    assert events[: len(expected)] == expected
    assert step.drafts()[0] == expected[-1][1:]
    assert executor.draft_counts.stats()["num_accepted_tokens/draft/2"] == 1
    executor.close()


class Paused(FakeExecutor):
    """Executor whose steps end when the test says so."""

    def __init__(self):
        super().__init__([])
        self.may_end, self.at_launch = threading.Semaphore(0), []

    def launch(self, batch):
        self.at_launch.append([step.output.done() for step in self.steps])
        return super().launch(batch)

    def result(self):
        assert self.may_end.acquire(timeout=PATIENCE_S)
        return super().result()


def a_step(executor, **more):
    row = Row(0, 2, [5], [[0, 1]] if more else (), max_drafts=3)
    return executor.launch(Batch([row], max_drafts=3, **more))


def test_the_result_of_a_step_comes_when_the_next_one_is_launched():
    paused = Paused()
    executor = SpeculativeExecutor(paused, 3, DraftModelProposer(FakeModel([]), 100))
    executor.allocate(4)
    paused.steps = []
    paused.steps.append(a_step(executor, arrivals=[Arrival(0, [3, 4, 5], 2, Sampling(50))]))
    paused.steps.append(a_step(executor))
    paused.may_end.release()
    assert paused.steps[0].result().token_ids == [[6, 7, 9]]
    assert paused.at_launch[1][0] is False
    paused.may_end.release()
    assert paused.steps[1].result().token_ids == [[6, 7, 9]]  # no other step waits for the thread
    executor.close()


def test_no_step_stays_without_a_result_when_the_executor_is_closed():
    paused = Paused()
    executor = SpeculativeExecutor(paused, 3, DraftModelProposer(FakeModel([]), 100))
    executor.allocate(4)
    paused.steps = []
    steps = [a_step(executor, arrivals=[Arrival(0, [3, 4, 5], 2, Sampling(50))]), a_step(executor)]
    paused.may_end.release(2)
    executor.close()
    assert all(step.output.done() for step in steps)


class Following(FakeModel):
    """Draft model that can run behind a step whose tokens are not known."""

    can_run_ahead = True

    def launch(self, rows, num_drafts):
        self._events.append(rows)
        return [IDS[:num_drafts]]


class Awaiting(FakeExecutor):
    """Executor that launches steps when the test has passed all of them to it."""

    def __init__(self, events):
        super().__init__(events)
        self.may_launch = threading.Event()

    def launch(self, batch):
        assert self.may_launch.wait(PATIENCE_S)
        return super().launch(batch)


FOLLOWING = Row(0, 3, [PENDING], max_drafts=3)


def two_steps(proposer, sampling=GREEDY, following=FOLLOWING, **more):
    """Run a step that accepts two of three drafts, and the next one."""
    awaiting = Awaiting(proposer._model._events)
    executor = SpeculativeExecutor(awaiting, 3, proposer)
    executor.allocate(16)
    first = Batch([Row(0, 2, [5], [range(4)], max_drafts=3)], [Arrival(0, [3, 4, 5], 2, sampling)], max_drafts=3)
    steps = [executor.launch(first), executor.launch(Batch([following], max_drafts=3, **more))]
    awaiting.may_launch.set()
    for step in steps:
        step.result()
    executor.close()


@pytest.mark.parametrize(("max_new_tokens", "num_drafts"), [(50, 3), (6, 1), (5, 0)])
def test_drafts_are_launched_before_the_tokens_of_the_step_before_are_known(max_new_tokens, num_drafts):
    """The run reads all tokens that the step chooses. There may be room for fewer drafts behind those that are
    accepted."""
    events = []
    two_steps(DraftModelProposer(Following(events), 100), Sampling(max_new_tokens))
    assert events[1:3] == [[5, *IDS], "wait"]
    assert events[3] == [DraftRow(0, 3, [0] * 4, True, 2, None, VerifiedRow(0, 3, 0))]
    assert events[4:6] == [[5, *TOKENS], [9, *IDS[:num_drafts]]]


@pytest.mark.parametrize(
    ("following", "more"),
    [
        pytest.param(Row(0, 3, [6], max_drafts=3), {}, id="known token"),
        pytest.param(Row(0, 3, [PENDING]), {}, id="no drafts"),
        pytest.param(Row(0, 3, [PENDING], max_drafts=3), {"copies": [Copy(0, 0, 3, 3, 9)]}, id="copied block"),
    ],
)
def test_a_step_that_does_more_than_continue_the_one_before_is_not_drafted_for_ahead(following, more):
    events = []
    two_steps(DraftModelProposer(Following(events), 100), following=following, **more)
    assert events[3] == [5, *TOKENS]


def test_a_step_with_a_penalty_is_not_drafted_for_ahead():
    events = []
    two_steps(DraftModelProposer(Following(events), 100), Sampling(50, repetition_penalty=1.1))
    assert [each for each in events if each and isinstance(each[0], DraftRow)] == []


def test_a_run_behind_a_step_ends_within_the_longest_request():
    events = []
    model = Following(events)
    model.max_seq_len = 9  # the drafts may end at position 3 + 3 + 3
    two_steps(DraftModelProposer(model, 100))
    assert events[3] == [5, *TOKENS]


class FakeLayer(FakeModel):
    """Layer whose states are the positions of their tokens."""

    max_seq_len = 200

    def __init__(self, events):
        super().__init__(events)
        self.cache = DraftCache(1, 50, 4, 0)

    def step_states(self, rows):
        return np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])

    def kept_states(self, slot, start, end):
        return np.arange(start, end)

    def launch(self, rows, num_drafts):
        self.given = [state for row in rows for state in row.states.tolist()]
        return super().launch(rows, num_drafts)


class FollowingLayer(FakeLayer):
    can_run_ahead = True


def test_a_layer_reads_the_states_of_all_tokens_of_the_step_before():
    events = []
    layer = FollowingLayer(events)
    proposer = MtpProposer(layer, 100, "mtp")
    proposer._pending[0] = PendingStates(0, np.arange(2))  # of the prompt
    proposer.place = lambda batch, requests: layer.place(batch)
    two_steps(proposer)
    assert events == ["launch", [5, *IDS], "wait", "launch", [5, *TOKENS], [9, *IDS], "wait", [9, *TOKENS]]
    assert layer.given == [2, 3, 4, 5]
    assert layer.cache.num_valid(0) == 5
    assert list(proposer._pending) == [0] and proposer._pending[0].start == 5


@pytest.mark.parametrize("spent", ["nothing", "for prompts", "in pauses"])
def test_a_layer_reads_the_states_of_steps_that_are_launched_ahead_unless_reading_has_cost_too_much(spent):
    """It reads them after MAX_PLAIN_STEPS steps, in runs that are not waited for, and drafts from the last one."""
    events, policy = [], DraftPolicy(runs_ahead=True)
    layer = FakeLayer(events)
    proposer = MtpProposer(layer, 100, "mtp")
    proposer.allocate(50)
    for seconds in (0.01, 0.01, 0.01):
        policy._observe_base(policy._times_of(1), seconds)
    proposer._costs.observe(0, 16, 10.0 if spent == "for prompts" else 0.016)
    slot, prompt = DraftedRequest([3, 4], 2, 200), [Row(0, 0, [3, 4], [range(50)])]
    proposer.place(Batch(prompt), {})
    slot.token_ids.append(5)
    proposer.add_hidden_states(prompt, {0: slot}, policy, proposer.hidden_states(prompt))
    if spent == "in pauses":
        policy._balance_s = 0.0
    end = 2 + MAX_PLAIN_STEPS + 10
    for start in range(2, end):
        rows = [Row(0, start, [5], ())]
        assert proposer.allows_plain_step(Batch(rows))
        proposer.place(Batch(rows), {})
        slot.token_ids.append(5)
        assert proposer.after_plain_step(rows, {0: slot}, policy) is (
            spent == "nothing" and start == 1 + MAX_PLAIN_STEPS
        )
    assert events == ["launch"] * (spent == "nothing")
    assert bool(proposer.propose([Row(0, end, [5], (), max_drafts=3)], {0: slot}, 3, None)) is (spent == "nothing")
    if spent == "nothing":
        assert layer.given == list(range(1 + MAX_PLAIN_STEPS, end))  # all that it had not read


def test_the_first_step_of_a_request_is_not_launched_ahead_for_a_layer_that_reads_states():
    proposer = MtpProposer(FakeLayer([]), 100, "mtp")
    row, arrival = Row(0, 0, [3], [range(16)]), Arrival(0, [3], 1, Sampling(5))
    assert proposer.allows_plain_step(Batch([row])) and not proposer.allows_plain_step(Batch([row], [arrival]))


@pytest.mark.parametrize(("prompt_len", "is_usual"), [(15, True), (20, False)])
def test_a_step_before_which_the_draft_model_has_read_a_prompt_is_not_usual(prompt_len, is_usual):
    """Its drafts are waited for before it is launched, so that its time does not contain theirs."""
    given, policy = [], DraftPolicy(runs_ahead=True)
    for _ in range(6):
        policy.observe_pause(0.01, [Row(0, 0, [5], ())])
    policy.learn = lambda rows, output, times_s, is_usual: given.append(is_usual) or 0.0
    policy.choose_for = lambda rows, offers: [3]
    policy._balance_s = 1.0
    proposer = DraftModelProposer(FakeModel([]), 100)
    executor = SpeculativeExecutor(FakeExecutor([]), 3, proposer, policy)
    executor.allocate(16)
    tokens = [*range(prompt_len)]
    row = Row(0, prompt_len - 1, tokens[-1:], [range(16)], max_drafts=3)
    arrival = Arrival(0, tokens, prompt_len - 1, Sampling(50))
    assert executor.launch(Batch([row], [arrival], max_drafts=3)).result().num_drafts == 3
    assert given == [is_usual]
    executor.close()


class Clocked(FakeExecutor):
    """Samples one token in each step of 4 ms on a logical clock. Other steps than those of a pause take 1 ms more."""

    def __init__(self, monkeypatch):
        super().__init__([])
        self._now_s = 0.0
        for module in ("drafted_steps", "plain_steps", "model_proposer"):
            clock = SimpleNamespace(perf_counter=lambda: self._now_s)
            monkeypatch.setattr(f"engine.executors.speculation.{module}.time", clock)

    def result(self):
        self._now_s += 0.004 + 0.001 * (not self._is_ahead)
        return StepOutput([[6]], [None])


class LongModel(FakeModel):
    max_seq_len = chunk = 10_000

    def __init__(self):
        super().__init__([])
        self.cache = DraftCache(1, 625, 16, 0)

    def run(self, rows, num_drafts):
        return super().run(rows, num_drafts) if rows[0].samples else []


@pytest.mark.parametrize("reason", ["grammar", "reading"])
def test_steps_are_launched_ahead_while_the_request_cannot_be_drafted_for(reason, monkeypatch):
    """Its grammar takes no drafts, or the draft model must not read its tokens. Other steps cost time in vain, so they
    come every 512 tokens, until it can be drafted for."""
    target, policy = Clocked(monkeypatch), DraftPolicy(runs_ahead=True)
    proposer = DraftModelProposer(LongModel(), 100)
    executor = SpeculativeExecutor(target, 3, proposer, policy)
    executor.allocate(625)
    proposer._costs.may_read = lambda num_tokens, step_s: reason == "grammar"
    rows, tried, drafted = [Row(0, 0, [3] * 20, [range(625)])], [], []
    for number in range(4000):
        max_drafts, takes_drafts = executor.max_drafts, reason == "reading" or number >= 3000
        target._is_ahead = not max_drafts
        rows = [replace(rows[0], max_drafts=max_drafts if takes_drafts and number else 0)]
        arrivals = [] if number else [Arrival(0, [3] * 20, 20, Sampling(8000))]
        output = executor.launch(Batch(rows, arrivals, max_drafts=max_drafts)).result()
        tried += [number] * bool(max_drafts)
        drafted += [number] * bool(output.num_drafts)
        rows = [Row(0, rows[0].start + len(rows[0].token_ids), [6])]
        if number == 3000:
            proposer._costs.may_read = lambda num_tokens, step_s: True
    assert sum(100 < number < 3000 for number in tried) < 8
    assert drafted and 3000 < drafted[0] < 3600
    executor.close()
