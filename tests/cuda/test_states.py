"""Ops that keep a state for each request, on the GPU: against their definitions, and the same bits on every path."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.core.cache_groups import MAX_REJECTED  # noqa: E402
from engine.ops import reference  # noqa: E402
from engine.ops.cuda import invariant  # noqa: E402
from tests.cuda.arrays import BF16_STEP, Ops, assert_close, floats  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED  # noqa: E402
from tests.pure.state_layer import SHAPES, Layer, cuts_of, recurrence  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in"
)  # NaN of earlier owners, and the interpreter's overflow
SIZES = (1, 2, 32) if IS_INTERPRETED else (2, 4, 128)


@pytest.fixture(scope="module")
def ops(device):
    """Return the ops of BATCH_INVARIANT=1; the others differ in steps of one token for each request."""
    return Ops(device, invariant)


@pytest.mark.parametrize("sizes", SHAPES)
def test_steps_of_one_token_match_reference(device, sizes):
    """They begin at any position of a chunk, close it, and follow a step whose last positions were rejected."""
    layer, ops = Layer([140, 140, 140], *sizes), Ops(device)
    states = layer.new_state(), layer.new_state()
    parts = [{0: (0, 62), 1: (0, 128), 2: (0, 77)}, {0: (62, 63), 1: (120, 121), 2: (70, 71)}]
    parts += [{0: (n, n + 1), 1: (n + 58, n + 59), 2: (n + 8, n + 9)} for n in range(63, 66)]
    for part in parts:
        found, expected = (layer.run(each, state, part) for each, state in zip((ops, reference), states, strict=True))
        assert np.abs(found - expected).max() < 3e-6


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_whole_layer_matches_its_parts(device, sizes):
    """Steps of one token for each request have a kernel of their own, which another kind of step comes before and
    behind."""
    layer, ops, rng = Layer([140, 140], *sizes), Ops(device), np.random.default_rng(2)
    gate = floats(rng, 280, layer.num_v_heads * layer.head_dim)
    weight, states = floats(rng, layer.head_dim), (layer.new_state(), layer.new_state())
    parts = [{0: (0, 3), 1: (0, 94)}, *({0: (n, n + 1), 1: (n + 91, n + 92)} for n in range(3, 7))]
    for part in (*parts, {0: (7, 12), 1: (98, 99)}, {0: (12, 13), 1: (99, 100)}):
        rows, where = layer.step(states[0], part)
        given = layer.taps, *where, layer.gates[rows], layer.a_log, layer.dt_bias, *where, gate[rows], weight
        found, _ = ops.gated_delta_net(layer.x[rows], *given, **layer.heads, epsilon=1e-6)
        out = layer.run(reference, states[1], part)
        assert_close(found, reference.gated_rms_norm(out, gate[rows], weight, epsilon=1e-6), 2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
@pytest.mark.parametrize("sizes", SHAPES)
def test_steps_of_several_requests_match_reference(ops, sizes, dtype):
    layer = Layer([130, 3, 70], *sizes, dtype)
    states = layer.new_state(), layer.new_state()
    for part in ({0: (0, 60), 1: (0, 2)}, {2: (0, 66), 0: (60, 61)}, {0: (61, 130), 1: (2, 3), 2: (66, 70)}):
        found, expected = (layer.run(each, state, part) for each, state in zip((ops, reference), states, strict=True))
        assert np.abs(found - expected).max() < 3e-6


@pytest.mark.parametrize(
    "cuts", ["at borders", "anywhere"] if IS_INTERPRETED else ["one by one", "at borders", "sevens"]
)
def test_chunks_of_a_prompt_change_no_bit(ops, cuts):
    layer = Layer([200], *SIZES)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    assert np.array_equal(layer.run_cut(ops, layer.new_state(), cuts_of(cuts)), whole)


@pytest.mark.parametrize("dtype", ["float16"] if IS_INTERPRETED else ["float16", "bfloat16"])
def test_rows_of_16_bits_match_recurrence_on_every_path(device, dtype):
    def rounded(x):
        return torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()

    def gated_delta_rule(qkv, gates, *rest, **attributes):
        rows = (each.to(getattr(torch, dtype)) for each in (qkv, gates))
        out, state = invariant.gated_delta_rule(*rows, *rest, **attributes)
        return out.float(), state

    ops = Ops(device, SimpleNamespace(causal_conv=invariant.causal_conv, gated_delta_rule=gated_delta_rule))
    layer = Layer([200], *SIZES)
    layer.gates = rounded(layer.gates)
    where = np.array([0, 200], np.int32), np.zeros(1, np.int32), layer.tables
    y, _ = ops.causal_conv(layer.x, layer.taps, layer.new_state(), *where, head_dim=layer.head_dim)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    assert_close(whole, recurrence(layer, rounded(y)), BF16_STEP)
    assert np.array_equal(layer.run_cut(ops, layer.new_state(), cuts_of("at borders")), whole)


def test_prompt_of_equal_tokens_matches_recurrence(ops):
    """Equal keys with betas near 1 and slow decays give the largest numbers below the diagonal of I + A."""
    layer = Layer([70], *SIZES)
    layer.x[:], layer.gates[:, : layer.num_v_heads], layer.gates[:, layer.num_v_heads :] = layer.x[0], 8, -8
    where = np.array([0, 70], np.int32), np.zeros(1, np.int32), layer.tables
    y, _ = reference.causal_conv(layer.x, layer.taps, layer.new_state(), *where, head_dim=layer.head_dim)
    found = layer.run(ops, layer.new_state(), {0: (0, 70)})
    assert np.abs(found - recurrence(layer, y)).max() < 3e-6


def test_requests_of_a_step_are_independent(ops):
    layer = Layer([90, 1, 64], *SIZES)
    together = layer.run(ops, layer.new_state(), {b: (0, n) for b, n in enumerate(layer.counts)})
    alone = [layer.run(ops, layer.new_state(), {b: (0, n)}) for b, n in enumerate(layer.counts)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("begin", [52, 64] if IS_INTERPRETED else [40, 52, 56, 60, 63, 64, 120, 127])
@pytest.mark.parametrize("num_accepted", [0, 5, MAX_REJECTED])
def test_rejected_positions_leave_no_trace(ops, begin, num_accepted):
    """A step with drafts computes `begin` and MAX_REJECTED positions behind it, the next one goes on where the accepted
    ones end. The rejected tokens are other ones."""
    layer, length = Layer([150], *SIZES), 150
    whole = layer.run(ops, layer.new_state(), {0: (0, length)})
    state, end = layer.new_state(), begin + 1 + num_accepted
    layer.run_cut(ops, state, [begin])
    right = layer.x.copy()
    layer.x[end : begin + 1 + MAX_REJECTED] += 3
    drafted = layer.run(ops, state, {0: (begin, begin + 1 + MAX_REJECTED)})
    layer.x = right
    rest = [layer.run(ops, state, {0: part}) for part in ((end, end + 1), (end + 1, length))]
    assert np.array_equal(np.concatenate([drafted[: 1 + num_accepted], *rest]), whole[begin:])


@pytest.mark.parametrize("end", [70, 140] if IS_INTERPRETED else [70, 76, 77, 128, 130, 139, 140])
@pytest.mark.parametrize("num_taken_back", [1, MAX_REJECTED] if IS_INTERPRETED else [1, 5, MAX_REJECTED])
def test_the_last_positions_of_a_long_step_leave_no_trace(ops, end, num_taken_back):
    """A prompt is computed up to `end`; another one goes on with its state, whose last tokens are other ones."""
    layer = Layer([200], *SIZES)
    whole = layer.run(ops, layer.new_state(), {0: (0, 200)})
    right, state, start = layer.x.copy(), layer.new_state(), end - num_taken_back
    layer.x[start:end] += 3
    layer.run(ops, state, {0: (0, end)})
    layer.x = right
    rest = [layer.run(ops, state, {0: part}) for part in ((start, start + 3), (start + 3, 200))]
    assert np.array_equal(np.concatenate(rest), whole[start:])


def test_gates_match_reference(ops):
    rng = np.random.default_rng(0)
    x, gate, weight = 3 * floats(rng, 7, 240), 3 * floats(rng, 7, 240), floats(rng, 24)
    assert_close(ops.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate))
    expected = reference.gated_rms_norm(x, gate, weight, epsilon=1e-6)
    assert_close(ops.gated_rms_norm(x, gate, weight, epsilon=1e-6), expected)
