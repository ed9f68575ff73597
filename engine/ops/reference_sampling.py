"""The definition of sampling (docs/ops.md, "Sampling") in numpy."""

from __future__ import annotations

import numpy as np

from engine.core.types import NO_TOKEN
from engine.ops.sampling_rows import SampledRows, SamplingRows
from engine.sampling_parameters import PARAMETERS


def sample(logits: np.ndarray, rows: SamplingRows) -> SampledRows:
    results = SampledRows.empty(len(logits), rows.max_logprobs)
    for row in range(len(logits)):
        sample_row(logits[row], rows, row, results)
    return results


def sample_row(logits: np.ndarray, rows: SamplingRows, row: int, results: SampledRows) -> None:
    """Fill `results` for one row of logits [V]: the steps of "Sampling" in their order."""
    if rows.given is None:
        token = pick(adjusted_logits(logits, rows, row), rows, row)
    else:
        token = int(rows.given[row])
    results.token_ids[row] = token
    count = rows.num_logprobs[row]
    if count >= 0:
        wide = logits.astype(np.float64)
        logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        results.logprobs[row] = logprobs[token] if token != NO_TOKEN else -np.inf
        top = np.lexsort((np.arange(len(logits)), -wide))[:count]
        results.top_ids[row, : len(top)] = top
        results.top_logprobs[row, : len(top)] = logprobs[top]


def adjusted_logits(logits: np.ndarray, rows: SamplingRows, row: int) -> np.ndarray:
    """Mask, bias and the three penalties, in float32 as the kernels do it."""
    adjusted = logits.astype(np.float32)
    if rows.mask is not None:
        allowed = np.unpackbits(rows.mask[row].view(np.uint8), bitorder="little")[: len(adjusted)]
        adjusted[allowed == 0] = -np.inf
    for token, bias in rows.bias_of(row):
        adjusted[token] += bias
    repetition, frequency = rows.repetition_penalty[row], rows.frequency_penalty[row]
    for token, count in rows.seen_of(row):
        value = adjusted[token]
        value = value / repetition if value > 0 else value * repetition
        if count > 0:
            value = value - frequency * np.float32(count) - rows.presence_penalty[row]
        adjusted[token] = value
    return adjusted


def pick(adjusted: np.ndarray, rows: SamplingRows, row: int) -> int:
    largest = adjusted.max()
    if largest == -np.inf:
        return NO_TOKEN
    if rows.temperature[row] == 0:
        return int(adjusted.argmax())
    for parameter in PARAMETERS:
        value = getattr(rows, parameter.name)[row]
        if parameter.keeps and value != parameter.neutral:
            adjusted = np.where(parameter.keeps(adjusted, value), adjusted, -np.inf)
    wide, largest = adjusted.astype(np.float64), adjusted.max()
    weights = np.exp((wide - largest) / rows.temperature[row])  # the largest is 1
    order = np.lexsort((np.arange(len(weights)), -adjusted))  # likeliest first, lowest id on a tie
    order = order[(weights[order] >= rows.min_p[row]) & (adjusted[order] > -np.inf)]
    draw, xtc = philox_uniforms(int(rows.seed[row]), int(rows.counter[row]))
    if xtc < rows.xtc_probability[row]:
        shares = np.exp(wide[order] - largest)
        num_top = np.count_nonzero(shares / shares.sum() >= rows.xtc_threshold[row])
        order = order[max(0, num_top - 1) :]
        weights = np.exp(np.minimum(wide - wide[order[0]], 0) / rows.temperature[row])
    order = order[weights[order] > 0]
    if rows.top_k[row] > 0:
        order = order[: rows.top_k[row]]
    if rows.top_p[row] < 1:
        running = np.cumsum(weights[order])
        order = order[: np.searchsorted(running, rows.top_p[row] * running[-1]) + 1]
    kept = np.sort(order)
    running = np.cumsum(weights[kept])
    return int(kept[min(np.searchsorted(running, draw * running[-1], side="right"), len(kept) - 1)])


def philox_uniforms(seed: int, counter: int) -> tuple[float, float]:
    """Return the numbers in [0, 1) that draw a token and decide about XTC.

    Philox4x32-10: key = seed, counter = (counter, 0); 53 bits of its first two words, and of its last two.
    """
    words = philox4x32((counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    first, second, third, fourth = words
    return ((first << 32 | second) >> 11) * 2.0**-53, ((third << 32 | fourth) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
