"""Limits and counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.cache_groups import FULL_ATTENTION, CacheGroup


@dataclass(frozen=True)
class PrefillLimits:
    """Limits of the prompts that one step computes side by side, so that short prompts need not wait for long ones."""

    max_prefills: int  # prompts in a step
    max_long: int  # long ones among them
    long_tokens: int  # a prompt of more tokens is long


@dataclass(frozen=True)
class Limits:
    """Limits of the scheduler. All but the model's are settings."""

    max_batch: int  # requests in a step
    max_batched_tokens: int  # tokens in a step; at least max_batch, so that decodes leave prompts something
    block_ratio: float = 0.75  # share of the blocks that prompts may fill at admission; >= 1 reserves the worst case
    max_waiting: int = 128  # beyond what can start at once
    max_waiting_tokens: int = 1 << 20  # of the prompts of all that wait; one alone may have more
    max_prompt_logits: int = 1 << 10  # tokens of a step with prompt outputs, see Executor
    prefills: PrefillLimits | None = None  # None: prompts are computed in the order of their arrival
    cache_groups: tuple[CacheGroup, ...] = FULL_ATTENTION  # of the model
    takes_spans: bool = False  # the model, see Executor
    max_drafts: int = 0  # draft tokens that the executor adds to a row, see Executor


@dataclass
class Counters:
    """Counters since the start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests when they are first admitted
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_tokens_without_state: int = 0  # of the others, found for full attention, but not for windows or states
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones
