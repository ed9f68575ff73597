"""The C++ sampler against `sample_row`, and `sample_row` against what the words mean."""

import numpy as np
import pytest

from engine.ops import cpu, reference
from engine.ops.reference_sampling import philox4x32, philox_uniforms
from tests.sampling_cases import CASES, VOCAB, a_mask, some_logits, some_rows, with_pairs


@pytest.fixture(params=[reference, *cpu.available_isas()], ids=lambda param: getattr(param, "__name__", param))
def ops(request):
    return cpu.load(request.param) if isinstance(request.param, str) else request.param


@pytest.mark.parametrize("logprobs", [-1, 0, 5])
@pytest.mark.parametrize("case", CASES)
def test_kernels_pick_what_the_definition_picks(case, logprobs):
    rows, logits = CASES[case], some_logits()
    rows.num_logprobs[:] = logprobs
    rows.num_logprobs[3] = -1
    expected = reference.sample(logits, rows)
    for isa in cpu.available_isas():
        found = cpu.load(isa).sample(logits, rows)
        assert np.array_equal(found.token_ids, expected.token_ids), isa
        assert np.array_equal(found.top_ids, expected.top_ids), isa
        assert np.allclose(found.logprobs, expected.logprobs, atol=1e-5, equal_nan=True), isa
        assert np.allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5), isa


@pytest.mark.parametrize("vocab", [1, 31, 33, 70, 5003])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_any_size_and_any_flatness(vocab, scale):
    logits = some_logits(40, vocab, scale)
    for settings in ({}, {"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.5, "top_k": 40}, {"min_p": 0.3, "top_p": 0.9}):
        rows = some_rows(40, **settings, num_logprobs=3)
        expected = reference.sample(logits, rows)
        for isa in cpu.available_isas():
            found = cpu.load(isa).sample(logits, rows)
            assert np.array_equal(found.token_ids, expected.token_ids), (isa, settings)
            assert np.array_equal(found.top_ids, expected.top_ids), (isa, settings)


def test_ties_go_to_the_lowest_id(ops):
    logits = np.full((2, VOCAB), -1.0, np.float32)
    logits[:, [700, 41, 900]] = 2.0
    assert ops.sample(logits, some_rows(2, temperature=0)).token_ids.tolist() == [41, 41]
    assert ops.sample(logits, some_rows(2, top_k=1)).token_ids.tolist() == [41, 41]
    rows = some_rows(200, top_k=2)
    drawn = ops.sample(np.repeat(logits[:1], 200, axis=0), rows).token_ids
    assert set(drawn.tolist()) == {41, 700}


def test_repetition_makes_negative_logits_smaller_too(ops):
    rows = with_pairs(some_rows(2, temperature=0, repetition_penalty=2), seen=[(0, 0)])
    logits = np.array([[-1, -1.5, -9], [1, 0.6, -9]], np.float32)
    assert ops.sample(logits, rows).token_ids.tolist() == [1, 1]


def test_nothing_left_is_minus_one(ops):
    rows = some_rows(2, temperature=[0.0, 1.0], num_logprobs=1)
    rows.mask = a_mask([], 2)
    results = ops.sample(some_logits(2), rows)
    assert results.token_ids.tolist() == [-1, -1]
    assert results.logprobs.tolist() == [-np.inf, -np.inf]
    assert (results.top_ids >= 0).all()


def test_logprobs_are_those_of_the_model(ops):
    rows = with_pairs(some_rows(1, temperature=0, num_logprobs=2), bias=[(17, 100.0)])
    logits = some_logits(1)
    results = ops.sample(logits, rows)
    assert results.token_ids.tolist() == [17]
    assert results.logprobs[0] == pytest.approx(logits[0, 17] - np.log(np.exp(logits[0].astype(float)).sum()), abs=1e-5)
    assert results.top_ids[0].tolist() == np.argsort(-logits[0])[:2].tolist()


@pytest.mark.parametrize("isa", cpu.available_isas())
def test_kernels_never_pick_a_nan(isa):
    logits = some_logits(4)
    logits[:, ::2] = np.nan
    drawn = cpu.load(isa).sample(
        logits, some_rows(4, temperature=[0, 1, 1, 1], top_k=[0, 0, 3, 0], top_p=[1, 1, 1, 0.5])
    )
    assert (drawn.token_ids % 2 == 1).all()


@pytest.mark.parametrize("isa", cpu.available_isas())
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_nan_does_not_hide_the_numbers_around_it(isa, temperature):
    logits = np.where(np.arange(VOCAB) % 3 == np.arange(6)[:, None] % 3, np.float32(1), np.float32(np.nan))
    logits[:, 400:405] = np.nan
    tokens = np.arange(6) + 400
    logits[np.arange(6), tokens] = 99
    rows = some_rows(6, temperature=temperature, top_k=1, num_logprobs=1)
    results = cpu.load(isa).sample(logits, rows)
    assert results.token_ids.tolist() == results.top_ids[:, 0].tolist() == tokens.tolist()


def test_no_rows_are_fine(ops):
    assert ops.sample(some_logits(0), some_rows(0)).token_ids.shape == (0,)


@pytest.mark.slow
def test_draws_follow_the_distribution(ops):
    num = 3000 if ops is reference else 20000
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = np.tile(np.log(probabilities).astype(np.float32), (num, 1))
    drawn = ops.sample(logits, some_rows(num, seed=11, counter=np.arange(num))).token_ids
    assert np.allclose(np.bincount(drawn, minlength=5) / num, probabilities, atol=3 * 0.5 / num**0.5)
    kept = ops.sample(logits, some_rows(num, seed=11, counter=np.arange(num), top_p=0.7)).token_ids
    assert np.allclose(np.bincount(kept, minlength=5) / num, [2 / 3, 1 / 3, 0, 0, 0], atol=3 * 0.5 / num**0.5)


def test_xtc_leaves_the_least_likely_token_above_the_threshold_as_often_as_asked(ops):
    num = 400
    logits = np.tile(np.log([0.125, 0.5, 0.25, 0.0625, 0.0625]).astype(np.float32), (num, 1))
    rows = some_rows(num, counter=np.arange(num), temperature=0.01, xtc_probability=0.25, xtc_threshold=0.1)
    drawn = ops.sample(logits, rows).token_ids
    assert set(drawn.tolist()) == {0, 1}
    assert np.mean(drawn == 0) == pytest.approx(0.25, abs=0.07)
    for threshold, last in ((0.3, 1), (0.2, 2), (0.06, 4)):  # one token above, two, and all with a tie
        rows = some_rows(num, temperature=0.01, xtc_probability=1, xtc_threshold=threshold)
        assert set(ops.sample(logits, rows).token_ids.tolist()) == {last}


def test_typical_p_keeps_the_tokens_nearest_to_the_expected_log_probability(ops):
    logits = np.tile(np.log([0.3, *[0.07] * 10]).astype(np.float32), (400, 1))
    for share, kept in ((0.6, {*range(1, 11)}), (0, {*range(1, 11)}), (0.9, {*range(11)})):
        rows = some_rows(400, counter=np.arange(400), typical_p=share)
        assert set(ops.sample(logits, rows).token_ids.tolist()) == kept
    greedy = some_rows(400, typical_p=0.6, temperature=0)
    assert set(ops.sample(logits, greedy).token_ids.tolist()) == {0}


def test_philox_gives_the_published_numbers():
    """Known answers of the authors' own test, Random123 kat_vectors."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox4x32(*digits) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_numbers_are_uniform():
    pairs = np.array([philox_uniforms(5, counter) for counter in range(2000)])
    for numbers in pairs.T:
        assert 0 <= min(numbers) < 0.01 < 0.99 < max(numbers) < 1
        assert np.mean(numbers) == pytest.approx(0.5, abs=0.03)
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.1
