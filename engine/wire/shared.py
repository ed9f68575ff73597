"""Streams that requests share: what the model has for several of them at once is one response of Triton's.

A gateway opens one by a request with the key SHARE, the stream's name, and says with SHARED where an answer may go:
the name, and the tag of its answers. What ends a request always comes on the request's own stream.
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
    """Answers to several requests, each with its tag."""

    answers: list[tuple[int, Delta | Final]]


def shared_of(body: dict[str, Any]) -> tuple[str, int] | None:
    """The name and the tag. A name that no gateway has given is of no stream, and does no harm."""
    match body.pop(SHARED, None):
        case [str(name), int(tag)]:
            return name, tag
    return None


def write_shared(answers: Sequence[tuple[int, bytes]]) -> bytes:
    """Each with its tag, as `write_answer` has written it."""
    written: list[Any] = [(tag, msgspec.Raw(answer)) for tag, answer in answers]
    return write_answer(SharedAnswers(written))


read_shared = msgspec.msgpack.Decoder(SharedAnswers | Failure, dec_hook=read_error).decode
