"""Requests whose answer must have a given form wait here until it is compiled. Knows no text and no library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.core.types import Grammar, Request
from engine.errors import as_request_error

LONG_S = 0.2  # most grammars are compiled in milliseconds


class MaskRow(NamedTuple):
    """A row that a step samples: who chooses by which form, after which drafts."""

    request: Request
    drafts: Sequence[int] = ()  # a mask after each of them, too


class Grammars(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to do."""
        ...

    def begin(self, request: Request) -> Future[Sequence[Grammar]]:
        """For the request and its forks, each with what is known of its answer. Fails with RequestError."""
        ...

    def cancel(self, begun: Future[Sequence[Grammar]]) -> None:
        """Nothing of what `begin` has begun is wanted any more."""
        ...

    def poll(self, timeout_s: float = 0.0) -> None:
        """Go on with what was begun, waiting so long for something to do."""
        ...

    def masks(self, choices: Sequence[MaskRow]) -> Any:
        """Of a step, see `engine.core.types.Step.mask`. Says of each grammar whether it `is_mask_missing`."""
        ...


@dataclass(eq=False)
class Compilation:
    """Of the form that a request wants."""

    request: Request
    is_replay: bool
    grammars: Future[Sequence[Grammar]]
    dropped: set[str] = field(default_factory=set)  # of the request and its forks
    began_at: float = field(default_factory=time.monotonic)
    is_long: bool = False

    @property
    def wanted(self) -> list[Request]:
        return [each for each in (self.request, *self.request.forks) if each.request_id not in self.dropped]

    def enter(self) -> None:
        """Each answer gets its grammar. Raises RequestError."""
        try:
            grammars = self.grammars.result()
        except Exception as error:
            raise as_request_error(error) from error
        for request, grammar in zip((self.request, *self.request.forks), grammars, strict=True):
            request.grammar = grammar


class CompilationQueue:
    """In other processes: the steps of other requests do not wait."""

    def __init__(self) -> None:
        self._waiting: list[Compilation] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id == wanted.request_id for each in self._waiting for wanted in each.wanted)

    @property
    def requests(self) -> list[Request]:
        return [each.request for each in self._waiting]

    def add(self, request: Request, is_replay: bool, grammars: Future[Sequence[Grammar]]) -> None:
        self._waiting.append(Compilation(request, is_replay, grammars))

    def drop(self, request_id: str) -> Compilation | None:
        """None when it is not here (any more)."""
        for each in self._waiting:
            if request_id in [wanted.request_id for wanted in each.wanted]:
                each.dropped.add(request_id)
                return each
        return None

    def take_long(self) -> list[str]:
        """Return the requests whose compilation has begun to take long since the last call."""
        before = time.monotonic() - LONG_S
        found = [each for each in self._waiting if not each.is_long and each.began_at < before]
        for each in found:
            each.is_long = True
        return [request.request_id for each in found for request in each.wanted]

    def take_ready(self) -> list[Compilation]:
        ready = [each for each in self._waiting if each.grammars.done()]
        self._waiting = [each for each in self._waiting if each not in ready]
        return ready
