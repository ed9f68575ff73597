"""Logits processors: masks, biases, bans, penalties, top-n-sigma, typical-p and XTC change logits before sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import cdiv, kernel
from engine.ops.cuda.sampler.drawing import uniforms
from engine.sampling_parameters import SamplingParameters

BLOCK = 8192  # logits a program
ENTRIES = 256  # of biases and of what was seen, at a time
FIELDS = ("mask", "bias_ids", "seen_ids", "top_n_sigma", "typical_p", "xtc_probability")  # one of each processor


def changes_logits(rows: Mapping[str, Tensor]) -> bool:
    """Return whether `process_logits` changes any logits of these rows."""
    return not rows.keys().isdisjoint(FIELDS)


def process_logits(logits: Tensor, rows: Mapping[str, Tensor]) -> None:
    """Apply all logits processors whose fields are in `rows` to logits f32 [S, V] in place."""
    num_rows, vocab = logits.shape
    if "mask" in rows:
        _mask[(num_rows, cdiv(vocab, BLOCK))](logits, rows["mask"], vocab, BLOCK)
    if "bias_ids" in rows:
        _bias[(num_rows,)](logits, rows["bias_starts"], rows["bias_ids"], rows["bias"], vocab, ENTRIES)
    if "seen_ids" in rows:
        seen = [rows[name] for name in ("seen_starts", "seen_ends", "seen_ids", "seen_counts")]
        penalties = [rows[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")]
        _penalize[(num_rows,)](logits, *seen, *penalties, vocab, ENTRIES)
    if "top_n_sigma" in rows:
        _top_n_sigma[(num_rows,)](logits, rows["top_n_sigma"], vocab, BLOCK, num_warps=8)
    if "typical_p" in rows:
        _typical_p[(num_rows,)](logits, rows["typical_p"], rows["temperature"], vocab, BLOCK, num_warps=8)
    if "xtc_probability" in rows:
        _exclude_top_choices(logits, rows)


def _exclude_top_choices(logits: Tensor, rows: Mapping[str, Tensor]) -> None:
    thresholds = rows.get("xtc_threshold")  # is not sent if all rows have the default
    if thresholds is None:
        thresholds = torch.full_like(rows["xtc_probability"], SamplingParameters.xtc_threshold)
    read = [rows[name] for name in ("temperature", "min_p", "seed", "counter")]
    _xtc[(len(logits),)](logits, rows["xtc_probability"], thresholds, *read, logits.shape[1], BLOCK, num_warps=8)


@kernel
def _mask(logits, mask, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(mask + row * ((vocab + 31) // 32) + ids // 32, mask=ids < vocab, other=-1)
    is_banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + row * vocab + ids, -float("inf"), mask=(ids < vocab) & is_banned)


@kernel
def _bias(logits, starts, ids, biases, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token_ids = tl.load(ids + at, mask=at < end, other=0)
        # Atomic: the same token may have a bias and a ban.
        tl.atomic_add(logits + row * vocab + token_ids, tl.load(biases + at, mask=at < end, other=0), mask=at < end)


@kernel
def _penalize(logits, starts, ends, ids, seen_counts, repetitions, frequencies, presences, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    repetition, frequency = tl.load(repetitions + row), tl.load(frequencies + row)
    presence = tl.load(presences + row)
    end = tl.load(ends + row)
    for start in range(tl.load(starts + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token_ids = tl.load(ids + at, mask=at < end, other=-1)
        is_in = (token_ids >= 0) & (token_ids < vocab)  # NO_TOKEN may be among them
        count = tl.load(seen_counts + at, mask=is_in, other=0)
        x = tl.load(logits + row * vocab + token_ids, mask=is_in, other=0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(logits + row * vocab + token_ids, x, mask=is_in)


@kernel
def _top_n_sigma(logits, wanted, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    num_sigmas = tl.load(wanted + row)
    if num_sigmas > 0:
        largest = tl.full([], -float("inf"), tl.float32)
        count, total, squares = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            largest = tl.maximum(largest, tl.max(tl.where(is_allowed, values, -float("inf")), 0))
            count += tl.sum(is_allowed.to(tl.int32), 0).to(tl.float64)
            total += tl.sum(tl.where(is_allowed, values, 0.0).to(tl.float64), 0)
        mean = total / count
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            distance = tl.where(is_allowed, values.to(tl.float64) - mean, 0.0)
            squares += tl.sum(distance * distance, 0)
        floor = (largest.to(tl.float64) - num_sigmas.to(tl.float64) * tl.sqrt(squares / count)).to(tl.float32)
        for start in range(0, vocab, BLOCK):
            ids, values, _ = _part(logits + row * vocab, start, vocab, BLOCK)
            tl.store(logits + row * vocab + ids, -float("inf"), mask=(ids < vocab) & (values < floor))


@kernel
def _typical_p(logits, shares, temperatures, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(shares + row)
    if (share < 1) & (tl.load(temperatures + row) > 0):
        largest = tl.full([], -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            largest = tl.maximum(largest, tl.max(tl.where(is_allowed, values, -float("inf")), 0))
        total, moment = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            shifted = tl.where(is_allowed, values, largest).to(tl.float64) - largest.to(tl.float64)
            weights = tl.where(is_allowed, tl.exp(shifted), 0.0)
            total += tl.sum(weights, 0)
            moment += tl.sum(weights * shifted, 0)
        mean = largest.to(tl.float64) + moment / total
        # Bisect the smallest distance within which the share is; the bits of positive floats are ordered as they are.
        low, high = tl.full([], 0, tl.int32), tl.full([], 0x7F800000, tl.int32)
        while low < high:
            middle = low + (high - low) // 2
            within = tl.zeros([], tl.float64)
            for start in range(0, vocab, BLOCK):
                _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
                distances = tl.abs(tl.where(is_allowed, values, 0.0).to(tl.float64) - mean).to(tl.float32)
                shifted = tl.where(is_allowed, values, largest).to(tl.float64) - largest.to(tl.float64)
                is_near = is_allowed & (distances <= middle.to(tl.float32, bitcast=True))
                within += tl.sum(tl.where(is_near, tl.exp(shifted), 0.0), 0)
            is_enough = (within > 0) & (within >= share.to(tl.float64) * total)
            low, high = tl.where(is_enough, low, middle + 1), tl.where(is_enough, middle, high)
        for start in range(0, vocab, BLOCK):
            ids, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            distances = tl.abs(tl.where(is_allowed, values, 0.0).to(tl.float64) - mean).to(tl.float32)
            is_far = distances > high.to(tl.float32, bitcast=True)
            tl.store(logits + row * vocab + ids, -float("inf"), mask=is_allowed & is_far)


@kernel
def _xtc(
    logits, probabilities, thresholds, temperatures, min_ps, seeds, counters, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """Exclude the tokens above the threshold except the last one: the least likely, on a tie with the highest id."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    uniform = uniforms(tl.load(seeds + row), tl.load(counters + row))[1]
    if (temperature > 0) & (uniform < tl.load(probabilities + row)):
        largest, infinity = tl.full([], -float("inf"), tl.float32), tl.full([], float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            largest = tl.maximum(largest, tl.max(tl.where(is_allowed, values, -infinity), 0))
        floor = largest + tl.log(tl.load(min_ps + row)) * temperature  # of min_p, which comes before
        total = tl.zeros([], tl.float64)
        for start in range(0, vocab, BLOCK):
            _, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            weights = tl.where(is_allowed & (values >= floor), tl.exp(values - largest), 0.0)
            total += tl.sum(weights.to(tl.float64), 0)
        bound = tl.maximum(floor, largest + tl.log(tl.load(thresholds + row) * total).to(tl.float32))
        least, last = infinity, tl.full([], -1, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            tops = tl.where(is_allowed & (values >= bound), values, infinity)
            part_least = tl.min(tops, 0)
            part_last = tl.max(tl.where(tops == part_least, ids, -1), 0)
            last = tl.where((part_least <= least) & (part_least < infinity), part_last, last)
            least = tl.minimum(least, part_least)
        for start in range(0, vocab, BLOCK):
            ids, values, is_allowed = _part(logits + row * vocab, start, vocab, BLOCK)
            is_excluded = ((values >= bound) & (ids != last)) | (values < floor)  # min_p refers to the largest of all
            tl.store(logits + row * vocab + ids, -infinity, mask=is_allowed & is_excluded)


@triton.jit
def _part(x, start, vocab, BLOCK: tl.constexpr):
    """Return ids, logits, and which of them are allowed, that is, greater than minus infinity."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(x + ids, mask=ids < vocab, other=-float("inf"))
    return ids, values, values > -float("inf")
