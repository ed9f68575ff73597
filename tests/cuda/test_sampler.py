"""The sampler of the GPU chooses what the definition chooses from the same logits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.executors.cuda.host_transfers import Uploads  # noqa: E402
from engine.executors.cuda.sampling import fields_to_send  # noqa: E402
from engine.ops import reference  # noqa: E402
from engine.ops.cuda.sampler import SamplingMode, sample, top_k_top_p  # noqa: E402
from engine.ops.sampling_rows import SampledRows  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.sampling_cases import CASES, a_mask, some_logits, some_rows, with_pairs  # noqa: E402

IGNORED = [f"ignore:{what} encountered" for what in ("overflow", "invalid value", "divide by zero")]
pytestmark = pytest.mark.filterwarnings(*IGNORED)
VOCABS = [1, 70, 5003] if IS_INTERPRETED else [1, 31, 70, 5003, 128256]


def run(device, logits, rows) -> SampledRows:
    mask = {} if rows.mask is None else {"mask": rows.mask}
    sent = Uploads(device).send(fields_to_send(rows) | mask)
    most = int(rows.num_logprobs.max())
    found = SampledRows.empty(len(logits), max(most, 0))
    found_by_name = sample(torch.from_numpy(logits.copy()).to(device), sent, SamplingMode.of(rows), most)
    for name, tensor in found_by_name.items():
        setattr(found, name, tensor.cpu().numpy())
    return found


@pytest.mark.parametrize("logprobs", [-1, 5] if IS_INTERPRETED else [-1, 0, 5])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_picks_what_the_definition_picks(device, case, logprobs):
    rows, logits = CASES[case], some_logits()
    rows.num_logprobs[:] = logprobs
    rows.num_logprobs[3] = -1
    expected, found = reference.sample(logits, rows), run(device, logits, rows)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.top_ids, expected.top_ids)
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-5, equal_nan=True)
    assert np.allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_any_size_and_any_flatness(device, vocab, scale):
    logits = some_logits(8, vocab, scale)
    for settings in ({}, {"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.5, "top_k": 40}, {"min_p": 0.3, "top_p": 0.9}):
        rows = some_rows(8, **settings)
        expected, found = reference.sample(logits, rows), run(device, logits, rows)
        assert np.array_equal(found.token_ids, expected.token_ids), settings


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 30, "top_p": 0.3}, {"top_k": 1}])
def test_of_equal_logits_the_lowest_ids_are_kept(device, settings):
    num_rows = 20 if IS_INTERPRETED else 60
    logits = np.repeat(np.arange(50, dtype=np.float32) % 3, 2)[None].repeat(num_rows, axis=0)
    rows = some_rows(num_rows, **settings)
    expected = reference.sample(logits, rows).token_ids
    assert np.array_equal(run(device, logits, rows).token_ids, expected)


def test_nothing_left_is_minus_one(device):
    rows = some_rows(2, temperature=[0.0, 1.0], num_logprobs=1)
    rows.mask = a_mask([], 2)
    results = run(device, some_logits(2), rows)
    assert results.token_ids.tolist() == [-1, -1]
    assert results.logprobs.tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_whose_logits_are_not_numbers_are_never_picked(device, temperature):
    logits = some_logits(4)
    logits[:, ::2] = np.nan
    assert (run(device, logits, some_rows(4, temperature=temperature)).token_ids % 2 == 1).all()
    logits[:] = np.nan
    assert run(device, logits, some_rows(4, temperature=temperature)).token_ids.tolist() == [-1] * 4


def test_a_bias_and_a_ban_of_one_token_add_up_and_what_no_row_asked_for_stays(device):
    rows = with_pairs(some_rows(1, temperature=0), bias=[(5, 100.0), (5, -np.inf), (6, 99.0)])
    assert run(device, some_logits(1), rows).token_ids.tolist() == [6]


def test_entries_of_other_slots_stay_here():
    rows = with_pairs(some_rows(2, presence_penalty=1.0), seen=[(5, 1), (7, 2)])
    rows.seen_ends[0] = rows.seen_starts[0]
    sent = fields_to_send(rows)
    assert {name: sent[name].tolist() for name in sent if "seen" in name} == {
        "seen_starts": [0, 0],
        "seen_ends": [0, 2],
        "seen_ids": [5, 7],
        "seen_counts": [1, 2],
    }
    assert "presence_penalty" not in fields_to_send(some_rows(2))


@pytest.mark.parametrize("settings", [{"top_k": 700}, {"top_p": 0.5}, {"top_k": 900, "top_p": 0.3}])
def test_where_too_many_candidates_are_left_the_whole_row_is_searched(device, monkeypatch, settings):
    """Equal logits, of which no pivot leaves few; and more candidates than there is room for."""
    monkeypatch.setattr(top_k_top_p, "MOST_CANDIDATES", 16)
    logits = np.repeat(np.arange(500, dtype=np.float32) % 3, 2)[None].repeat(6, axis=0)
    logits[3:] = some_logits(3, 1000, 0.001)
    rows = some_rows(6, **settings)
    monkeypatch.setattr(top_k_top_p, "ROUNDS", 1)
    assert np.array_equal(run(device, logits, rows).token_ids, reference.sample(logits, rows).token_ids)
