"""The cache groups of a model: which blocks a request needs of each, as a function of its position."""

from __future__ import annotations

from dataclasses import dataclass

PAGED, SLIDING_WINDOW, STATE = "paged", "sliding_window", "state"
FREED = -1  # in a block table: a block that the window has passed
SNAPSHOT_INTERVAL = 2048  # tokens between two snapshots of a state inside a prompt or an answer
MAX_REJECTED = 12  # draft tokens that a state can take back


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table.

    A `paged` group keeps every position. A `sliding_window` group keeps the blocks of the last `window` positions. A
    `state` group has `num_parts` blocks a request, which each step overwrites, and snapshots of them at some block
    boundaries.
    """

    kind: str = PAGED
    window: int = 0  # positions that a query attends to, its own included
    num_parts: int = 1  # blocks that a state fills

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a query at `position` reads."""
        return max(0, position - self.window + 1) // block_size if self.kind == SLIDING_WINDOW else 0

    def max_blocks(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """Return how many of `num_blocks` consecutive blocks are needed at once by chunks of up to `max_chunk`
        tokens."""
        if self.kind == PAGED:
            return num_blocks
        if self.kind == STATE:
            return self.num_parts if num_blocks else 0
        return min(num_blocks, (self.window + max_chunk - 2) // block_size + 2)


FULL_ATTENTION = (CacheGroup(),)


def table_name(group: int) -> str:
    """Return the name of the graph input with the block tables of the cache group with this index."""
    return f"block_tables_{group}" if group else "block_tables"
