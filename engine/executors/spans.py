"""Prompt spans of an executor's slots: the embeddings of a step and the 3-D positions of M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core.spans import PromptSpan, parts_between
from engine.core.types import Arrival, Batch
from engine.graph import Graph
from engine.models.layers import EMBEDDING_ROWS, POSITIONS, SPAN_EMBEDDINGS

NO_ROW = -1


class SlotSpans:
    """Prompt spans of each slot, kept until another request takes the slot.

    `width` is the width H of an embedding. With `has_3d_positions` a token has three positions, [3, T] instead of [T].
    """

    def __init__(self, num_slots: int, width: int, has_3d_positions: bool):
        self._width, self._has_3d_positions = width, has_3d_positions
        self._spans: dict[int, Sequence[PromptSpan]] = {}  # only of slots that have some
        self._deltas = np.zeros(num_slots, np.int32)  # by slot: offset of the positions after its last span

    @classmethod
    def of(cls, graph: Graph, num_slots: int) -> SlotSpans | None:
        """Make the spans for the inputs of `graph`. Return None for a graph that takes no spans."""
        if SPAN_EMBEDDINGS not in graph.inputs:
            return None
        return cls(num_slots, graph.inputs[SPAN_EMBEDDINGS].shape[1], len(graph.inputs[POSITIONS].shape) > 1)

    def begin(self, arrival: Arrival) -> None:
        """Store the spans of a new request in place of the previous request's."""
        self._spans.pop(arrival.slot, None)
        self._deltas[arrival.slot] = sum(span.position_delta for span in arrival.spans)
        if arrival.spans:
            self._spans[arrival.slot] = arrival.spans

    def inputs(self, batch: Batch, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs that depend on spans: positions, i32 [T] or [3, T], rows of the embeddings, i32 [T], and
        embeddings, f32 [E, H]. `positions` are the tokens' positions in their requests, i32 [T]."""
        rows, values = np.full(len(positions), NO_ROW, np.int32), [np.zeros((0, self._width), np.float32)]
        if self._has_3d_positions:
            deltas = self._deltas[[row.slot for row in batch.rows]]
            positions = np.tile(positions + np.repeat(deltas, [len(row.token_ids) for row in batch.rows]), (3, 1))
        first = num_values = 0
        for row in batch.rows:
            start, end = row.start, row.start + len(row.token_ids)
            spans = self._spans.get(row.slot, ())
            if spans and start < spans[-1].end:
                for span, place, offset, length in parts_between(spans, start, end):
                    embeddings = np.frombuffer(span.embeddings, np.float32).reshape(span.length, self._width)
                    values.append(embeddings[offset : offset + length])
                    rows[first + place : first + place + length] = num_values + np.arange(length)
                    num_values += length
                if self._has_3d_positions:
                    positions[:, first : first + end - start] = positions_between(spans, start, end)
            first += end - start
        return {POSITIONS: positions, EMBEDDING_ROWS: rows, SPAN_EMBEDDINGS: np.concatenate(values)}

    def text_inputs(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Return the inputs of a step of `num_tokens` text tokens. The embeddings, which are empty, are not
        included."""
        shape = (3, num_tokens) if self._has_3d_positions else (num_tokens,)
        return {POSITIONS: np.zeros(shape, np.int32), EMBEDDING_ROWS: np.full(num_tokens, NO_ROW, np.int32)}


def positions_between(spans: Sequence[PromptSpan], start: int, end: int) -> np.ndarray:
    """Return the positions in time, height and width, i32 [3, end - start], of the tokens in [start, end).

    The three are equal for text. A span with a grid begins at the position that follows the text before it, and the
    text after it continues behind the span's largest position (Wang et al., 2024).
    """
    positions = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    delta = 0
    for span in spans:
        for _, place, offset, length in parts_between([span], start, end) if span.grid else ():
            of_span = np.indices(span.grid, np.int32).reshape(3, -1) + span.start + delta
            positions[:, place : place + length] = of_span[:, offset : offset + length]
        delta += span.position_delta
        positions[:, max(span.end - start, 0) :] += span.position_delta
    return positions
