"""The replies that have not ended, by the names that their clients gave them. Thread-safe."""

from __future__ import annotations

import threading

from engine.errors import DuplicateRequest
from engine.serving.reply import Reply
from engine.wire import shown


class OpenReplies:
    def __init__(self) -> None:
        self._replies: dict[str, Reply] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """Raises DuplicateRequest."""
        with self._lock:
            if reply.req_id in self._replies:
                text = "The {field} {value} already exists in the current batch, the current request will be ignored."
                raise DuplicateRequest(text, field="req_id", value=shown(reply.req_id))
            self._replies[reply.req_id] = reply

    def get(self, req_id: str) -> Reply | None:
        with self._lock:
            return self._replies.get(req_id)

    def remove(self, reply: Reply) -> None:
        with self._lock:
            self._replies.pop(reply.req_id, None)

    def all(self) -> list[Reply]:
        with self._lock:
            return list(self._replies.values())
