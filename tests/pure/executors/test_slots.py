"""Tests of the arrays of a step for a batch, worked out by hand, and of the tokens that the numpy sampler makes of
them.
"""

import numpy as np
import pytest

from engine.core.types import NO_TOKEN, Arrival, Batch, Copy, Row, Sampling
from engine.executors.slots import Choices, Slots
from engine.ops import cpu
from engine.ops.reference import sample

VOCAB = 50


def an_arrival(slot=0, prompt=(1, 2, 3), answer=(), **sampling):
    fields = {"max_new_tokens": 50, "temperature": 0, **sampling}
    return Arrival(slot, [*prompt, *answer], len(prompt), Sampling(**fields))


def slots_with(*arrivals, num_slots=4):
    slots = Slots(num_slots, 8, 4, VOCAB)
    slots.place(Batch([], arrivals))
    return slots


def rows_of(slots, *numbers, tails=None):
    return slots.sampling_rows(Choices(list(numbers), tails or [()] * len(numbers), None))


def pairs_of(rows, row):
    return [(int(token_id), float(bias)) for token_id, bias in rows.bias_of(row)]


# --- the graph's inputs


def test_prompts_and_decodes_lie_side_by_side():
    slots = slots_with(an_arrival(0), an_arrival(1), an_arrival(2))
    batch = Batch([Row(2, 4, [12], [[4, 6]]), Row(0, 1, [21, 22], [[7]]), Row(1, 0, [30, 31, 32], [[1, 2, 3]], 0)])
    slots.place(batch)
    inputs = slots.graph_inputs(batch)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "token_ids": [12, 21, 22, 30, 31, 32],
        "positions": [4, 1, 2, 0, 1, 2],
        "query_starts": [0, 1, 3, 6],
        "context_lens": [4, 1, 0],
        "block_tables": [[4, 6], [7, 0], [1, 2]],  # as wide as the longest of this step
        "logit_rows": [0, 2],  # the prompt in two parts has no token to choose yet
    }
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.int32)}


def test_a_step_without_a_token_to_choose_has_no_logits():
    slots = slots_with(an_arrival())
    inputs = slots.graph_inputs(Batch([Row(0, 0, [1, 2], [[0]], 0)]))
    assert inputs["logit_rows"].shape == (0,)
    assert inputs["logit_rows"].dtype == np.int32


def test_drafts_want_the_logits_of_every_token_that_they_follow():
    slots = slots_with(an_arrival(0), an_arrival(1))
    inputs = slots.graph_inputs(Batch([Row(0, 5, [1, 2, 3], (), 3), Row(1, 7, [9])]))
    assert inputs["logit_rows"].tolist() == [0, 1, 2, 3]
    assert inputs["positions"].tolist() == [5, 6, 7, 7]


def test_a_block_table_grows_step_by_step_and_begins_anew_with_the_next_arrival():
    slots = slots_with(an_arrival())
    for new_block_ids in ([5, 6], [], [7]):
        slots.place(Batch([Row(0, 8, [1], [new_block_ids])]))
    assert slots.graph_inputs(Batch([Row(0, 8, [1])]))["block_tables"].tolist() == [[5, 6, 7]]
    slots.place(Batch([Row(0, 0, [1], [[3]])], [an_arrival()]))
    assert slots.graph_inputs(Batch([Row(0, 0, [1])]))["block_tables"].tolist() == [[3]]


@pytest.mark.parametrize("new_block_ids", [[], [5, 9]], ids=["known", "new"])
def test_a_copied_block_takes_its_place_in_the_table(new_block_ids):
    """This includes a fork, whose blocks come with its first row and are given as they are after the copy."""
    slots = slots_with(an_arrival())
    if not new_block_ids:
        slots.place(Batch([Row(0, 0, [1], [[5, 6]])]))
    slots.place(Batch([Row(0, 7, [1], [new_block_ids])], copies=[Copy(0, 0, 1, 6, 9)]))
    assert slots.graph_inputs(Batch([Row(0, 7, [1])]))["block_tables"].tolist() == [[5, 9]]


# --- the sampler's rows


def test_each_row_has_the_sampling_of_its_slot():
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
    fields |= {"frequency_penalty": 0.75, "presence_penalty": -0.5, "seed": 2**64 - 1, "num_logprobs": 4}
    rows = rows_of(slots_with(an_arrival(3), an_arrival(1, answer=[5, 5], **fields)), 3, 1)
    for name, value in {**fields, "counter": 2}.items():
        assert getattr(rows, name)[1] == value, name
    assert (rows.temperature[0], rows.top_k[0], rows.counter[0], rows.num_logprobs[0]) == (0, 0, 0, -1)
    assert rows.max_logprobs == 4


@pytest.mark.parametrize(
    ("penalties", "seen"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.5}, {1: 0, 2: 1, 5: 2}),
        ({"frequency_penalty": 0.5}, {2: 1, 5: 2}),
        ({"presence_penalty": 0.5}, {2: 1, 5: 2}),
    ],
)
def test_penalties_see_the_answer_and_repetition_also_the_prompt(penalties, seen):
    others = [an_arrival(slot, [9], repetition_penalty=2.0) for slot in (0, 2)]
    rows = rows_of(slots_with(*others, an_arrival(1, [1, 2, 1], [5, 2, 5], **penalties)), 0, 1, 2)
    assert dict(rows.seen_of(1)) == seen
    assert dict(rows.seen_of(0)) == dict(rows.seen_of(2)) == {9: 0}
    assert (rows.seen_ids.dtype, rows.seen_counts.dtype, rows.seen_starts.dtype) == (np.int32, np.int32, np.int32)


@pytest.mark.parametrize(("penalties", "seen"), [({}, {}), ({"repetition_penalty": 1.5}, {1: 0, 2: 25, 3: 1})])
def test_penalties_see_the_same_tokens_however_the_answer_came(penalties, seen):
    tokens = [2, 3, *[2] * 24]
    grown, resumed = slots_with(an_arrival(0, [1, 2], **penalties)), an_arrival(0, [1, 2], tokens, **penalties)
    for token_id in tokens:
        choose(grown, token_id)
    assert dict(rows_of(grown, 0).seen_of(0)) == dict(rows_of(slots_with(resumed), 0).seen_of(0)) == seen


def choose(slots, *token_ids, row=None):
    """Run one step with a certain model: for each token to sample, the next of `token_ids`."""
    logits = np.zeros((len(token_ids), VOCAB), np.float32)
    logits[np.arange(len(token_ids)), token_ids] = 1000
    return slots.sample(Batch([row or Row(0, 0, [0])]), logits, None, sample)


@pytest.mark.parametrize(("num_new_tokens", "banned"), [(0, [7, 8]), (1, [7, 8]), (2, []), (3, [])])
def test_stop_ids_are_banned_until_the_least_length(num_new_tokens, banned):
    slots = slots_with(an_arrival(answer=[9] * num_new_tokens, min_new_tokens=2, stop_token_ids=(7, 8)))
    assert pairs_of(rows_of(slots, 0), 0) == [(token_id, -np.inf) for token_id in banned]


@pytest.mark.parametrize(
    ("answer", "banned"),
    [([], [4]), ([5], [4, 6]), ([5, 6], [4, 7]), ([6], [4]), ([5, 6, 5], [4, 6])],
)
def test_a_bad_word_is_banned_at_its_last_token(answer, banned):
    """The prompt ends with 5, which does not begin the word: the word must be in the answer as a whole."""
    slots = slots_with(an_arrival(0, [1, 5], bad_words=((4,), (5, 6), (5, 6, 7))))
    resumed = slots_with(an_arrival(0, [1, 5], answer, bad_words=((4,), (5, 6), (5, 6, 7))))
    drafted = rows_of(slots, 0, tails=[answer])
    for rows in (drafted, rows_of(resumed, 0)):
        assert [token_id for token_id, _ in pairs_of(rows, 0)] == banned


def test_biases_and_bans_are_each_slots_own():
    arrivals = an_arrival(0, logit_bias=((3, 1.5), (4, -2.0))), an_arrival(1), an_arrival(2, bad_words=((4,),))
    rows = rows_of(slots_with(*arrivals), 0, 1, 2)
    assert [pairs_of(rows, row) for row in range(3)] == [[(3, 1.5), (4, -2.0)], [], [(4, -np.inf)]]


def test_an_arrival_forgets_who_was_there_before():
    fields = {"repetition_penalty": 2.0, "logit_bias": ((3, 1.5),), "temperature": 1.0}
    slots = slots_with(an_arrival(0, **fields), an_arrival(1, **fields))
    slots.place(Batch([], [an_arrival(0)]))
    rows = rows_of(slots, 0, 1)
    assert (dict(rows.seen_of(0)), pairs_of(rows, 0), rows.temperature[0]) == ({}, [], 0)
    assert rows.temperature[1] == 1


# --- tokens


def test_tokens_and_logprobs_come_back_by_row():
    arrivals = [an_arrival(slot, num_logprobs=count) for slot, count in enumerate((-1, 0, 2, 1))]
    slots = slots_with(*arrivals)
    logits = np.array([[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 0, 5]], np.float32)
    output = slots.sample(Batch([Row(slot, 0, [1]) for slot in range(4)]), logits, None, sample)
    assert output.token_ids == [[2], [0], [1], [2]]
    none, [chosen_only], [two], [one] = output.logprobs
    assert none is None
    assert chosen_only.top == ()
    assert [token_id for token_id, _ in two.top] == [1, 0]
    assert two.top[0][1] == two.chosen == pytest.approx(2 - np.log(np.exp([1, 2, 0]).sum()))
    assert [token_id for token_id, _ in one.top] == [2]
    assert all(type(value) is float for value in (two.chosen, two.top[0][1]))
    assert all(type(token_id) is int for [token_id] in output.token_ids)


def test_a_step_that_only_reads_a_prompt_chooses_nothing():
    output = slots_with(an_arrival()).sample(Batch([Row(0, 0, [1, 2], [[0]], 0)]), np.zeros((0, 3)), None, sample)
    assert (output.token_ids, output.logprobs) == ([], [])


def test_a_request_whose_logits_are_no_numbers_gets_no_token_and_the_others_theirs():
    arrivals = [an_arrival(slot, num_logprobs=2, temperature=slot // 2) for slot in range(3)]
    logits = np.array([[0, 1, 2], [np.nan] * 3, [np.nan] * 3], np.float32)
    batch = Batch([Row(slot, 0, [1]) for slot in range(3)])
    output = slots_with(*arrivals).sample(batch, logits, None, cpu.sample)
    assert output.token_ids == [[2], [NO_TOKEN], [NO_TOKEN]]
    assert [len(logprobs.top) for [logprobs] in output.logprobs] == [2, 0, 0]


@pytest.mark.parametrize(
    ("chosen", "accepted"),
    [([10, 11, 12], [10, 11, 12]), ([10, 9, 12], [10, 9]), ([9, 11, 12], [9]), ([10, 11, 9], [10, 11, 9])],
)
def test_of_a_row_with_drafts_the_tokens_count_up_to_the_first_that_is_another(chosen, accepted):
    slots = slots_with(an_arrival(0, [1], frequency_penalty=0.5))
    output = choose(slots, *chosen, row=Row(0, 0, [1, 10, 11], (), 3))
    assert output.token_ids == [accepted]
    rows = rows_of(slots, 0)
    assert rows.counter[0] == len(accepted)
    assert dict(rows.seen_of(0)) == dict.fromkeys(accepted, 1)


def test_a_token_that_a_draft_brings_twice_counts_twice():
    others = [an_arrival(slot, [1], frequency_penalty=0.5) for slot in (1, 2, 3)]
    slots = slots_with(an_arrival(0, [1], frequency_penalty=0.5), *others)
    choose(slots, 10, 10, row=Row(0, 0, [1, 10], (), 2))
    assert dict(rows_of(slots, 0).seen_of(0)) == {10: 2}


def test_each_token_after_a_draft_is_chosen_as_if_the_draft_were_the_answer():
    fields = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "repetition_penalty": 1.3, "min_new_tokens": 2}
    fields |= {"stop_token_ids": (4,), "bad_words": ((7, 8),)}
    logits = np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)

    def answer_of(begun, count=12):
        slots, tokens = slots_with(an_arrival(0, [1], begun, **fields)), list(begun)
        while len(tokens) < count:
            [[token_id]] = slots.sample(Batch([Row(0, 0, [1])]), logits, None, sample).token_ids
            tokens.append(token_id)
        return tokens

    whole = answer_of([])
    assert len(set(whole)) > 3
    assert answer_of(whole[:5]) == whole  # what a replay after a crash relies on
    slots = slots_with(an_arrival(0, [1], **fields))
    batch = Batch([Row(0, 0, [1, *whole[:11]], (), 12)])
    assert slots.sample(batch, np.repeat(logits, 12, axis=0), None, sample).token_ids == [whole]


def test_forks_choose_from_the_logits_of_their_leader_each_with_its_own_seed():
    arrivals = [an_arrival(slot, temperature=1.0, seed=slot % 3) for slot in range(4)]
    logits = np.random.default_rng(0).standard_normal((2, VOCAB)).astype(np.float32)
    batch = Batch([Row(0, 0, [1, 2, 3], [[0]], 1, [1, 3]), Row(2, 0, [1])])
    together = slots_with(*arrivals).sample(batch, logits, None, sample).token_ids
    alone = []
    for slot, row in ((0, 0), (1, 0), (3, 0), (2, 1)):
        alone += slots_with(*arrivals).sample(Batch([Row(slot, 0, [1])]), logits[row : row + 1], None, sample).token_ids
    assert together == alone
    assert together[0] == together[2] != together[1]


def test_a_mask_leaves_what_a_grammar_allows():
    mask = np.array([[1 << 3, 0], [0, 1 << 9]], np.uint32)
    logits = np.random.default_rng(0).standard_normal((2, VOCAB)).astype(np.float32)
    batch = Batch([Row(0, 0, [1]), Row(1, 0, [1])])
    output = slots_with(an_arrival(0), an_arrival(1)).sample(batch, logits, mask, sample)
    assert output.token_ids == [[3], [41]]
