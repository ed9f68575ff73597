"""State that the KV cache manager keeps of each request. Independent of the pool and of the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class CacheState:
    """The blocks of one request. Only the KV cache manager writes it; the scheduler reads `num_writable`,
    `num_published` and `has_new_blocks` in each step."""

    block_ids: list[list[int]] = field(default_factory=list)  # for each cache group: position // block_size -> block
    num_freed: list[int] = field(default_factory=list)  # for each group: leading blocks behind the window
    num_sent: list[int] = field(default_factory=list)  # for each group: leading blocks that the executor knows
    has_new_blocks: bool = False  # the executor does not know all of them
    num_writable: int = 0  # leading positions that may be written
    has_shared_tail: bool = False  # the last block may be shared and is copied before it is written
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks, computed when needed
    num_published: int = 0  # leading full blocks in the prefix cache
    # Only of models with recurrent states
    branch_point: int = 0  # position up to which other prompts share its attention blocks, but no state was kept
    snapshots: Collection[int] = ()  # positions in the prompt at which the state is kept
    last_snapshot: int = 0  # position at which the state was found or kept last
