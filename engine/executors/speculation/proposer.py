"""Interface between speculative decoding and the methods that propose draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.types import Batch, Row
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.requests import DraftedRequest, Verification
from engine.executors.speculation.verified_rows import RunningStep

Drafts = list[tuple[int, Sequence[int]]]  # the draft tokens of rows, by the index of the row in its step
Requests = Mapping[int, DraftedRequest]  # by slot


class Proposer(ABC):
    """Proposes draft tokens for the rows of a step, by a lookup in earlier tokens or with a draft model.

    A method has to define `place` and `propose`. The others are for draft models: `propose_ahead` and `resolve` let
    them run before the tokens are known that they read, and the hidden states are those that an MTP layer reads. The
    policy chooses how many tokens are drafted; without one, there are as many as possible.
    """

    method: str  # name of SPECULATE_METHOD
    block_bytes = 0  # additional bytes of each block of the KV cache
    invested_s = 0.0  # the part of the last `propose` whose time is not a cost of this step

    def allocate(self, num_blocks: int) -> None:  # noqa: B027 - a lookup has no caches
        """Allocate its caches for a pool of `num_blocks` blocks."""

    @abstractmethod
    def place(self, batch: Batch, requests: Requests) -> None:
        """Take over the new requests and blocks of a step. `requests` are those before it."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], requests: Requests, max_drafts: int, policy: DraftPolicy | None) -> Drafts:
        """Return drafts for the rows, at most `max_drafts` together. On a device that runs ahead, they may be
        placeholders for tokens that are still computed."""

    def propose_ahead(self, running: RunningStep, batch: Batch, requests: Requests, policy: DraftPolicy | None) -> bool:
        """Launch the drafts for the next step, whose `batch` continues the `running` one, if the device can take the
        tokens of the latter. Return whether it has, and has also called `place` for the batch. The next call of
        `propose` is the one for that batch."""
        return False

    def resolve(self) -> Drafts:
        """Return the tokens that the placeholders of the last `propose` stand for, if it has returned some."""
        return []

    def hidden_states(self, rows: Sequence[Row]) -> Any:
        """Return what `add_hidden_states` needs of the step that was launched last, before the next one overwrites
        it."""
        return None

    def add_hidden_states(  # noqa: B027 - most methods need only tokens
        self, rows: Sequence[Row], requests: Requests, policy: DraftPolicy | None, states: Any
    ) -> None:
        """Take the `hidden_states` of a step, whose tokens are now in `requests`."""

    def allows_plain_step(self, batch: Batch) -> bool:
        """Return whether a step may run while the next one is launched, so that its hidden states stay on the device
        and `after_plain_step` is called for it in place of `add_hidden_states`."""
        return True

    def after_plain_step(self, rows: Sequence[Row], requests: Requests, policy: DraftPolicy | None) -> bool:
        """Take notice of a step that was launched ahead without drafts, whose tokens are now in `requests`. Return
        whether the device now reads the hidden states of such steps, which takes time from the next ones."""
        return False

    def learn(  # noqa: B027 - a lookup checks all its drafts itself, also those that no step has verified
        self, verifications: Sequence[Verification], policy: DraftPolicy, gain_s: float, step_s: float
    ) -> None:
        """Learn which drafts of a step were accepted, how much time they have saved, and how long it took."""
