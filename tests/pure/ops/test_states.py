"""The ops that keep a state for each request: against their definitions, and the same bits on every path."""

from dataclasses import dataclass

import numpy as np
import pytest

from engine.core.cache_groups import MAX_REJECTED
from engine.ops import cpu, reference
from engine.ops.catalogue_states import conv_lines, delta_lines
from engine.ops.cpu.calls import ArgumentError

pytestmark = pytest.mark.parametrize("isa", cpu.available_isas())
SHAPES = [(1, 1, 16), (2, 4, 32), (1, 3, 128)]  # key heads, value heads, elements of a head


@dataclass
class Layer:
    """A convolution and a gated delta rule with their inputs for requests of the lengths `counts`."""

    counts: list[int]
    num_k_heads: int = 2
    num_v_heads: int = 4
    head_dim: int = 32
    dtype: type = np.float32

    def __post_init__(self):
        rng, num_tokens = np.random.default_rng(0), sum(self.counts)
        self.width = (2 * self.num_k_heads + self.num_v_heads) * self.head_dim
        self.x = rng.standard_normal((num_tokens, self.width), np.float32)
        self.taps = rng.standard_normal((self.width, 1, 4), np.float32)
        self.gates = rng.standard_normal((num_tokens, 2 * self.num_v_heads), np.float32)
        self.a_log, self.dt_bias = rng.standard_normal((2, self.num_v_heads), np.float32) - 1
        self.starts = np.cumsum([0, *self.counts])
        self.conv_lines = conv_lines(self.width, self.head_dim)
        num_lines = self.conv_lines + delta_lines(self.num_k_heads, self.num_v_heads, self.head_dim)
        row = 2 * 1 * 100 * self.head_dim  # numbers; a state needs several rows, and a row is no multiple of a line
        self.shape = (2, 1, 100, self.head_dim + 2 if self.dtype == np.int8 else self.head_dim)
        row_lines = row * np.dtype(self.dtype).itemsize // (4 * self.head_dim)
        num_parts = -(-num_lines // row_lines)
        self.tables = rng.permutation(num_parts * len(self.counts)).astype(np.int32).reshape(-1, num_parts)

    def new_state(self):
        """Return a state of NaN, as an earlier request may have left it."""
        state = np.empty((self.tables.size, *self.shape), self.dtype)
        state.view(np.uint8)[:] = 255
        return state

    def run(self, ops, state, part):
        """Run the positions first .. end of each request, {request: (first, end)}."""
        rows = np.concatenate([np.arange(*part[b]) + self.starts[b] for b in part])
        starts = np.cumsum([0, *(end - first for first, end in part.values())], dtype=np.int32)
        where = state, starts, np.array([first for first, _ in part.values()], np.int32), self.tables[list(part)]
        y, same = ops.causal_conv(self.x[rows], self.taps, *where, head_dim=self.head_dim)
        assert same is state
        heads = {"num_k_heads": self.num_k_heads, "num_v_heads": self.num_v_heads, "head_dim": self.head_dim}
        given = y, self.gates[rows], self.a_log, self.dt_bias
        return ops.gated_delta_rule(*given, *where, **heads, first_line=self.conv_lines)[0]

    def run_cut(self, ops, state, cuts):
        """Run one request up to each position of `cuts` in turn."""
        ends = zip([0, *cuts], cuts, strict=False)
        return np.concatenate([self.run(ops, state, {0: each}) for each in ends])


def recurrence(layer, y):
    """Compute the gated delta rule of the only request as it is written in papers, in float64."""
    heads = y.astype(np.float64).reshape(len(y), -1, layer.head_dim)
    group, keys = layer.num_v_heads // layer.num_k_heads, layer.num_k_heads
    q, k = (np.repeat(heads[:, n : n + keys], group, axis=1) for n in (0, keys))
    q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    b, a = np.split(layer.gates.astype(np.float64), 2, axis=1)
    g, beta = -np.exp(layer.a_log) * np.log1p(np.exp(a + layer.dt_bias)), 1 / (1 + np.exp(-b))
    state, out = np.zeros((layer.num_v_heads, layer.head_dim, layer.head_dim)), []
    for t in range(len(y)):
        state *= np.exp(g[t])[:, None, None]
        u = beta[t][:, None] * (heads[t, 2 * keys :] - np.einsum("hd,hde->he", k[t], state))
        state += k[t][:, :, None] * u[:, None]
        out.append(np.einsum("hd,hde->he", q[t], state) / np.sqrt(layer.head_dim))
    return np.array(out).reshape(len(y), -1)


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


def cuts_of(kind):
    rng = np.random.default_rng(1)
    return {
        "one by one": range(1, 201),
        "at borders": [63, 64, 65, 128, 129, 192, 200],
        "sevens": [*range(7, 200, 7), 200],
        "anywhere": sorted({*rng.integers(1, 200, 8).tolist(), 200}),
    }[kind]


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
