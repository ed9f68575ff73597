"""The definitions, in numpy, of the ops of `engine.ops.catalogue_states`: layers that keep a state for each request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.core.cache_groups import MAX_REJECTED
from engine.ops.catalogue_states import CHUNK, HISTORY, OPEN, decay_lines


def causal_conv(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    x: np.ndarray,
    weight: np.ndarray,
    state: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    state_tables: np.ndarray,
    *,
    head_dim: int,
) -> tuple[np.ndarray, np.ndarray]:
    taps, y = weight[:, 0].T.astype(np.float64), np.empty_like(x)
    num_lines = x.shape[1] // head_dim * HISTORY
    for rows, first, lines in _requests(state, query_starts, context_lens, state_tables, head_dim):
        history = lines[:num_lines].reshape(-1, HISTORY, head_dim)
        before = np.arange(first - len(taps) + 1, first)
        kept = np.where(before[:, None] >= 0, history[:, before % HISTORY].swapaxes(0, 1).reshape(len(before), -1), 0)
        inputs = np.concatenate([kept, x[rows]]).astype(np.float64)
        for row in range(rows.start, rows.stop):
            total = (taps * inputs[row - rows.start :][: len(taps)]).sum(axis=0)
            y[row] = total / (1 + np.exp(-total))
            history[:, (first + row - rows.start) % HISTORY] = x[row].reshape(-1, head_dim)
    return y, state


def gated_delta_rule(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: np.ndarray,
    gates: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    state_tables: np.ndarray,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_dim: int,
    first_line: int,
) -> tuple[np.ndarray, np.ndarray]:
    heads = qkv.reshape(len(qkv), -1, head_dim)
    query, key = (_normalized(heads[:, start:][:, :num_k_heads]) for start in (0, num_k_heads))
    value, group = heads[:, 2 * num_k_heads :], num_v_heads // num_k_heads
    wide = gates.astype(np.float64)
    beta = 1 / (1 + np.exp(-wide[:, :num_v_heads]))
    decay = -np.exp(a_log.astype(np.float64)) * np.logaddexp(0, wide[:, num_v_heads:] + dt_bias)
    out = np.empty_like(value)
    for rows, first, lines in _requests(state, query_starts, context_lens, state_tables, head_dim):
        at = first_line
        for head in range(num_k_heads):
            size = OPEN + group * (head_dim + OPEN + decay_lines(head_dim))
            kept = _HeadState(lines[at : at + size], group, first)
            at += size
            own = slice(head * group, (head + 1) * group)
            for row in range(rows.start, rows.stop):
                position = first + row - rows.start
                inputs = query[row, head] * head_dim**-0.5, key[row, head], value[row, own]
                out[row, own] = kept.add(inputs, decay[row, own], beta[row, own])
                if (position + 1) % CHUNK == 0:
                    kept.close(is_final=position + 1 <= max(first + 1, first + len(rows) - MAX_REJECTED))
            kept.store()
    return out.reshape(len(qkv), -1), state


class _HeadState:
    """The lines of one key head and of the value heads that read it. `ahead` is the state at the beginning of the chunk
    that is computed, where the chunk before it is still kept open."""

    def __init__(self, lines: np.ndarray, group: int, first: int):
        self._keys, own = lines[:OPEN], lines[OPEN:].reshape(group, -1, lines.shape[1])
        width = lines.shape[1]
        self._states, self._updates = own[:, :width], own[:, width : width + OPEN]
        self._tail = own[:, width + OPEN :]
        if first == 0:
            lines[:] = 0
        tail = self._tail.reshape(group, -1).copy()
        self._decays, self._num_closed = tail[:, :OPEN], int(tail[0, OPEN])
        self._start, self._count, self._ahead = 0, first - self._num_closed * CHUNK, self._states
        if self._count >= CHUNK:
            self.close(is_final=True)

    def add(self, inputs: tuple[np.ndarray, np.ndarray, np.ndarray], g: np.ndarray, beta: np.ndarray) -> np.ndarray:
        """Add a position with query [D], key [D] and values [group, D]; return its outputs [group, D]."""
        query, key, value = inputs
        start, at = self._start, self._start + self._count
        before = self._decays[:, at - 1] if self._count else np.zeros_like(g)
        self._decays[:, at], self._keys[at] = before + g, key
        total = self._decays[:, at].astype(np.float64)
        factors = np.exp(total[:, None] - self._decays[:, start : at + 1])
        keys, states = self._keys[start : at + 1].astype(np.float64), self._ahead.astype(np.float64)
        updates = self._updates[:, start : at + 1].astype(np.float64)
        read = np.exp(total)[:, None] * np.einsum("d,gde->ge", key, states)
        read += np.einsum("gi,gie->ge", (factors * (keys @ key))[:, :-1], updates[:, :-1])
        updates[:, -1] = self._updates[:, at] = beta[:, None] * (value - read)
        self._count += 1
        out = np.exp(total)[:, None] * np.einsum("d,gde->ge", query, states)
        return out + np.einsum("gi,gie->ge", factors * (keys @ query), updates)

    def close(self, *, is_final: bool) -> None:
        """Let the next chunk begin. If its positions are final, the state at its beginning replaces the stored one."""
        factors = np.exp(self._decays[:, CHUNK - 1 : CHUNK].astype(np.float64) - self._decays[:, :CHUNK])
        states = np.exp(self._decays[:, CHUNK - 1].astype(np.float64))[:, None, None] * self._states
        states += np.einsum("gi,id,gie->gde", factors, self._keys[:CHUNK], self._updates[:, :CHUNK])
        if not is_final:
            self._ahead, self._start, self._count = states, CHUNK, 0
            return
        self._states[:] = states
        for kept in (self._keys[None], self._updates, self._decays):
            kept[:, : OPEN - CHUNK] = kept[:, CHUNK:].copy()
        self._num_closed, self._count = self._num_closed + 1, self._count - CHUNK

    def store(self) -> None:
        """Write the decays and the number of closed chunks."""
        tail = self._tail.reshape(len(self._tail), -1)
        tail[:, :OPEN], tail[0, OPEN] = self._decays, self._num_closed
        self._tail[:] = tail.reshape(self._tail.shape)


def gated_rms_norm(x: np.ndarray, gate: np.ndarray, weight: np.ndarray, *, epsilon: float) -> np.ndarray:
    heads, wide = x.reshape(len(x), -1, len(weight)).astype(np.float64), gate.astype(np.float64)
    normed = heads / np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + epsilon) * weight
    return (normed.reshape(x.shape) * wide / (1 + np.exp(-wide))).astype(np.float32)


def sigmoid_gate(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return (x / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)


def _normalized(heads: np.ndarray) -> np.ndarray:
    wide = heads.astype(np.float64)
    return wide / np.sqrt(np.square(wide).sum(axis=-1, keepdims=True) + 1e-6)


def _requests(
    state: np.ndarray, query_starts: np.ndarray, context_lens: np.ndarray, tables: np.ndarray, head_dim: int
) -> Iterator[tuple[range, int, np.ndarray]]:
    """Yield, for each request, its rows, its first position and a copy of its lines, which is then written back."""
    cache = state.reshape(len(state), -1).view(np.float32)
    per_row = cache.shape[1] // head_dim
    for b, table in enumerate(tables):
        rows = range(query_starts[b], query_starts[b + 1])
        if len(rows):
            lines = cache[table, : per_row * head_dim].reshape(-1, head_dim)
            yield rows, int(context_lens[b]), lines
            cache[table, : per_row * head_dim] = lines.reshape(len(table), -1)
