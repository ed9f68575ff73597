"""The ops that keep a state for each request: against their definitions, and the same bits on every path."""

import numpy as np
import pytest

from engine.core.cache_groups import MAX_REJECTED
from engine.ops import cpu, reference
from engine.ops.cpu.calls import ArgumentError
from tests.pure.state_layer import SHAPES, Layer, cuts_of, recurrence

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_chunked_form_is_the_recurrence(isa, sizes):
    layer = Layer([150], *sizes)
    no_lines = {"head_dim": layer.head_dim}
    where = layer.new_state(), np.array([0, 150], np.int32), np.zeros(1, np.int32), layer.tables
    y, _ = reference.causal_conv(layer.x, layer.taps, *where, **no_lines)
    padded = np.concatenate([np.zeros((3, layer.width)), layer.x])
    total = sum(padded[k : k + 150] * layer.taps[:, 0, k] for k in range(4))
    assert np.allclose(y, total / (1 + np.exp(-total)), atol=1e-6)
    expected = recurrence(layer, y)
    for ops in (reference, cpu.load(isa)):
        assert np.abs(layer.run(ops, layer.new_state(), {0: (0, 150)}) - expected).max() < 2e-6


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
@pytest.mark.parametrize("sizes", SHAPES)
def test_steps_of_several_requests_match_reference(isa, sizes, dtype):
    layer, ops = Layer([130, 3, 70], *sizes, dtype), cpu.load(isa)
    states = layer.new_state(), layer.new_state()
    for part in ({0: (0, 60), 1: (0, 2)}, {2: (0, 66), 0: (60, 61)}, {0: (61, 130), 1: (2, 3), 2: (66, 70)}):
        found, expected = (layer.run(each, state, part) for each, state in zip((ops, reference), states, strict=True))
        assert np.abs(found - expected).max() < 2e-6


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("cuts", ["one by one", "at borders", "sevens", "anywhere"])
def test_chunks_of_a_prompt_change_no_bit(isa, cuts, num_threads):
    layer, ops, before = Layer([200]), cpu.load(isa), cpu.num_threads()
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    cpu.set_num_threads(num_threads)
    try:
        assert np.array_equal(layer.run_cut(ops, layer.new_state(), cuts_of(cuts)), whole)
    finally:
        cpu.set_num_threads(before)


def test_requests_of_a_step_are_independent(isa):
    layer, ops = Layer([90, 1, 64]), cpu.load(isa)
    together = layer.run(ops, layer.new_state(), {b: (0, n) for b, n in enumerate(layer.counts)})
    alone = [layer.run(ops, layer.new_state(), {b: (0, n)}) for b, n in enumerate(layer.counts)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("begin", [40, 52, 56, 60, 63, 64, 120, 127])
@pytest.mark.parametrize("num_accepted", [0, 1, 5, MAX_REJECTED])
def test_rejected_positions_leave_no_trace(isa, begin, num_accepted):
    """A step with drafts computes `begin` and MAX_REJECTED positions behind it, the next one goes on where the accepted
    ones end. The rejected tokens are other ones."""
    layer, ops = Layer([200]), cpu.load(isa)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    state, end = layer.new_state(), begin + 1 + num_accepted
    layer.run_cut(ops, state, [begin])
    right = layer.x.copy()
    layer.x[end : begin + 1 + MAX_REJECTED] += 3
    drafted = layer.run(ops, state, {0: (begin, begin + 1 + MAX_REJECTED)})
    layer.x = right
    rest = np.concatenate([layer.run(ops, state, {0: (end, end + 1)}), layer.run(ops, state, {0: (end + 1, 200)})])
    assert np.array_equal(np.concatenate([drafted[: 1 + num_accepted], rest]), whole[begin:])


@pytest.mark.parametrize("end", [70, 76, 77, 128, 130, 139, 140])
@pytest.mark.parametrize("num_taken_back", [1, 5, MAX_REJECTED])
def test_the_last_positions_of_a_long_step_leave_no_trace(isa, end, num_taken_back):
    """A prompt is computed up to `end`; another one goes on with its state, whose last tokens are other ones."""
    layer, ops = Layer([200]), cpu.load(isa)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    right, state = layer.x.copy(), layer.new_state()
    layer.x[end - num_taken_back : end] += 3
    layer.run(ops, state, {0: (0, end)})
    layer.x = right
    start = end - num_taken_back
    rest = [layer.run(ops, state, {0: part}) for part in ((start, start + 3), (start + 3, 200))]
    assert np.array_equal(np.concatenate(rest), whole[start:])


def test_a_copy_of_a_state_continues_it(isa):
    layer, ops = Layer([200]), cpu.load(isa)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    state = layer.new_state()
    layer.run_cut(ops, state, [96])
    snapshot = state.copy()
    layer.run(ops, state, {0: (96, 200)})
    assert np.array_equal(layer.run(ops, snapshot, {0: (96, 200)}), whole[96:])


def test_gates_match_reference(isa):
    rng, ops = np.random.default_rng(0), cpu.load(isa)
    x, gate = 3 * rng.standard_normal((2, 7, 96), np.float32)
    weight = rng.standard_normal(24, np.float32)
    expected = reference.gated_rms_norm(x, gate, weight, epsilon=1e-6)
    assert np.allclose(ops.gated_rms_norm(x, gate, weight, epsilon=1e-6), expected, atol=2e-6)
    assert np.allclose(ops.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate), atol=1e-6)
    heads = rng.standard_normal(24).astype(np.float64)
    normed = heads / np.sqrt((heads**2).mean() + 1e-6) * weight
    row = np.tile(heads.astype(np.float32), 4)[None]
    ones = np.ones_like(row)
    assert np.allclose(reference.gated_rms_norm(row, ones, weight, epsilon=1e-6)[0, 24:48], normed / (1 + np.exp(-1)))


def test_a_state_that_is_too_small_is_refused(isa):
    layer = Layer([5])
    state, layer.tables = layer.new_state(), np.ascontiguousarray(layer.tables[:, :-1])
    with pytest.raises(ArgumentError, match=r"gated_delta_rule: the state has \d+ lines, needs"):
        layer.run(cpu.load(isa), state, {0: (0, 5)})
