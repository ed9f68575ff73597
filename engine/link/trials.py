"""Which request crashes the engine? Decides in which order a new engine process gets what is open. No sockets here.

After a crash requests are submitted one by one, each when the one before has got a token: it is on trial until then. If
the engine crashes again, the request on trial is the suspect, and the next engine process gets it first and alone. If
that crashes, too, the suspect is the culprit; if not, it was somebody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class Trials:
    """`submit` gives a request to the engine; False when it is no longer open."""

    def __init__(self, submit: Callable[[str], bool]):
        self._submit = submit
        self._waiting: deque[str] = deque()
        self._on_trial: str | None = None
        self._suspect: str | None = None

    def add(self, request_id: str) -> None:
        """A new request: submitted at once, or after those that wait for their trials."""
        if self._on_trial is None:
            self._submit(request_id)
        else:
            self._waiting.append(request_id)

    def note_crash(self) -> str | None:
        """The culprit, if it is known by now."""
        on_trial, suspect = self._on_trial, self._suspect
        self._on_trial, self._suspect = None, on_trial
        if on_trial is None or on_trial != suspect:
            return None
        self._suspect = None
        return on_trial

    def begin(self, request_ids: Iterable[str]) -> None:
        """With a new engine process, of all that is open."""
        self._waiting = deque(sorted(request_ids, key=lambda request_id: request_id != self._suspect))
        self._next()

    def call_off(self) -> None:
        """Whoever is open has been submitted otherwise."""
        self._waiting.clear()
        self._on_trial = None

    def acquit(self, request_id: str) -> None:
        """It has got a token, or has ended."""
        if request_id == self._on_trial:
            self._on_trial = None
            if request_id == self._suspect:
                self._suspect = None
            self._next()

    def _next(self) -> None:
        while self._waiting and self._on_trial is None:
            request_id = self._waiting.popleft()
            self._on_trial = request_id if self._submit(request_id) else None
