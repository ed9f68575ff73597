"""Sender of a background response, which continues when the client that watches it disconnects."""

from __future__ import annotations

import contextlib
import logging
import threading

from engine import wire
from engine.errors import Cancelled
from engine.serving.reply import Reply, Sender

log = logging.getLogger(__name__)


class BackgroundSender:
    """Forwards responses to the client that watches the request, if there is one. Methods other than `is_cancelled` are
    called by sender threads only."""

    def __init__(self) -> None:
        self._reply: Reply | None = None
        self._watcher: Sender | None = None
        self._lock = threading.Lock()  # held to ask the watcher, and to take it before its final response

    def send(self, payload: bytes, final: bool) -> None:
        if watcher := self._take() if final else self._watcher:
            try:
                watcher.send(payload, final)
            except Exception:
                log.exception("a response could not be sent to the client that watches it")
                with contextlib.suppress(Exception):
                    self._end_watching(self._watcher)

    def is_cancelled(self) -> bool:
        """Return False: the request continues without its watcher. A disconnected watcher is dropped."""
        with self._lock:
            watcher = self._watcher
            is_released = watcher is not None and watcher.is_cancelled()
        if is_released and self._reply:
            self._reply.call_between_responses(lambda: self._end_watching(watcher))
        return False

    def watch(self, watcher: Sender, reply: Reply, num_sent: int) -> None:
        """Send the answer to `watcher` from token `num_sent` on, and no longer to the previous watcher. Must be called
        by `Reply.call_between_responses`."""
        self._end_watching(self._watcher)
        self._reply, self._watcher = reply, watcher
        reply.start_streaming(num_sent)

    def _end_watching(self, watcher: Sender | None) -> None:
        if watcher and watcher is self._watcher and self._reply and self._take():
            self._reply.stop_streaming()
            error = Cancelled("the answer goes on without this connection")
            watcher.send(wire.write_answer(wire.Failure(error)), True)

    def _take(self) -> Sender | None:
        with self._lock:
            watcher, self._watcher = self._watcher, None
        return watcher
