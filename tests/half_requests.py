"""A gRPC client that never completes its messages, in bytes of HTTP/2, because no library would send this."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from gateway.inet_diag import received_by

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE, WINDOW, FRAME_BYTES, HEAD_BYTES = 4, 65535, 16384, 9


def the_kernel_tells() -> bool:
    try:
        received_by(1)
    except OSError:
        return False
    return True


NEEDS_SOCK_DIAG = pytest.mark.skipif(
    not the_kernel_tells(), reason="this kernel does not tell what connections receive"
)


class HalfRequests:
    """One connection; on each of its streams a message of `size` bytes comes but for the last of them."""

    def __init__(self, port: int, method: str, num_streams: int, size: int):
        self.left = dict.fromkeys(range(1, 2 * num_streams, 2), size + 4)  # bytes, of the streams that are not refused
        self.sent = dict.fromkeys([0, *self.left], 0)  # 0: of all
        self._given = dict.fromkeys(self.sent, 0)  # what windows have grown by
        self._size, self._initial, self._read = size, WINDOW, b""
        self._sock = socket.create_connection(("127.0.0.1", port))
        fields = {":method": "POST", ":scheme": "http", ":path": f"/{method}", ":authority": "x", "te": "trailers"}
        fields["content-type"] = "application/grpc"
        opening = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        frames = [_frame(HEADERS, END_HEADERS, stream, opening) for stream in self.left]
        self._sock.sendall(PREFACE + _frame(SETTINGS, 0, 0) + b"".join(frames))

    def push(self) -> bool:
        """Send what the flow-control windows allow. Return whether that was anything."""
        self._take()
        before = self.sent[0]
        for stream, left in self.left.items():
            room = min(self._room(0, WINDOW), self._room(stream, self._initial), left, FRAME_BYTES)
            if room > 0:
                begin = b"\0" + self._size.to_bytes(4, "big") if not self.sent[stream] else b""
                self._sock.sendall(_frame(DATA, 0, stream, (begin + b"x" * room)[:room]))
                self.left[stream] -= room
                self.sent[stream] += room
                self.sent[0] += room
        return self.sent[0] > before

    def close(self) -> None:
        self._sock.close()

    def _room(self, stream: int, window: int) -> int:
        return window + self._given[stream] - self.sent[stream]

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := self._sock.recv(1 << 16, socket.MSG_DONTWAIT):
                self._read += piece
        while len(self._read) >= HEAD_BYTES:
            end = HEAD_BYTES + int.from_bytes(self._read[:3], "big")
            if len(self._read) < end:
                return
            kind, flags, stream = self._read[3], self._read[4], int.from_bytes(self._read[5:HEAD_BYTES], "big")
            payload, self._read = self._read[HEAD_BYTES:end], self._read[end:]
            self._heed(kind, flags, stream, payload)

    def _heed(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._initial = dict(struct.iter_unpack(">HI", payload)).get(INITIAL_WINDOW_SIZE, self._initial)
            self._sock.sendall(_frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._sock.sendall(_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._given[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.left.pop(stream, None)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()
