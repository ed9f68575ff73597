"""Compilation of grammars: requests with structured outputs wait here until their grammars are compiled. Independent
of texts and of the grammar library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.core.types import Grammar, Request
from engine.errors import as_request_error

LONG_S = 0.2  # seconds of a long compilation; most take milliseconds


class MaskRow(NamedTuple):
    """A request that samples in a step and, if it has a grammar, needs masks."""

    request: Request
    drafts: Sequence[int] = ()  # each needs another mask


class Grammars(Protocol):
    """Compiler of grammars and masks."""

    @property
    def is_busy(self) -> bool:
        """Return whether `poll` has something to do."""
        ...

    def begin(self, request: Request) -> Future[Sequence[Grammar]]:
        """Start to compile grammars for the request and its forks, each advanced by the known tokens of its answer.
        The future fails with RequestError."""
        ...

    def cancel(self, begun: Future[Sequence[Grammar]]) -> None:
        """Cancel what `begin` has started."""
        ...

    def poll(self, timeout_s: float = 0.0) -> None:
        """Continue what was started. Wait up to `timeout_s` for something to do."""
        ...

    def masks(self, choices: Sequence[MaskRow]) -> Any:
        """Return the masks of a step, see `executor.Step.mask`, and set `is_mask_missing` of each grammar."""
        ...


@dataclass(eq=False)
class Compilation:
    """Compilation of the grammar of a request and its forks."""

    request: Request
    is_replay: bool
    grammars: Future[Sequence[Grammar]]
    dropped: set[str] = field(default_factory=set)  # ids of the request and its forks
    began_at: float = field(default_factory=time.monotonic)
    is_long: bool = False

    @property
    def wanted(self) -> list[Request]:
        """Return the request and its forks, except those that were dropped."""
        return [each for each in (self.request, *self.request.forks) if each.request_id not in self.dropped]

    def enter(self) -> None:
        """Give the request and its forks their grammars. Raises RequestError if the compilation has failed."""
        if error := self.grammars.exception():
            raise as_request_error(error)
        for request, grammar in zip((self.request, *self.request.forks), self.grammars.result(), strict=True):
            request.grammar = grammar


class CompilationQueue:
    """Compilations, which run in other processes: the steps of other requests do not wait for them."""

    def __init__(self) -> None:
        self._waiting: list[Compilation] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id == wanted.request_id for each in self._waiting for wanted in each.wanted)

    @property
    def requests(self) -> list[Request]:
        """Return the requests that wait, without forks."""
        return [each.request for each in self._waiting]

    def add(self, request: Request, is_replay: bool, grammars: Future[Sequence[Grammar]]) -> None:
        """Let a request wait for its grammars."""
        self._waiting.append(Compilation(request, is_replay, grammars))

    def drop(self, request_id: str) -> Compilation | None:
        """Drop a request or a fork and return its compilation. Return None if it does not wait."""
        for each in self._waiting:
            if request_id in [wanted.request_id for wanted in each.wanted]:
                each.dropped.add(request_id)
                return each
        return None

    def take_long(self) -> list[str]:
        """Return the ids of requests whose compilation has become long since the last call."""
        before = time.monotonic() - LONG_S
        found = [each for each in self._waiting if not each.is_long and each.began_at < before]
        for each in found:
            each.is_long = True
        return [request.request_id for each in found for request in each.wanted]

    def take_ready(self) -> list[Compilation]:
        """Remove and return the compilations that have ended."""
        ready = [each for each in self._waiting if each.grammars.done()]
        self._waiting = [each for each in self._waiting if each not in ready]
        return ready
