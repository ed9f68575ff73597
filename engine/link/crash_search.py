"""Which request crashes the engine? Decides in which order a new engine process gets what is open. No sockets here.

After a crash requests are submitted one by one, each when the one before has got a token, or its grammar takes long to
compile, in another process: it is alone until then. If
the engine crashes again, the one that was alone is the suspect, and the next engine process gets it first. If that
crashes, too, the suspect is the culprit; if not, it was somebody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class CrashSearch:
    """`submit` gives a request to the engine; False when it is no longer open. `tell_alone` is called with a request
    before it is computed alone, and with None when no request is."""

    def __init__(self, submit: Callable[[str], bool], tell_alone: Callable[[str | None], None] = lambda name: None):
        self._submit, self._tell_alone = submit, tell_alone
        self._waiting: deque[str] = deque()
        self._alone: str | None = None
        self._suspect: str | None = None

    @property
    def is_active(self) -> bool:
        return self._alone is not None

    def add(self, request_id: str) -> None:
        """A new request: submitted at once, or after those that wait for their turn alone."""
        if self._alone is None:
            self._submit(request_id)
        else:
            self._waiting.append(request_id)

    def note_crash(self) -> str | None:
        """The culprit, if it is known by now."""
        alone, suspect = self._alone, self._suspect
        self._alone, self._suspect = None, alone
        if alone is None or alone != suspect:
            return None
        self._suspect = None
        return alone

    def begin(self, request_ids: Iterable[str]) -> None:
        """With a new engine process, of all that is open."""
        self._waiting = deque(sorted(request_ids, key=lambda request_id: request_id != self._suspect))
        self._next()

    def call_off(self) -> None:
        """Whoever is open has been submitted otherwise."""
        self._waiting.clear()
        self._alone = None
        self._tell_alone(None)

    def survived(self, request_id: str) -> None:
        """It has got a token, has ended, or waits for its grammar."""
        if request_id == self._alone:
            self._alone = None
            if request_id == self._suspect:
                self._suspect = None
            self._next()

    def _next(self) -> None:
        while self._waiting and self._alone is None:
            request_id = self._waiting.popleft()
            self._tell_alone(request_id)
            self._alone = request_id if self._submit(request_id) else None
        if self._alone is None:
            self._tell_alone(None)
