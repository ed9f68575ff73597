"""Reads the wire format of protocol buffers. It knows no message types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FIXED_SIZES = {1: 8, 5: 4}  # bytes of a value, by the wire type


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an int for a varint, the bytes of every other wire type.

    Raises ValueError for bytes that are no message.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            size, position = _varint(message, position)
        elif wire_type in FIXED_SIZES:
            size = FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"byte {position} has the unknown wire type {wire_type}")
        begin, position = position, position + size
        if position > len(message):
            raise ValueError(f"the message is cut off: {len(message)} bytes, a field should end at {position}")
        yield tag >> 3, message[begin:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number and the position after it."""
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"the message is cut off: {len(message)} bytes end inside a number")
