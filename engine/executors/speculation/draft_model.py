"""Interface of a draft model on a device: its graph, the rows of a run, a draft model that reads tokens, and a layer
that also reads the hidden states of the target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engine.core.types import Batch, Row
from engine.executors.speculation.draft_cache import DraftCache
from engine.executors.speculation.verified_rows import VerifiedRow

SHORT = 16  # tokens that a row may lack in the draft model's cache and still be drafted for in the same step
NUM_KEPT = 7 * SHORT  # hidden states of the last tokens of a slot that stay on a device that runs ahead


class DraftRow(NamedTuple):
    """The tokens of one slot that a run of the draft model computes, from position `start` on."""

    slot: int
    start: int
    token_ids: Sequence[int]
    samples: bool  # a token after the last one
    num_answered: int  # tokens of the answer up to there, which select the random number
    states: np.ndarray | None = None  # [tokens, ...], only for an MTP layer: what it reads beside each token
    # If the step that was launched last still chooses the tokens, its row. The device finds out how many of its drafts
    # are correct, samples behind the token that follows these, and adds their number to `num_answered`.
    verified: VerifiedRow | None = None


Run = Callable[[Sequence[DraftRow], int], list[list[int]]]


class DraftGraph(Protocol):
    """A graph that drafts, with its KV caches, which have the block ids of the model."""

    block_bytes: int
    states_width: int  # of the hidden states that it reads beside the tokens; 0: none

    def allocate(self, num_blocks: int) -> None:
        """Allocate the caches and free the previous ones."""
        ...

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks. `pairs` are sources and targets."""
        ...

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run the graph and return its outputs by name, valid until the next call; on a GPU they stay there. On a CPU
        it must be called in the thread of the executor: another one would have threads of the ops for itself."""
        ...


class DraftModel(Protocol):
    """A draft model on a device."""

    cache: DraftCache
    max_seq_len: int
    block_bytes: int
    chunk: int  # tokens of prompts that it reads in one run
    can_run_ahead: bool  # `launch` takes rows that are still verified

    @property
    def launch(self) -> Run | None:
        """Launch a run, and return placeholders for its drafts in the step that is launched next. None if the step
        needs the tokens themselves."""
        ...

    def allocate(self, num_blocks: int) -> None: ...

    def place(self, batch: Batch) -> None: ...

    def run(self, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        """Compute the rows. Return, for each row that samples, one token or several up to `num_drafts`, in which case
        it has also computed all of them but the last."""
        ...

    def wait(self) -> list[list[int]]:
        """Return the drafts of the run that `launch` has started."""
        ...


class MtpLayer(DraftModel, Protocol):
    """An MTP layer or an EAGLE-3 head on a device."""

    # By slot, its own hidden state of the last token it has sampled, if it samples one token in a run.
    drafted_states: dict[int, np.ndarray]

    @property
    def kept_states(self) -> Callable[[int, int, int], np.ndarray] | None:
        """Return the states of the last NUM_KEPT tokens of a slot, from one position to another. None where steps are
        not launched ahead: the states of a step are lost there when the next one is computed."""
        ...

    def step_states(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the hidden states of all tokens of the step that has just run, [tokens, ...]. They are arrays of
        numbers, f32 [tokens, H], or stand for states on a device, then 0 stands for zeros."""
        ...
