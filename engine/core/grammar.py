"""Requests whose answer must have a given form wait here until it is compiled. Knows no text and no library."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.core.types import Grammar, Request
from engine.errors import as_request_error

WAIT_S = 0.005  # for a form, while nothing else is to be computed; arrivals are looked at in between


class Choice(NamedTuple):
    """A row that a step samples: who chooses by which form, after which drafts."""

    request: Request
    drafts: Sequence[int] = ()  # a mask after each of them, too


class Grammars(Protocol):
    def begin(self, request: Request) -> Future[Sequence[Grammar]]:
        """For the request and its forks, each with what is known of its answer. Fails with InvalidRequest."""
        ...

    def masks(self, choices: Sequence[Choice]) -> Any:
        """Of a step, see `engine.core.types.Step.mask`."""
        ...


@dataclass(eq=False)
class Compilation:
    """Of the form that a request wants."""

    request: Request
    is_replay: bool
    grammars: Future[Sequence[Grammar]]
    dropped: set[str] = field(default_factory=set)  # of the request and its forks

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


class Compiling:
    """In a thread of somebody else's: the steps of other requests do not wait."""

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

    def drop(self, request_id: str) -> bool:
        """False when it is not here (any more)."""
        for each in self._waiting:
            if request_id in [wanted.request_id for wanted in each.wanted]:
                each.dropped.add(request_id)
                return True
        return False

    def wait(self) -> None:
        """For the next one, but not for long: more may arrive."""
        wait([each.grammars for each in self._waiting], WAIT_S, FIRST_COMPLETED)

    def take_ready(self) -> list[Compilation]:
        ready = [each for each in self._waiting if each.grammars.done()]
        self._waiting = [each for each in self._waiting if each not in ready]
        return ready
