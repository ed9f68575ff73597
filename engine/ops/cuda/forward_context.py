"""Forward context: intermediate results that the ops of one forward pass share, so that each is computed only once.

`CudaProgram.run` opens the context of a pass. An op that is called outside of a pass computes these results itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Order(NamedTuple):
    """Slots by expert. A slot is a pair of a token and one of its experts."""

    slots: Tensor  # i32 [T * top_k]
    starts: Tensor  # i32 [E + 1]: the first slot of each expert in `slots`


@dataclass
class RoutedTokens:
    """Experts that the router of one layer has chosen, and what is known about them."""

    topk_ids: Tensor  # i32 [T, top_k]
    num_experts: int = 0  # of all ranks, or 0 if they were not chosen by `moe_route`
    are_written: bool = False  # whether a kernel may read the ids before it waits for its inputs
    order: Order | None = None  # None until an op has needed it


@dataclass
class ForwardContext:
    """Shared results of one forward pass. Only the routing of the current layer is kept."""

    divisions: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # see balanced_splits.py
    routing: RoutedTokens | None = None

    def routing_of(self, topk_ids: Tensor) -> RoutedTokens:
        """Return the routing that has these ids. It replaces the one of the layer before."""
        if self.routing is None or self.routing.topk_ids is not topk_ids:
            self.routing = RoutedTokens(topk_ids)
        return self.routing


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def current() -> ForwardContext:
    """Return the context of the forward pass of this thread. Outside of a pass it is a new one for each call."""
    return _current.get() or ForwardContext()


@contextlib.contextmanager
def forward_pass() -> Iterator[ForwardContext]:
    """Open the context of a forward pass."""
    context = ForwardContext()
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
