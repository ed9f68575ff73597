"""Interface of executors, which compute steps on a device. The engine loop and the executors know only this of each
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from engine.core.cache_groups import CacheGroup
from engine.core.draft_counts import DraftCounts
from engine.core.image_queue import VisionEncoder
from engine.core.types import Batch, StepOutput


class Step(Protocol):
    """A launched step."""

    def drafts(self) -> Mapping[int, Sequence[int]]:
        """Return the draft tokens that the executor has added to the row of each slot. Waits until they are known."""
        ...

    def mask(self, bits: Any) -> None:
        """Set the allowed tokens: u32 [S, ceil(V / 32)], one row for each token that is sampled; bit i of word w allows
        token 32 w + i. Grammars are advanced while the step runs."""
        ...

    def result(self) -> StepOutput:
        """Wait for the step and return its output. An exception leaves the cache undefined and ends the engine."""
        ...


class ExpertCounts(Protocol):
    """Counts of how often each expert of a mixture was chosen."""

    def stats(self) -> Mapping[str, float]:
        """Return sums over all layers, by name."""
        ...

    def clear(self) -> None:
        """Set all counts to zero."""
        ...

    def write(self, path: Path, model: str) -> None:
        """Write the counts to a file. `model`: the name of the exported model. A failure is logged."""
        ...


class Executor(Protocol):
    """Interface of a device: runs the static graph on all ranks and keeps the KV cache and the sampling state of each
    slot. It is used by one thread.

    The constructor raises SetupError if graph, settings and device do not fit together.
    """

    block_size: int  # tokens of a block, chosen at export
    block_bytes: int  # of a block of the KV cache, in all layers of its group
    cache_groups: tuple[CacheGroup, ...]  # of the graph
    max_prompt_logits: int  # tokens of a step with prompt outputs, whose logits are in memory at once; 0: unsupported
    takes_spans: bool  # requests may have prompt spans

    @property
    def thread(self) -> ThreadPoolExecutor | None:
        """Return the thread in which steps are computed, and drafts are made. None: it has no such thread."""
        ...

    @property
    def vision(self) -> VisionEncoder | None:
        """Return the encoder of images, or None if the model has none."""
        ...

    @property
    def expert_usage(self) -> ExpertCounts | None:
        """Return the counts of chosen experts, or None if the model has no experts."""
        ...

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Return the counts of draft tokens, or None if the executor does not draft."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step with PENDING tokens may be launched now while the previous one runs."""
        ...

    @property
    def max_drafts(self) -> int:
        """Return how many draft tokens it may add to a row of the next step; 0 if it does not draft."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that is free for the KV cache, in addition to what steps so far have needed, on the rank
        with the least."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache and free the previous one. Its content is undefined."""
        ...

    def warm_up(self) -> None:
        """Compile and run everything that a request can use. Called after the first `allocate`; the content of the
        cache is lost."""
        ...

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        """Load an adapter (`Sampling.adapter`), so that requests may use it. Raises InvalidRequest."""
        ...

    def drop_adapter(self, adapter_id: str) -> None:
        """Free an adapter that no later step uses. Unknown ids are ignored."""
        ...

    def launch(self, batch: Batch) -> Step:
        """Start a step, which writes keys and values of the tokens of each row into the blocks of its slot and samples
        tokens. It may return before anything is computed. Steps run in the order of their launch. `batch` has at least
        one row."""
        ...

    def close(self) -> None:
        """Free the graph and the cache. This is the last call."""
        ...
