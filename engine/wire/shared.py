"""Streams that requests share: what the model has for several of them at once is one response of Triton's, a line each.

A gateway opens one by a request with the key SHARE, the stream's name, and says with SHARED where an answer may go:
the name, and the tag of its lines. What ends a request always comes on the request's own stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHARE = "_share"
SHARED = "_shared"


def shared_of(body: dict[str, Any]) -> tuple[str, int] | None:
    """The name and the tag. A name that no gateway has given is of no stream, and does no harm."""
    match body.pop(SHARED, None):
        case [str(name), int(tag)]:
            return name, tag
    return None


def as_line(tag: int, payload: bytes) -> bytes:
    return b"%d %b" % (tag, payload)


def lines_of(response: bytes) -> Iterator[tuple[int, bytes]]:
    """JSON has no line break but as an escape. What has no tag is a refusal of the stream, or its end."""
    for line in response.split(b"\n"):
        tag, _, payload = line.partition(b" ")
        if tag.isdigit():
            yield int(tag), payload
