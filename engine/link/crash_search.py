"""Search for the request that crashes the engine: decides in which order a new engine process gets the open requests.
Independent of sockets.

After a crash the requests are submitted one at a time: the next one follows when the previous one has a token, or when
its grammar takes long to compile, which happens in another process. Until then the request is alone. If the engine
crashes again, the request that was alone is the suspect and the next engine process gets it first. If it crashes that
one, too, it is the culprit; otherwise the crash had another cause. No request is blamed for a crash of an engine that
was still loading the model, which takes several seconds on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class CrashSearch:
    """Submits open requests to a new engine process and finds the one that crashes it. `submit` sends a request to the
    engine and returns False if it is no longer open. `on_alone` is called with a request before it is computed alone,
    and with None when no request is."""

    def __init__(self, submit: Callable[[str], bool], on_alone: Callable[[str | None], None] = lambda name: None):
        self._submit, self._on_alone = submit, on_alone
        self._waiting: deque[str] = deque()
        self._alone: str | None = None
        self._suspect: str | None = None
        self._is_held = False  # the engine process does not compute yet

    def add(self, request_id: str) -> None:
        """Submit a new request, during a search after the requests that wait for their turn."""
        if self._alone is None and not self._is_held:
            self._submit(request_id)
        else:
            self._waiting.append(request_id)

    def note_crash(self) -> str | None:
        """Record a crash of the engine. Return the culprit if it is known now, else None."""
        if self._is_held:
            return None
        alone, suspect = self._alone, self._suspect
        self._alone, self._suspect = None, alone
        if alone is None or alone != suspect:
            return None
        self._suspect = None
        return alone

    def hold(self, request_ids: Iterable[str]) -> None:
        """Let all open requests wait for `begin`, because there is a new engine process."""
        self._is_held = True
        self._waiting = deque(sorted(request_ids, key=lambda request_id: request_id != self._suspect))

    def begin(self) -> None:
        """Start the search among the requests that were held, because the engine process computes now."""
        if self._is_held:
            self._is_held = False
            self._next()

    def call_off(self) -> None:
        """Stop the search, because all open requests have been submitted otherwise."""
        self._waiting.clear()
        self._alone, self._is_held = None, False
        self._on_alone(None)

    def survived(self, request_id: str) -> None:
        """Record that a request has a token, has ended, or waits for its grammar."""
        if request_id == self._alone:
            self._alone = None
            if request_id == self._suspect:
                self._suspect = None
            self._next()

    def _next(self) -> None:
        while self._waiting and self._alone is None:
            request_id = self._waiting.popleft()
            self._on_alone(request_id)
            self._alone = request_id if self._submit(request_id) else None
        if self._alone is None:
            self._on_alone(None)
