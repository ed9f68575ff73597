"""Fingerprint of the arithmetic of an executor. Replicas compare it to know whether they compute equal answers."""

from __future__ import annotations

import struct
from hashlib import blake2b
from itertools import accumulate, pairwise

from engine.core.cache_groups import STATE
from engine.core.executor import Executor
from engine.core.types import Arrival, Batch, Logprobs, Row, Sampling

PROMPT_LEN, MAX_CHUNK = 96, 64  # so that the second chunk reads the cache
NUM_DECODES = 3
NUM_LOGPROBS = 4
DIGEST_BYTES = 6  # statistics of an engine are numbers, of which a double holds 53 bits


def fingerprint(executor: Executor, vocab_size: int, bounds: tuple[int, int, int]) -> int:
    """Return a hash of the log-probabilities, to the last bit, of the first tokens of the answer to a fixed prompt. Two
    executors with different hashes compute different answers. `bounds` are the most tokens of a request and of a step,
    and the number of blocks of the cache, whose content is lost. Return 0 if they are too small for the prompt.
    """
    model_len, max_step_tokens, num_blocks = bounds
    token_ids = [(7919 * i + 11) % vocab_size for i in range(PROMPT_LEN)]
    count = -(-(PROMPT_LEN + NUM_DECODES) // executor.block_size)
    sizes = [group.num_parts if group.kind == STATE else count for group in executor.cache_groups]
    if PROMPT_LEN + NUM_DECODES > model_len or sum(sizes) > num_blocks:
        return 0
    # Lists, because other ranks receive them as a message.
    blocks = [list(range(start, end)) for start, end in pairwise(accumulate(sizes, initial=0))]
    sampling = Sampling(NUM_DECODES + 1, num_logprobs=NUM_LOGPROBS, temperature=0.0)
    arrivals, found = [Arrival(0, token_ids, PROMPT_LEN, sampling)], list[Logprobs]()
    start = 0
    while start < PROMPT_LEN + NUM_DECODES:
        chunk = token_ids[start : start + min(MAX_CHUNK, max_step_tokens)]
        is_sampled = start + len(chunk) >= PROMPT_LEN
        row = Row(0, start, chunk, blocks if arrivals else (), num_sampled=int(is_sampled))
        output = executor.launch(Batch([row], arrivals)).result()
        arrivals, start = [], start + len(chunk)
        if is_sampled:
            token_ids = [*token_ids, *output.token_ids[0]]
            found += output.logprobs[0] or ()
    values = [value for each in found for pair in ((-1, each.chosen), *each.top) for value in pair]
    packed = struct.pack(f"<{'id' * (len(values) // 2)}", *values)
    return int.from_bytes(blake2b(packed, digest_size=DIGEST_BYTES).digest(), "little")
