"""What bounds the scheduler, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_batch: int  # requests in a step
    max_batched_tokens: int  # tokens in a step; at least max_batch, so that decodes leave prompts something
    block_ratio: float = 0.75  # share of the blocks that prompts may fill at admission; >= 1 reserves the worst case
    max_waiting: int = 128  # beyond what can start at once
    max_waiting_tokens: int = 1 << 20  # of the prompts of all that wait; one alone may have more
    most_read: int = 1 << 10  # tokens in the readings of a step, see Executor


@dataclass
class Counters:
    """Since the start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests when they are first admitted
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
