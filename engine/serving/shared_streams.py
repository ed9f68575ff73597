"""Response streams shared by several requests (engine/wire/shared_answers.py). A response costs Triton, the Python stub
and the gateway far more than its content, so deltas of several requests are sent as one response. Independent of their
content.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from engine import wire
from engine.serving.reply import Sender

log = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 1 << 18  # of one response, unless a single delta is longer: responses pass through /dev/shm
IDLE_S = 1.0  # lifetime of an unused stream; short, because Triton waits for open streams when it stops


class SharedStreams:
    """Shared streams by the names that gateways gave them. Thread-safe."""

    def __init__(self) -> None:
        self._streams: dict[str, _SharedStream] = {}
        # Number of open requests by the name of the stream, which may not exist (any more).
        self._num_sharing: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, name: str, sender: Sender) -> None:
        """Open the stream `name`, whose responses go to `sender`. A previous stream of this name ends."""
        with self._lock:
            before, self._streams[name] = self._streams.get(name), _SharedStream(sender)
        if before:
            before.end()

    def join(self, name: str, tag: int, own: Sender) -> Sender:
        """Return a sender for a request: its deltas go to the stream `name` with the tag `tag`, its final response goes
        to its own stream."""
        with self._lock:
            self._num_sharing[name] += 1
        return _SharingSender(self, name, tag, own)

    def leave(self, name: str) -> None:
        """Count one request less on the stream `name`."""
        with self._lock:
            self._num_sharing[name] -= 1
            self._num_sharing += Counter()  # drops names without requests

    def put(self, name: str, tag: int, answer: bytes) -> bool:
        """Add a delta to the next `flush`. Return False if there is no such stream."""
        stream = self._streams.get(name)
        return stream is not None and stream.put(tag, answer)

    def flush(self) -> None:
        """Send the collected deltas of all streams."""
        for stream in list(self._streams.values()):
            stream.flush()

    def end_unused(self) -> None:
        """End streams that have been unused for IDLE_S or whose gateway has disconnected. Must be called regularly."""
        for name, stream in list(self._streams.items()):
            if stream.check_unused(name in self._num_sharing):
                self._end(name, stream)

    def close(self) -> None:
        """End all streams."""
        for name, stream in list(self._streams.items()):
            self._end(name, stream)

    def _end(self, name: str, stream: _SharedStream) -> None:
        with self._lock:
            if self._streams.get(name) is stream:
                del self._streams[name]
        stream.end()


class _SharingSender:
    """Sender of one request on a shared stream. The final response goes to the request's own stream and ends it."""

    def __init__(self, streams: SharedStreams, name: str, tag: int, own: Sender):
        self._streams, self._name, self._tag = streams, name, tag
        self._own = own

    def send(self, payload: bytes, final: bool) -> None:
        if not final and self._streams.put(self._name, self._tag, payload):
            return
        self._streams.flush()  # so that collected deltas do not wait for this response
        if final:
            self._streams.leave(self._name)
        self._own.send(payload, final)

    def is_cancelled(self) -> bool:
        return self._own.is_cancelled()


class _SharedStream:
    def __init__(self, sender: Sender):
        self._sender = sender
        self._answers: list[tuple[int, bytes]] = []  # (tag, encoded delta)
        self._needed_at = time.monotonic()
        self._is_over = False
        self._lock = threading.Lock()  # of the deltas and of the end
        self._sending = threading.Lock()  # held while sending, acquired before `_lock`: deltas are sent in order

    def put(self, tag: int, answer: bytes) -> bool:
        with self._lock:
            if not self._is_over:
                self._answers.append((tag, answer))
            return not self._is_over

    def flush(self) -> None:
        """Send collected deltas. Returns at once if another thread is flushing: that one sends them, too."""
        while self._answers and self._sending.acquire(blocking=False):
            try:
                self._send(is_end=False)
            finally:
                self._sending.release()

    def end(self) -> None:
        with self._sending:
            while self._answers and not self._is_over:
                self._send(is_end=False)
            self._send(is_end=True)

    def check_unused(self, is_needed: bool) -> bool:
        """Return True if the stream is over, was not needed for IDLE_S, or its gateway has disconnected."""
        now = time.monotonic()
        if is_needed:
            self._needed_at = now
        if not self._sending.acquire(blocking=False):
            return False
        try:  # after the end the query would crash Triton
            return self._is_over or now - self._needed_at > IDLE_S or self._sender.is_cancelled()
        finally:
            self._sending.release()
            self.flush()  # deltas whose own flush found the lock taken

    def _send(self, is_end: bool) -> None:
        with self._lock:
            if self._is_over:
                self._answers = []  # deltas that arrived while the stream broke are lost with it
                return
            sizes = list(accumulate(len(answer) for _, answer in self._answers))
            count = len(sizes) if is_end else bisect_left(sizes, MAX_RESPONSE_BYTES) + 1
            answers, self._answers = self._answers[:count], self._answers[count:]
            self._is_over = is_end
        if answers or is_end:
            self._try_to_send(wire.write_shared(answers), is_end)

    def _try_to_send(self, response: bytes, is_end: bool) -> None:
        """Send a response; a failure ends the stream. The gateway notices missing deltas and resumes its requests."""
        try:
            self._sender.send(response, is_end)
        except Exception:
            log.exception("a shared stream is broken")
            if not is_end:
                self._is_over = True
                self._try_to_send(wire.write_shared([]), True)
