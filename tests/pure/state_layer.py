"""Builds the inputs of the ops that keep a state for each request."""

from dataclasses import dataclass

import numpy as np

from engine.ops.catalogue_states import conv_lines, delta_lines

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

    def step(self, state, part):
        """Return the rows of the positions first .. end of each request, {request: (first, end)}, and their places."""
        rows = np.concatenate([np.arange(*part[b]) + self.starts[b] for b in part])
        starts = np.cumsum([0, *(end - first for first, end in part.values())], dtype=np.int32)
        return rows, (state, starts, np.array([first for first, _ in part.values()], np.int32), self.tables[list(part)])

    @property
    def heads(self):
        sizes = {"num_k_heads": self.num_k_heads, "num_v_heads": self.num_v_heads, "head_dim": self.head_dim}
        return sizes | {"first_line": self.conv_lines}

    def run(self, ops, state, part):
        """Run the positions first .. end of each request, {request: (first, end)}."""
        rows, where = self.step(state, part)
        y, same = ops.causal_conv(self.x[rows], self.taps, *where, head_dim=self.head_dim)
        assert same is state
        given = y, self.gates[rows], self.a_log, self.dt_bias
        return ops.gated_delta_rule(*given, *where, **self.heads)[0]

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


def cuts_of(kind):
    rng = np.random.default_rng(1)
    return {
        "one by one": range(1, 201),
        "at borders": [63, 64, 65, 128, 129, 192, 200],
        "sevens": [*range(7, 200, 7), 200],
        "anywhere": sorted({*rng.integers(1, 200, 8).tolist(), 200}),
    }[kind]
