"""Engine side of a grammar and of the answers that follow it. It handles tokens and replies, independent of
processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol
from weakref import WeakSet

from engine.core.types import Grammar, Request
from engine.errors import InvalidRequest, RequestError, escape_braces
from engine.grammars.processes import WorkerProcess
from engine.grammars.worker import Followed, Mask
from engine.text.compile_errors import brief

MAX_FORCED = 16  # tokens of one step
NUM_LATE_STEPS = 64  # after one that was late, a worker is not waited for
MIN_CPU_S = 0.1  # of a worker, before it can count as slow
SLOW_ROW_S = 0.002  # of CPU time for a token; 0.1 ms are usual
NO_MASK: Mask = b""


@dataclass(eq=False)
class CompiledGrammar:
    """A grammar that waits for compilation, is being compiled, or is compiled and held by its worker process."""

    source: str  # text of the grammar
    owner: str
    process: WorkerProcess | None = None
    is_compiled: bool = False
    is_long: bool = False  # it takes longer than most: compiled at the lowest priority, after those that do not
    memory_bytes: int = 0
    used_at: float = 0.0  # when an answer was last seen to follow it
    num_losses: int = 0  # workers that ended for no reason of its own, since the last that did something
    openings: list[Opening] = field(default_factory=list)  # those that the worker has not replied to yet
    matchers: WeakSet[Matcher] = field(default_factory=WeakSet)
    num_late_steps: int = 0  # in which it is not waited for
    has_low_priority: bool = False
    is_overdue: bool = False  # its worker was ended because it did not reply
    num_rows: int = 0  # tokens and masks so far

    @property
    def is_wanted(self) -> bool:
        return bool(self.openings or self.matchers)

    def lost_worker(self) -> None:
        """Open all answers again in the next worker, with the tokens that they have."""
        self.is_compiled = self.has_low_priority = False
        opening = {matcher for each in self.openings for matcher in each.matchers}
        if left := [matcher for matcher in self.matchers if matcher not in opening and matcher.failure is None]:
            self.openings.append(Opening(left))
        for each in self.openings:
            each.is_sent = False
        for matcher in self.matchers:
            matcher.is_ready = matcher.failure is not None

    @property
    def is_slow(self) -> bool:
        """Return whether steps do not wait for the masks of this grammar: its answers take part when their masks are
        ready."""
        return self.num_late_steps > 0 or self.is_always_slow

    @property
    def is_always_slow(self) -> bool:
        cpu_s = self.process.cpu_s if self.process else 0.0
        return cpu_s > max(MIN_CPU_S, SLOW_ROW_S * self.num_rows)


@dataclass(eq=False)
class Opening:
    """Answers that begin to follow a grammar, or do so again in another worker."""

    matchers: Sequence[Matcher]
    begun: Future[Sequence[Grammar]] = field(default_factory=Future)
    is_sent: bool = False


class Pool(Protocol):
    """Interface of the worker pool (engine.grammars.pool.GrammarPool) for an answer."""

    def note_growth(self, matcher: Matcher) -> None: ...

    def advance_workers(self) -> None: ...


class Matcher:
    """An `engine.core.types.Grammar`: one answer that follows a grammar. `field` of its request asks for that."""

    _ids = count()

    def __init__(self, grammar: CompiledGrammar, request: Request, pool: Pool):
        self.matcher_id = next(self._ids)
        self.grammar = grammar
        self.field = request.sampling.structured_output[0]
        self.stop_ids = request.sampling.stop_token_ids
        self.mask = NO_MASK  # of the next token, where it is known already
        self.is_ready = False
        self.is_mask_missing = False
        self.failure: RequestError | None = None
        self._token_ids, self._num_sent = request.token_ids, request.prompt_len
        self._prompt_len = request.prompt_len
        self._pool = pool
        self._process: WorkerProcess | None = None  # the one that knows it
        self._is_complete = False
        self._forced: Sequence[int] = ()
        grammar.matchers.add(self)

    @property
    def error(self) -> RequestError | None:
        self._pool.advance_workers()
        return self.failure

    @property
    def is_complete(self) -> bool:
        self._pool.advance_workers()
        return self.failure is None and self._is_complete

    @property
    def takes_drafts(self) -> bool:
        return self.is_ready and not self.grammar.is_slow

    def advance(self, token_ids: Sequence[int]) -> None:
        self._pool.note_growth(self)

    def forced(self) -> Sequence[int]:
        self._pool.advance_workers()
        return () if self.grammar.is_slow else self._forced[:MAX_FORCED]

    def opened_by(self, process: WorkerProcess) -> tuple[int, Sequence[int], Sequence[int]]:
        """Return what a worker has to know first."""
        self._process, self._num_sent = process, self._prompt_len
        return self.matcher_id, self.stop_ids, self.unsent()

    def unsent(self) -> list[int]:
        """Return the tokens that were not sent to the worker, and mark them as sent."""
        token_ids = self._token_ids[self._num_sent :]
        self._num_sent = len(self._token_ids)
        self.grammar.num_rows += 1 + len(token_ids)
        return token_ids

    @property
    def is_behind(self) -> bool:
        """Return whether tokens were not sent to the worker yet."""
        return self._num_sent < len(self._token_ids)

    def take(self, followed: Followed) -> None:
        """Enter what the worker has found out about the tokens so far."""
        error, self._is_complete, self._forced, self.mask = followed
        self.note_error(error)

    def note_error(self, error: str) -> None:
        if error and self.failure is None:
            text = f"The `{{field}}` cannot be followed any further: {escape_braces(brief(error, self.grammar.source))}"
            self.fail(InvalidRequest(text, field=self.field))

    def fail(self, error: RequestError) -> None:
        """Set an error: there will be no more masks, and the next step ends the answer."""
        self.failure, self.is_ready, self._forced, self.mask = error, True, (), NO_MASK

    def __del__(self) -> None:
        if self._process:
            self._process.to_close.append(self.matcher_id)
