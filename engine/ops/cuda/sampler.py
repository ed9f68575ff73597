"""Chooses a token for each row of logits, as "Sampling" in docs/ops.md defines it, on the device and without sorting.

What min_p, top_k and top_p keep of a row is everything above a threshold, and of what equals it the first few ids. The
threshold is found by bisection: each step counts and weighs what lies above in one pass over the row, until so few are
left that they fit into registers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, LOGITS_PER_WARP = 8192, 512  # logits of a row at a time
SMALL = 4096  # that are left between the bounds of the bisection
ENTRIES = 256  # of biases and of what was seen
CHANGES = ("mask", "bias_ids", "seen_ids")  # fields that change logits, with those that go with them


def sample(logits: Tensor, rows: Mapping[str, Tensor], max_logprobs: int) -> dict[str, Tensor]:
    """The fields of SampledRows by name; without log-probabilities where nobody wants any: `max_logprobs` is the
    largest of `num_logprobs`, or -1.

    `logits`: f32 [S, V], S at least 1, which are changed. `rows`: the fields of SamplingRows on the same device; what
    changes logits only where it does something.
    """
    num_rows, vocab = logits.shape
    own = logits.clone() if max_logprobs >= 0 and not rows.keys().isdisjoint(CHANGES) else logits
    _change(logits, rows)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    warps = max(4, block // LOGITS_PER_WARP)
    token_ids = logits.new_empty(num_rows, dtype=torch.int32)
    draws = [rows[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "counter")]
    scratch = logits.new_empty(num_rows, SMALL)
    _choose[(num_rows,)](logits, *draws, scratch, token_ids, vocab, block, SMALL, num_warps=warps)
    if max_logprobs < 0:
        return {"token_ids": token_ids}
    return {"token_ids": token_ids, **report(own, token_ids, rows["num_logprobs"], max_logprobs)}


def report(logits: Tensor, token_ids: Tensor, num_logprobs: Tensor, max_logprobs: int) -> dict[str, Tensor]:
    """Log-probabilities of these tokens, one a row, and of the likeliest: the fields of SampledRows by name."""
    num_rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    warps = max(4, block // LOGITS_PER_WARP)
    logprobs = logits.new_full((num_rows,), float("nan"))
    top_ids = token_ids.new_full((num_rows, max_logprobs), -1)
    top = logits.new_full((num_rows, max_logprobs), -float("inf"))
    if num_rows:
        _report[(num_rows,)](
            logits, token_ids, num_logprobs, logprobs, top_ids, top, vocab, max_logprobs, block, num_warps=warps
        )
    return {"logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top}


def _change(logits: Tensor, rows: Mapping[str, Tensor]) -> None:
    num_rows, vocab = logits.shape
    if "mask" in rows:
        _mask[(num_rows, triton.cdiv(vocab, BLOCK))](logits, rows["mask"], vocab, BLOCK)
    if "bias_ids" in rows:
        _bias[(num_rows,)](logits, rows["bias_starts"], rows["bias_ids"], rows["bias"], vocab, ENTRIES)
    if "seen_ids" in rows:
        seen = [rows[name] for name in ("seen_starts", "seen_ends", "seen_ids", "seen_counts")]
        penalties = [rows[name] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")]
        _penalize[(num_rows,)](logits, *seen, *penalties, vocab, ENTRIES)


@triton.jit
def _mask(logits, mask, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(mask + row * ((vocab + 31) // 32) + ids // 32, mask=ids < vocab, other=-1)
    is_banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + row * vocab + ids, -float("inf"), mask=(ids < vocab) & is_banned)


@triton.jit
def _bias(logits, starts, ids, bias, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for start in range(tl.load(starts + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token_ids = tl.load(ids + at, mask=at < end, other=0)
        # Atomic: the same token may have a bias and a ban.
        tl.atomic_add(logits + row * vocab + token_ids, tl.load(bias + at, mask=at < end, other=0), mask=at < end)


@triton.jit
def _penalize(logits, starts, ends, ids, counts, repetitions, frequencies, presences, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    repetition, frequency, presence = (
        tl.load(repetitions + row),
        tl.load(frequencies + row),
        tl.load(presences + row),
    )
    end = tl.load(ends + row)
    for start in range(tl.load(starts + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token_ids = tl.load(ids + at, mask=at < end, other=-1)
        is_in = (token_ids >= 0) & (token_ids < vocab)  # NO_TOKEN may be among them
        count = tl.load(counts + at, mask=is_in, other=0)
        x = tl.load(logits + row * vocab + token_ids, mask=is_in, other=0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(logits + row * vocab + token_ids, x, mask=is_in)


@triton.jit
def _load(x, start, vocab, BLOCK: tl.constexpr):
    """Logits from `start` on, and their ids; what is no number counts as banned."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(x + ids, mask=ids < vocab, other=-float("inf"))
    return ids, tl.where(values == values, values, -float("inf"))


@triton.jit
def _weights(values, largest, temperature, min_p):
    """Relative to the likeliest token's; 0 for what min_p leaves out."""
    weights = tl.exp((values - largest) * (1 / temperature))
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _above(x, vocab, bound, largest, temperature, min_p, BLOCK: tl.constexpr):
    """How many tokens of weight have a logit of at least `bound`, and their weight."""
    counts = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        _, values = _load(x, start, vocab, BLOCK)
        is_in, weights = _weights_above(values, bound, largest, temperature, min_p)
        counts += is_in
        sums += weights
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def _weights_above(values, bound, largest, temperature, min_p):
    weights = _weights(values, largest, temperature, min_p)
    is_in = (values >= bound) & (weights > 0)
    return is_in.to(tl.int32), tl.where(is_in, weights, 0.0).to(tl.float64)


@triton.jit
def _choose(
    logits, temperatures, top_ps, top_ks, min_ps, seeds, counters, scratch, token_ids, vocab,
    BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * vocab
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    most_ids = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids, values = _load(x, start, vocab, BLOCK)
        most_ids = tl.where(values > most, ids, most_ids)
        most = tl.maximum(values, most)
    largest = tl.max(most, 0)
    token_id = tl.min(tl.where(most == largest, most_ids, vocab), 0)
    temperature = tl.load(temperatures + row)
    if largest == -float("inf"):
        token_id = -1
    elif temperature > 0:
        token_id = _draw(
            x, scratch + row * SMALL, vocab, largest, temperature, tl.load(top_ps + row), tl.load(top_ks + row),
            tl.load(min_ps + row), _uniform(tl.load(seeds + row), tl.load(counters + row)), BLOCK, SMALL,
        )  # fmt: skip
    tl.store(token_ids + row, token_id)


@triton.jit
def _draw(
    x, scratch, vocab, largest, temperature, top_p, top_k, min_p, uniform, BLOCK: tl.constexpr, SMALL: tl.constexpr
):  # fmt: skip
    low = largest - 104 * temperature  # exp(-104) is 0: nothing below has weight
    last_equal = vocab
    if (top_k > 0) | (top_p < 1):
        count, weight = _above(x, vocab, low, largest, temperature, min_p, BLOCK)
        spare = 0
        is_cut = False  # of what equals `low` only the first `spare` are kept
        if (top_k > 0) & (top_k < count):
            low, spare, count, weight, is_cut = _threshold(
                x, scratch, vocab, low, count, weight, top_k, -1.0, largest, temperature, min_p, BLOCK, SMALL
            )
        if top_p < 1:
            share = top_p.to(tl.float64) * weight
            low, spare, count, weight, is_cut_here = _threshold(
                x, scratch, vocab, low, count, weight, 0, share, largest, temperature, min_p, BLOCK, SMALL
            )
            is_cut = is_cut | is_cut_here
        if is_cut:
            last_equal = _nth_equal(x, vocab, low, spare, BLOCK)
    return _pick(x, vocab, low, last_equal, largest, temperature, min_p, uniform, BLOCK)


@triton.jit
def _threshold(
    x, scratch, vocab, low, count_of_low, weight_of_low, top_k, share, largest, temperature, min_p,
    BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The highest bound with `top_k` tokens at or above it (where `share` < 0), or with the weight `share`; how many of
    those that equal it are needed for that; count and weight with these; whether that leaves out others that equal it.
    What is at or above `low` is enough.

    Bisection over the row until SMALL tokens are left between the bounds; these are gathered, and it goes on with them.
    With one token between the bounds it does not matter where between them the bound is.
    """
    high = largest + tl.abs(largest) * 1e-6 + 1e-30
    count_of_high = 0
    weight_of_high = tl.zeros([], tl.float64)
    middle = low + (high - low) / 2
    while (count_of_low - count_of_high > SMALL) & (low < middle) & (middle < high):
        count, weight = _above(x, vocab, middle, largest, temperature, min_p, BLOCK)
        is_enough = tl.where(share < 0, count >= top_k, weight >= share)
        low = tl.where(is_enough, middle, low)
        count_of_low = tl.where(is_enough, count, count_of_low)
        weight_of_low = tl.where(is_enough, weight, weight_of_low)
        high = tl.where(is_enough, high, middle)
        count_of_high = tl.where(is_enough, count_of_high, count)
        weight_of_high = tl.where(is_enough, weight_of_high, weight)
        middle = low + (high - low) / 2
    values = _gather(x, scratch, vocab, low, high, largest, temperature, min_p, BLOCK, SMALL)
    base = count_of_high
    base_weight = weight_of_high
    while (count_of_low - count_of_high > 1) & (low < middle) & (middle < high):
        is_in, weights = _weights_above(values, middle, largest, temperature, min_p)
        count = base + tl.sum(is_in, 0)
        weight = base_weight + tl.sum(weights, 0)
        is_enough = tl.where(share < 0, count >= top_k, weight >= share)
        low = tl.where(is_enough, middle, low)
        count_of_low = tl.where(is_enough, count, count_of_low)
        weight_of_low = tl.where(is_enough, weight, weight_of_low)
        high = tl.where(is_enough, high, middle)
        count_of_high = tl.where(is_enough, count_of_high, count)
        weight_of_high = tl.where(is_enough, weight_of_high, weight)
        middle = low + (high - low) / 2
    num_equal = tl.maximum(count_of_low - count_of_high, 1)
    each = (weight_of_low - weight_of_high) / num_equal
    wanted = tl.minimum((share - weight_of_high) / each, 1e9)
    by_weight = wanted.to(tl.int32)  # rounded up
    by_weight += (by_weight < wanted).to(tl.int32)
    needed = tl.where(share < 0, top_k - count_of_high, by_weight)
    needed = tl.minimum(tl.maximum(needed, 1), num_equal)
    return low, needed, count_of_high + needed, weight_of_high + needed * each, needed < num_equal


@triton.jit
def _gather(
    x, scratch, vocab, low, high, largest, temperature, min_p, BLOCK: tl.constexpr, SMALL: tl.constexpr
):  # fmt: skip
    """The logits of weight from `low` to below `high`, SMALL at most; -inf where there are fewer."""
    total = 0
    for start in range(0, vocab, BLOCK):
        _, values = _load(x, start, vocab, BLOCK)
        has_weight = _weights(values, largest, temperature, min_p) > 0
        is_in = ((values >= low) & (values < high) & has_weight).to(tl.int32)
        place = total + tl.cumsum(is_in, 0) - 1
        tl.store(scratch + place, values, mask=(is_in == 1) & (place < SMALL))
        total += tl.sum(is_in, 0)
    tl.debug_barrier()
    at = tl.arange(0, SMALL)
    values = tl.load(scratch + at, mask=at < total, other=-float("inf"))
    tl.debug_barrier()  # before somebody else gathers
    return values


@triton.jit
def _nth_equal(x, vocab, value, n, BLOCK: tl.constexpr):
    """The id of the n-th logit with this value; `vocab` if there are fewer."""
    found = vocab
    total = 0
    for start in range(0, vocab, BLOCK):
        ids, values = _load(x, start, vocab, BLOCK)
        is_equal = ((values == value) & (ids < vocab)).to(tl.int32)
        rank = total + tl.cumsum(is_equal, 0)
        found = tl.minimum(found, tl.min(tl.where((is_equal == 1) & (rank == n), ids, vocab), 0))
        total += tl.sum(is_equal, 0)
    return found


@triton.jit
def _kept(x, start, vocab, low, last_equal, largest, temperature, min_p, BLOCK: tl.constexpr):
    ids, values = _load(x, start, vocab, BLOCK)
    is_kept = (values > low) | ((values == low) & (ids <= last_equal))
    return ids, tl.where(is_kept, _weights(values, largest, temperature, min_p), 0.0).to(tl.float64)


@triton.jit
def _pick(x, vocab, low, last_equal, largest, temperature, min_p, uniform, BLOCK: tl.constexpr):
    """The first kept token, by id, with which the running sum of weights exceeds the uniform number's share of all."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        _, weights = _kept(x, start, vocab, low, last_equal, largest, temperature, min_p, BLOCK)
        sums += weights
    target = uniform * tl.sum(sums, 0)
    running = tl.zeros([], tl.float64)
    token_id = 0
    is_found = 0
    start = 0
    while (start < vocab) & (is_found == 0):
        ids, weights = _kept(x, start, vocab, low, last_equal, largest, temperature, min_p, BLOCK)
        here = tl.sum(weights, 0)
        last = tl.max(tl.where(weights > 0, ids, -1), 0)
        if running + here > target:
            sums = running + tl.cumsum(weights, 0)
            first = tl.min(tl.where((sums > target) & (weights > 0), ids, vocab), 0)
            token_id = tl.minimum(first, last)  # rounding may leave none
            is_found = 1
        else:
            token_id = tl.maximum(token_id, last)
        running += here
        start += BLOCK
    return token_id


@triton.jit
def _uniform(seed, counter):
    """53 bits of Philox4x32-10 (Salmon et al., 2011) in [0, 1)."""
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, 0, 0)
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992)


@triton.jit
def _report(
    logits, token_ids, num_wanted, logprobs, top_ids, top_logprobs, vocab, width, BLOCK: tl.constexpr
):  # fmt: skip
    """log_softmax of the model's own logits: of the chosen token and of the likeliest, lowest id first on a tie."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_wanted + row)
    if count >= 0:
        x = logits + row * vocab
        largest = tl.full([], -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            _, values = _load(x, start, vocab, BLOCK)
            largest = tl.maximum(largest, tl.max(values, 0))
        total = tl.zeros([], tl.float64)
        for start in range(0, vocab, BLOCK):
            _, values = _load(x, start, vocab, BLOCK)
            total += tl.sum(tl.exp(values - largest).to(tl.float64), 0)
        log_total = largest.to(tl.float64) + tl.log(total)
        token_id = tl.load(token_ids + row)
        chosen = tl.load(x + tl.maximum(token_id, 0)).to(tl.float64) - log_total
        tl.store(logprobs + row, tl.where(token_id >= 0, chosen, -float("inf")))
        before = float("inf")
        before_id = -1
        for place in range(0, tl.minimum(count, vocab)):
            best = tl.full([], -float("inf"), tl.float32)
            best_id = -1
            for start in range(0, vocab, BLOCK):
                ids, values = _load(x, start, vocab, BLOCK)
                is_next = (values < before) | ((values == before) & (ids > before_id))
                values = tl.where(is_next & (ids < vocab), values, -float("inf"))
                here = tl.max(values, 0)
                first = tl.min(tl.where((values == here) & is_next, ids, vocab), 0)
                best_id = tl.where(here > best, first, best_id)
                best = tl.maximum(here, best)
            tl.store(top_ids + row * width + place, best_id)
            tl.store(top_logprobs + row * width + place, best.to(tl.float64) - log_total)
            before = best
            before_id = best_id
