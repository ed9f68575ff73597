"""The sampler's parameters for the rows of one step and its results, as arrays. Shared by all devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.ops.sampling_columns import SamplingRow
from engine.sampling_parameters import PARAMETERS

ROW = np.dtype(SamplingRow)


class _Column:
    """A field of `SamplingRows.values` as an array of its own: a view of them, whose assignment writes into them."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, rows: SamplingRows, owner: type) -> np.ndarray:
        return rows.values[self._name]

    def __set__(self, rows: SamplingRows, column: np.ndarray) -> None:
        rows.values[self._name] = column


def _empty(dtype: type) -> np.ndarray:
    return field(default_factory=lambda: np.zeros(0, dtype))


@dataclass
class SamplingRows:
    """S rows, with a property for each column of `engine.ops.sampling_columns`.

    What row s has seen are the entries `seen_starts[s] .. seen_ends[s]` of ids and counts, which may be anywhere in
    arrays that hold more; its biases are the entries `bias_starts[s] .. bias_starts[s + 1]`.
    """

    values: np.ndarray  # ROW [S]
    seen_ids: np.ndarray = _empty(np.int32)  # each token of prompt and answer once a row
    seen_counts: np.ndarray = _empty(np.int32)  # occurrences in the answer, 0 = only in the prompt
    bias_starts: np.ndarray | None = None  # i32 [S + 1]; None: no row has any
    bias_ids: np.ndarray = _empty(np.int32)
    bias: np.ndarray = _empty(np.float32)  # added to the logit, -inf bans
    mask: np.ndarray | None = None  # u32 [S, ceil(V / 32)]; bit i of word w = token 32 w + i is allowed
    given: np.ndarray | None = None  # i32 [S]; these tokens instead of any that are chosen

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray: ...  # the columns
        def __setattr__(self, name: str, value: np.ndarray | None) -> None: ...

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingRows:
        """Return rows of greedy sampling, from which other rows are derived by changing fields."""
        rows = cls(np.zeros(num_rows, ROW))
        for parameter in PARAMETERS:
            rows.values[parameter.name] = parameter.neutral
        rows.temperature[:] = 0
        rows.num_logprobs[:] = -1
        return rows

    @property
    def max_logprobs(self) -> int:
        """Return the number of columns of the top lists, or 0 if no row asks for them."""
        return max(0, int(self.num_logprobs.max(initial=0)))

    def seen_of(self, row: int) -> Iterator[tuple[int, int]]:
        part = slice(self.seen_starts[row], self.seen_ends[row])
        return zip(self.seen_ids[part], self.seen_counts[part], strict=True)

    def bias_of(self, row: int) -> Iterator[tuple[int, np.float32]]:
        if self.bias_starts is None:
            return iter(())
        part = slice(self.bias_starts[row], self.bias_starts[row + 1])
        return zip(self.bias_ids[part], self.bias[part], strict=True)


for _name in ROW.names or ():
    setattr(SamplingRows, _name, _Column(_name))


@dataclass
class SampledRows:
    token_ids: np.ndarray  # i32 [S]; -1 where the mask and the bans left nothing
    logprobs: np.ndarray  # f32 [S], of the chosen token; NaN where the row asked for none
    top_ids: np.ndarray  # i32 [S, K]; -1 beyond the row's own number
    top_logprobs: np.ndarray  # f32 [S, K]; -inf there

    @classmethod
    def empty(cls, num_rows: int, max_logprobs: int) -> SampledRows:
        return cls(
            token_ids=np.full(num_rows, -1, np.int32),
            logprobs=np.full(num_rows, np.nan, np.float32),
            top_ids=np.full((num_rows, max_logprobs), -1, np.int32),
            top_logprobs=np.full((num_rows, max_logprobs), -np.inf, np.float32),
        )
