"""Response streams shared by several requests: the model sends deltas of several requests in one Triton response.

A gateway opens a shared stream by a request with the key SHARE, the stream's name. Other requests refer to it with
SHARED: the name, and a tag that identifies their deltas. The final response of a request uses its own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.wire.answer import Failure, read_error, write_answer
from engine.wire.delta import Delta, Final

SHARE = "_share"
SHARED = "_shared"


class SharedAnswers(msgspec.Struct, frozen=True, tag="shared", array_like=True):
    """Deltas of several requests, each with its tag."""

    answers: list[tuple[int, Delta | Final]]


def shared_of(body: dict[str, Any]) -> tuple[str, int] | None:
    """Remove SHARED from the body and return the stream's name and the tag, or None. The name may be unknown; deltas
    then use the request's own stream."""
    match body.pop(SHARED, None):
        case [str(name), int(tag)]:
            return name, tag
    return None


def write_shared(answers: Sequence[tuple[int, bytes]]) -> bytes:
    """Encode deltas, each with its tag and already encoded by `write_answer`."""
    written: list[Any] = [(tag, msgspec.Raw(answer)) for tag, answer in answers]
    return write_answer(SharedAnswers(written))


read_shared = msgspec.msgpack.Decoder(SharedAnswers | Failure, dec_hook=read_error).decode
