"""Sampling of a token for each row of logits, as "Sampling" in docs/ops.md defines it, on the device and without
sorting.

Each PART of the vocabulary of a row has a program. Top-k and top-p keep everything above a threshold, and the first few
of the tokens that equal it. The threshold is found in rounds: each counts and weighs what lies above a few pivots in
one pass over the row, until so few tokens are left between two pivots that one program can search them (`top_k_top_p`).
Then a part is drawn by the weights of the parts, and a token within it (`drawing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from engine.ops.cuda.sampler.drawing import draw
from engine.ops.cuda.sampler.logits_processors import changes_logits, process_logits
from engine.ops.cuda.sampler.logprobs import compute_logprobs
from engine.ops.cuda.sampler.row import find_largest
from engine.ops.cuda.sampler.top_k_top_p import apply_threshold
from engine.ops.sampling_rows import SamplingRows

__all__ = ["ALL_MODES", "GREEDY", "SamplingMode", "report", "sample"]


class SamplingMode(NamedTuple):
    """Steps of sampling that some row of a batch needs. A captured graph exists for each mode."""

    draws: bool  # otherwise all rows are greedy
    top_k: bool
    top_p: bool

    @classmethod
    def of(cls, rows: SamplingRows) -> SamplingMode:
        is_drawn = rows.temperature > 0
        of = is_drawn, is_drawn & (rows.top_k > 0), is_drawn & (rows.top_p < 1)
        return cls(*[bool(each.any()) for each in of])


GREEDY = SamplingMode(False, False, False)
ALL_MODES = (GREEDY, *(SamplingMode(True, top_k, top_p) for top_k in (False, True) for top_p in (False, True)))


def sample(logits: Tensor, sent: Mapping[str, Tensor], mode: SamplingMode, num_logprobs: int = -1) -> dict[str, Tensor]:
    """Return the fields of SampledRows by name, without log-probabilities if no row wants any.

    `logits`, f32 [S, V] with S at least 1, are overwritten. `sent` has the fields of the rows on the same device; those
    that change logits are present only if they have an effect. `num_logprobs` is the largest number that a row wants.
    """
    own = logits.clone() if num_logprobs >= 0 and changes_logits(sent) else logits
    process_logits(logits, sent)
    found = find_largest(logits, sent["temperature"], sent["min_p"])
    if mode.top_k:
        apply_threshold(found, sent["top_k"], by_count=True)
    if mode.top_p:
        apply_threshold(found, sent["top_p"], by_count=False)
    token_ids = draw(found, sent, some_drawn=mode.draws)
    if num_logprobs < 0:
        return {"token_ids": token_ids}
    return {"token_ids": token_ids, **compute_logprobs(own, token_ids, sent["num_logprobs"], num_logprobs)}
