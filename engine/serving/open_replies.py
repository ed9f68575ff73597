"""Replies that have not ended, by the req_id of their clients. Thread-safe."""

from __future__ import annotations

import threading

from engine.errors import DuplicateRequest
from engine.serving.reply import Reply
from engine.wire import shown


class OpenReplies:
    """Thread-safe mapping from req_id to the reply of an open request."""

    def __init__(self) -> None:
        self._replies: dict[str, Reply] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """Add a reply. Raises DuplicateRequest if its req_id is in use."""
        with self._lock:
            if reply.req_id in self._replies:
                text = "The {field} {value} already exists in the current batch, the current request will be ignored."
                raise DuplicateRequest(text, field="req_id", value=shown(reply.req_id))
            self._replies[reply.req_id] = reply

    def get(self, req_id: str) -> Reply | None:
        """Return the open reply with this req_id, or None."""
        with self._lock:
            return self._replies.get(req_id)

    def remove(self, reply: Reply) -> None:
        """Remove a reply; do nothing if it is not open."""
        with self._lock:
            self._replies.pop(reply.req_id, None)

    def all(self) -> list[Reply]:
        """Return a copy of the list of open replies."""
        with self._lock:
            return list(self._replies.values())
