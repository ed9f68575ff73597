"""Runs of a draft model on a device that runs ahead: the step that verifies the drafts is launched before they are
known."""

import pytest

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.types import Arrival, Batch, Row, Sampling, StepOutput
from engine.executors.draft_cache import DraftCache
from engine.executors.drafting import DraftingExecutor
from engine.executors.model_drafts import ModelDrafts

IDS, TOKENS = [-10, -11, -12], [6, 7, 8]


class FakeModel:
    """Draft model that always drafts the same tokens."""

    max_seq_len, block_bytes, chunk = 100, 0, 100

    def __init__(self, events):
        self.cache, self._events = DraftCache(1, 4, 4, 0), events

    def allocate(self, num_blocks):
        self.cache.allocate(num_blocks)

    def place(self, batch):
        self.cache.place(batch)

    def begin(self, rows, num_drafts):
        self._events.append("begin")
        return [IDS[:num_drafts]]

    def finish(self):
        self._events.append("finish")
        return [TOKENS]

    def run(self, rows, num_drafts):
        self._events.append("run")
        return [TOKENS[:num_drafts]]


class FakeExecutor:
    """Executor that runs ahead, notes the tokens of a step at its launch and at its end, and accepts two drafts."""

    block_size, block_bytes, max_prompt_logits = 4, 0, 0
    cache_groups, takes_spans, runs_ahead = FULL_ATTENTION, False, True

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
        pytest.param(Sampling(50), ["begin", [5, *IDS], "finish", [5, *TOKENS]], id="usual"),
        pytest.param(Sampling(50, repetition_penalty=1.1), ["run", [5, *TOKENS], [5, *TOKENS]], id="with a penalty"),
    ],
)
def test_a_step_is_launched_before_its_drafts_are_known_unless_its_sampling_needs_them(sampling, expected):
    events = []
    executor = DraftingExecutor(FakeExecutor(events), 3, ModelDrafts(FakeModel(events), 100))
    executor.allocate(4)
    batch = Batch([Row(0, 2, [5], [[0, 1]], max_drafts=3)], [Arrival(0, [3, 4, 5], 2, sampling)], max_drafts=3)
    step = executor.launch(batch)
    assert step.result().token_ids == [[6, 7, 9]]
    assert events[: len(expected)] == expected
    assert step.drafts()[0] == expected[-1][1:]
    assert executor.draft_counts.stats()["num_accepted_tokens/draft/2"] == 1
    executor.close()
