"""The steps that a GPU runs before the server is ready are steps that the executor could be asked for."""

from __future__ import annotations

import pytest

from engine.executors.cuda.warm_up import StepLimits, warm_up_batches

LARGE = StepLimits(max_tokens=8192, max_context=8192, max_requests=256, block_size=64, max_prompt_logits=128)
LIMITS = [
    LARGE,
    LARGE._replace(max_tokens=64, max_context=64, max_requests=4, block_size=16),
    StepLimits(max_tokens=16, max_context=16, max_requests=1, block_size=16, max_prompt_logits=1),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_every_batch_is_within_the_limits(limits):
    for batch in warm_up_batches(limits, fresh_lengths=[4096]):
        assert 1 <= batch.num_tokens <= limits.max_tokens
        slots = [row.slot for row in batch.rows]
        assert slots == [arrival.slot for arrival in batch.arrivals] == list(range(len(slots)))
        assert len(slots) <= limits.max_requests
        for row, arrival in zip(batch.rows, batch.arrivals, strict=True):
            end = row.start + len(row.token_ids)
            assert end == len(arrival.token_ids) <= limits.max_context
            assert len(row.new_block_ids[0]) == -(-end // limits.block_size)


def test_every_kind_of_step_is_there():
    batches = list(warm_up_batches(LARGE, fresh_lengths=[4096, 5120]))
    shapes = {(len(batch.rows), batch.num_tokens) for batch in batches}
    assert {(1, 1), (1, 513), (1, 4096), (1, 5120), (1, 8192), (256, 256), (256, 768), (2, 601)} <= shapes
    assert any(batch.has_mask for batch in batches)
    assert any(batch.has_prompt_outputs for batch in batches)
    assert any(row.start for batch in batches for row in batch.rows)
    sampled = {arrival.sampling for batch in batches for arrival in batch.arrivals}
    assert {(each.temperature > 0, each.top_k > 0, each.top_p < 1) for each in sampled} == {
        (False, False, False),
        *((True, top_k, top_p) for top_k in (False, True) for top_p in (False, True)),
    }
    assert any(each.logit_bias and each.repetition_penalty != 1 for each in sampled)
