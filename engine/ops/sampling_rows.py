"""The sampler's parameters for the rows of one step and its results, as arrays. Shared by all devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass
class SamplingRows:
    """S rows. What row s has seen are the entries `seen_starts[s] .. seen_ends[s]` of ids and counts, which may be
    anywhere in arrays that hold more; its biases are the entries `bias_starts[s] .. bias_starts[s + 1]`."""

    temperature: np.ndarray  # f32 [S]; 0 takes the largest logit
    top_p: np.ndarray  # f32 [S]; 1 keeps all
    top_k: np.ndarray  # i32 [S]; 0 keeps all
    min_p: np.ndarray  # f32 [S]; 0 keeps all
    repetition_penalty: np.ndarray  # f32 [S]; 1 changes nothing
    frequency_penalty: np.ndarray  # f32 [S]
    presence_penalty: np.ndarray  # f32 [S]
    seed: np.ndarray  # u64 [S]
    counter: np.ndarray  # i64 [S]; index of the token in the answer
    num_logprobs: np.ndarray  # i32 [S]; -1 none, 0 the chosen token's alone
    seen_starts: np.ndarray  # i32 [S]
    seen_ends: np.ndarray  # i32 [S]
    seen_ids: np.ndarray  # i32; each token of prompt and answer once a row
    seen_counts: np.ndarray  # i32; occurrences in the answer, 0 = only in the prompt
    bias_starts: np.ndarray  # i32 [S + 1]
    bias_ids: np.ndarray  # i32
    bias: np.ndarray  # f32; added to the logit, -inf bans
    mask: np.ndarray | None = None  # u32 [S, ceil(V / 32)]; bit i of word w = token 32 w + i is allowed
    given: np.ndarray | None = None  # i32 [S]; these tokens instead of any that are chosen

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingRows:
        """Rows that take the largest logit: what every other row is an edit of."""

        def full(value, dtype):
            return np.full(num_rows, value, dtype)

        return cls(
            temperature=full(0, np.float32),
            top_p=full(1, np.float32),
            top_k=full(0, np.int32),
            min_p=full(0, np.float32),
            repetition_penalty=full(1, np.float32),
            frequency_penalty=full(0, np.float32),
            presence_penalty=full(0, np.float32),
            seed=full(0, np.uint64),
            counter=full(0, np.int64),
            num_logprobs=full(-1, np.int32),
            seen_starts=full(0, np.int32),
            seen_ends=full(0, np.int32),
            seen_ids=np.zeros(0, np.int32),
            seen_counts=np.zeros(0, np.int32),
            bias_starts=np.zeros(num_rows + 1, np.int32),
            bias_ids=np.zeros(0, np.int32),
            bias=np.zeros(0, np.float32),
        )

    @staticmethod
    def layout(name: str, num_rows: int, vocab: int) -> tuple[tuple[int | None, ...], np.dtype]:
        """Shape and dtype of a field; None is a length that another field gives."""
        special = {
            "seed": ((num_rows,), np.uint64),
            "counter": ((num_rows,), np.int64),
            "mask": ((num_rows, -(-vocab // 32)), np.uint32),
            "bias_starts": ((num_rows + 1,), np.int32),
            "bias": ((None,), np.float32),
        }
        if name in special:
            shape, dtype = special[name]
        elif name in ("seen_ids", "seen_counts", "bias_ids"):
            shape, dtype = (None,), np.int32
        else:
            is_whole = name in ("top_k", "num_logprobs", "seen_starts", "seen_ends", "given")
            shape, dtype = (num_rows,), np.int32 if is_whole else np.float32
        return shape, np.dtype(dtype)

    @property
    def max_logprobs(self) -> int:
        """Columns of the top lists: 0 where nobody asked."""
        return max(0, int(self.num_logprobs.max(initial=0)))

    def seen_of(self, row: int) -> Iterator[tuple[int, int]]:
        part = slice(self.seen_starts[row], self.seen_ends[row])
        return zip(self.seen_ids[part], self.seen_counts[part], strict=True)

    def bias_of(self, row: int) -> Iterator[tuple[int, np.float32]]:
        part = slice(self.bias_starts[row], self.bias_starts[row + 1])
        return zip(self.bias_ids[part], self.bias[part], strict=True)


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
