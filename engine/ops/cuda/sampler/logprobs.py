"""Log-probabilities for the client, computed from the model's own logits."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import kernel, next_power_of_2
from engine.ops.cuda.sampler.row import load

BLOCK, LOGITS_PER_WARP = 8192, 512  # of a row at a time


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: Tensor, max_logprobs: int) -> dict[str, Tensor]:
    """Return the log-probabilities of these tokens, one for each row, and of the likeliest ones: the fields of
    SampledRows by name."""
    num_rows, vocab = logits.shape
    block = min(BLOCK, next_power_of_2(vocab))
    warps = max(4, block // LOGITS_PER_WARP)
    logprobs = logits.new_full((num_rows,), float("nan"))
    top_ids = token_ids.new_full((num_rows, max_logprobs), -1)
    top = logits.new_full((num_rows, max_logprobs), -float("inf"))
    if num_rows:
        _compute_logprobs[(num_rows,)](
            logits, token_ids, num_logprobs, logprobs, top_ids, top, vocab, max_logprobs, block, num_warps=warps
        )
    return {"logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top}


@kernel
def _compute_logprobs(
    logits, token_ids, num_wanted, logprobs, top_ids, top_logprobs, vocab, max_logprobs, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute log_softmax of the model's own logits, for the sampled token and the likeliest ones, lowest id first on a
    tie.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_wanted + row)
    if count >= 0:
        x = logits + row * vocab
        largest = tl.full([], -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            _, values = load(x, start, vocab, BLOCK)
            largest = tl.maximum(largest, tl.max(values, 0))
        total = tl.zeros([], tl.float64)
        for start in range(0, vocab, BLOCK):
            _, values = load(x, start, vocab, BLOCK)
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
                ids, values = load(x, start, vocab, BLOCK)
                is_next = (values < before) | ((values == before) & (ids > before_id))
                values = tl.where(is_next & (ids < vocab), values, -float("inf"))
                here = tl.max(values, 0)
                first = tl.min(tl.where((values == here) & is_next, ids, vocab), 0)
                best_id = tl.where(here > best, first, best_id)
                best = tl.maximum(here, best)
            tl.store(top_ids + row * max_logprobs + place, best_id)
            tl.store(top_logprobs + row * max_logprobs + place, best.to(tl.float64) - log_total)
            before = best
            before_id = best_id
