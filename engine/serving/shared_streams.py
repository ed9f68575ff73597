"""Streams that several requests share (engine/wire/shared.py): a response costs Triton, the stub and the gateway many
times what its words do. Knows no answers."""

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

MOST_BYTES = 1 << 18  # of a response, but for one answer that is longer: it goes through the memory of /dev/shm
IDLE_S = 1.0  # that a stream nobody needs stays open: Triton waits for all of them when it is to stop


class SharedStreams:
    """By the names that gateways gave them. Thread-safe."""

    def __init__(self) -> None:
        self._streams: dict[str, _SharedStream] = {}
        self._num_sharing: Counter[str] = Counter()  # open requests by stream, whether that is there or not
        self._lock = threading.Lock()

    def open(self, name: str, sender: Sender) -> None:
        with self._lock:
            before, self._streams[name] = self._streams.get(name), _SharedStream(sender)
        if before:
            before.end()

    def join(self, name: str, tag: int, own: Sender) -> Sender:
        with self._lock:
            self._num_sharing[name] += 1
        return _SharingSender(self, name, tag, own)

    def leave(self, name: str) -> None:
        with self._lock:
            self._num_sharing[name] -= 1
            self._num_sharing += Counter()  # without those of none

    def put(self, name: str, tag: int, answer: bytes) -> bool:
        """For the next `flush`. False when there is no such stream."""
        stream = self._streams.get(name)
        return stream is not None and stream.put(tag, answer)

    def flush(self) -> None:
        for stream in list(self._streams.values()):
            stream.flush()

    def end_unused(self) -> None:
        for name, stream in list(self._streams.items()):
            if stream.is_unused(name in self._num_sharing):
                self._end(name, stream)

    def close(self) -> None:
        for name, stream in list(self._streams.items()):
            self._end(name, stream)

    def _end(self, name: str, stream: _SharedStream) -> None:
        with self._lock:
            if self._streams.get(name) is stream:
                del self._streams[name]
        stream.end()


class _SharingSender:
    """Of one request. Its last response goes on its own stream, which that ends."""

    def __init__(self, streams: SharedStreams, name: str, tag: int, own: Sender):
        self._streams, self._name, self._tag = streams, name, tag
        self._own = own

    def send(self, payload: bytes, final: bool) -> None:
        if not final and self._streams.put(self._name, self._tag, payload):
            return
        self._streams.flush()  # not to be held up by this one
        if final:
            self._streams.leave(self._name)
        self._own.send(payload, final)

    def is_cancelled(self) -> bool:
        return self._own.is_cancelled()


class _SharedStream:
    def __init__(self, sender: Sender):
        self._sender = sender
        self._answers: list[tuple[int, bytes]] = []  # with their tags
        self._needed_at = time.monotonic()
        self._is_over = False
        self._lock = threading.Lock()  # of the answers, and of the end
        self._sending = threading.Lock()  # held around the above: answers are sent in their order

    def put(self, tag: int, answer: bytes) -> bool:
        with self._lock:
            if not self._is_over:
                self._answers.append((tag, answer))
            return not self._is_over

    def flush(self) -> None:
        """Waits for no other flush: who is at it sends these answers, too."""
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

    def is_unused(self, is_needed: bool) -> bool:
        """Or its gateway has left."""
        now = time.monotonic()
        if is_needed:
            self._needed_at = now
        if not self._sending.acquire(blocking=False):
            return False
        try:  # after the end the question itself would crash Triton
            return self._is_over or now - self._needed_at > IDLE_S or self._sender.is_cancelled()
        finally:
            self._sending.release()
            self.flush()  # answers whose own flush has found the lock taken

    def _send(self, is_end: bool) -> None:
        with self._lock:
            if self._is_over:
                self._answers = []  # lost with it, those that came while it broke
                return
            sizes = list(accumulate(len(answer) for _, answer in self._answers))
            count = len(sizes) if is_end else bisect_left(sizes, MOST_BYTES) + 1
            answers, self._answers = self._answers[:count], self._answers[count:]
            self._is_over = is_end
        if answers or is_end:
            self._try_to_send(wire.write_shared(answers), is_end)

    def _try_to_send(self, response: bytes, is_end: bool) -> None:
        """What is lost with a stream is missed by its gateway, which asks for it again."""
        try:
            self._sender.send(response, is_end)
        except Exception:
            log.exception("a shared stream is broken")
            if not is_end:
                self._is_over = True
                self._try_to_send(wire.write_shared([]), True)
