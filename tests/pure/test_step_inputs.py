"""From a batch to the arrays of a step, worked out by hand, and through the numpy sampler to tokens."""

import numpy as np
import pytest

from engine.core.types import NO_TOKEN, Batch, Chunk, Request, Sampling
from engine.executors.step_inputs import graph_inputs, sampling_rows, step_output
from engine.ops import cpu
from engine.ops.reference import sample


def a_request(prompt=(1, 2, 3), answer=(), block_ids=(0,), **sampling):
    fields = {"max_new_tokens": 50, "temperature": 0, **sampling}
    return Request("a", [*prompt, *answer], len(prompt), Sampling(**fields), list(block_ids))


def pairs_of(rows, row):
    return [(int(token_id), float(bias)) for token_id, bias in rows.bias_of(row)]


def test_chunks_and_decodes_lie_side_by_side():
    decode = a_request([10, 11], [12], block_ids=[4])
    whole = a_request([20, 21, 22], block_ids=[7, 5])
    first_part = a_request([30, 31, 32, 33], block_ids=[1, 2, 3])
    batch = Batch([Chunk(decode, 2, 1), Chunk(whole, 1, 2), Chunk(first_part, 0, 3)])
    inputs = graph_inputs(batch)
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "token_ids": [12, 21, 22, 30, 31, 32],
        "positions": [2, 1, 2, 0, 1, 2],
        "query_starts": [0, 1, 3, 6],
        "context_lens": [2, 1, 0],
        "block_tables": [[4, 0, 0], [7, 5, 0], [1, 2, 3]],
        "logit_rows": [0, 2],  # the prompt in two parts has no token to choose yet
    }
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.int32)}


def test_a_step_without_a_token_to_choose_has_no_logits():
    inputs = graph_inputs(Batch([Chunk(a_request([1, 2, 3]), 0, 2)]))
    assert inputs["logit_rows"].shape == (0,)
    assert inputs["logit_rows"].dtype == np.int32


def test_each_row_has_the_sampling_of_its_request():
    plain = a_request()
    sampled = a_request(
        answer=[5, 5],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=0.75,
        presence_penalty=-0.5,
        seed=2**64 - 1,
        num_logprobs=4,
    )
    rows = sampling_rows([plain, sampled])
    for name, value in (
        ("temperature", 0.5),
        ("top_p", 0.25),
        ("top_k", 7),
        ("min_p", 0.125),
        ("repetition_penalty", 1.5),
        ("frequency_penalty", 0.75),
        ("presence_penalty", -0.5),
        ("seed", 2**64 - 1),
        ("counter", 2),
        ("num_logprobs", 4),
    ):
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
    other = a_request([9], repetition_penalty=2.0)
    rows = sampling_rows([other, a_request([1, 2, 1], [5, 2, 5], **penalties), other])
    assert dict(rows.seen_of(1)) == seen
    assert dict(rows.seen_of(0)) == dict(rows.seen_of(2)) == {9: 0}
    assert (rows.seen_ids.dtype, rows.seen_counts.dtype, rows.seen_starts.dtype) == (np.int32, np.int32, np.int32)


@pytest.mark.parametrize(("penalties", "seen"), [({}, {2: 2, 3: 1}), ({"repetition_penalty": 1.5}, {1: 0, 2: 2, 3: 1})])
def test_what_the_penalties_see_is_the_same_however_the_answer_came(penalties, seen):
    grown = a_request([1, 2], **penalties)
    for token_id in (2, 3, 2):
        grown.append(token_id)
    assert grown.seen == a_request([1, 2], [2, 3, 2], **penalties).seen == seen


@pytest.mark.parametrize(("num_new_tokens", "banned"), [(0, [7, 8]), (1, [7, 8]), (2, []), (3, [])])
def test_stop_ids_are_banned_until_the_least_length(num_new_tokens, banned):
    request = a_request(answer=[9] * num_new_tokens, min_new_tokens=2, stop_token_ids=(7, 8))
    assert pairs_of(sampling_rows([request]), 0) == [(token_id, -np.inf) for token_id in banned]


@pytest.mark.parametrize(
    ("answer", "banned"),
    [([], [4]), ([5], [4, 6]), ([5, 6], [4, 7]), ([6], [4]), ([5, 6, 5], [4, 6])],
)
def test_a_bad_word_is_banned_at_its_last_token(answer, banned):
    """The prompt ends with 5, which does not begin the word: it must be in the answer as a whole."""
    request = a_request([1, 5], answer, bad_words=((4,), (5, 6), (5, 6, 7)))
    assert [token_id for token_id, _ in pairs_of(sampling_rows([request]), 0)] == banned


def test_biases_and_bans_are_each_rows_own():
    rows = sampling_rows([a_request(logit_bias=((3, 1.5), (4, -2.0))), a_request(), a_request(bad_words=((4,),))])
    assert [pairs_of(rows, row) for row in range(3)] == [[(3, 1.5), (4, -2.0)], [], [(4, -np.inf)]]


def test_tokens_and_logprobs_come_back_by_request():
    requests = [a_request(), a_request(num_logprobs=0), a_request(num_logprobs=2), a_request(num_logprobs=1)]
    logits = np.array([[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 0, 5]], np.float32)
    output = step_output(sample(logits, sampling_rows(requests)), requests)
    assert output.token_ids == [2, 0, 1, 2]
    none, chosen_only, two, one = output.logprobs
    assert none is None
    assert chosen_only.top == ()
    assert [token_id for token_id, _ in two.top] == [1, 0]
    assert two.top[0][1] == two.chosen == pytest.approx(2 - np.log(np.exp([1, 2, 0]).sum()))
    assert [token_id for token_id, _ in one.top] == [2]
    assert all(type(value) is float for value in (two.chosen, two.top[0][1]))
    assert all(type(token_id) is int for token_id in output.token_ids)


def test_no_request_with_logits_is_no_row():
    rows = sampling_rows([])
    assert rows.temperature.shape == (0,)
    assert rows.seen_starts.tolist() == rows.bias_starts.tolist() == [0]


def test_a_request_whose_logits_are_no_numbers_gets_no_token_and_the_others_theirs():
    requests = [a_request(num_logprobs=1), a_request(num_logprobs=2), a_request(num_logprobs=2, temperature=1)]
    logits = np.array([[0, 1, 2], [np.nan] * 3, [np.nan] * 3], np.float32)
    output = step_output(cpu.sample(logits, sampling_rows(requests)), requests)
    assert output.token_ids == [2, NO_TOKEN, NO_TOKEN]
    assert [len(logprobs.top) for logprobs in output.logprobs] == [1, 0, 0]


def test_a_seeded_answer_is_the_same_from_its_middle_on():
    """What a replay after a crash relies on: the random number depends on seed and position alone."""
    logits = np.random.default_rng(0).standard_normal((1, 50)).astype(np.float32)

    def answer_of(begun):
        request = a_request([1], begun, temperature=1.0, seed=11, presence_penalty=0.5)
        while request.num_new_tokens < 12:
            [token_id] = step_output(sample(logits, sampling_rows([request])), [request]).token_ids
            request.append(token_id)
        return request.token_ids[1:]

    whole = answer_of([])
    assert len(set(whole)) > 3
    assert answer_of(whole[:5]) == whole
