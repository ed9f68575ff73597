"""What the Triton model and the engine process say to each other over ZeroMQ: msgpack arrays, first the kind.

Every message carries the `epoch` it belongs to, "process/connection": a random name made at the start of the engine
process, and one of the connection. So what was meant for a process that has died, or sent over a connection that was
lost, is recognised on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import msgpack

from engine.core.types import Logprobs, Sampling

PING = "ping"  # client -> engine: []                                       expects a pong; also "I am alive"
# client -> engine: [epoch, prompt ids, [[request_id, sampling, answer so far], ...], replay, salt, [owner, priority]]
SUBMIT = "submit"
CANCEL = "cancel"  # client -> engine: [epoch, request_id, whether its answer is complete]
EXPIRE = "expire"  # client -> engine: [epoch, request_id, error kind, text, cause]  refused with this if it still waits
PONG = "pong"  # engine -> client: [epoch, stats]; while it starts the stats are {STARTING: why}
TOKENS = "tokens"  # engine -> client: [epoch, [[request_id, token_ids, logprobs of each, finish_reason], ...]]
STARTING = "starting"
REFUSED = "refused"  # engine -> client: [epoch, request_id, error kind, text, cause]


def endpoint_to(address: str) -> str:
    """For a client of the engine at `address`, tcp://127.0.0.1:PORT. It calls from another address of the loopback:
    while nobody listens, the kernel would sooner or later give it PORT itself to call from. That connects the socket
    with itself, and the port is taken when the engine comes."""
    return address.replace("tcp://", "tcp://127.0.0.2:0;", 1)


def pack(kind: str, *fields: Any) -> bytes:
    return msgpack.packb((kind, *fields))


def unpack(message: bytes) -> tuple[str, list[Any]]:
    """Raises ValueError for what `pack` has not made."""
    content = msgpack.unpackb(message, use_list=False)
    if not isinstance(content, tuple) or not content:
        raise ValueError("the message is no array with a kind")
    kind, *fields = content
    return kind, fields


def pack_sampling(sampling: Sampling) -> tuple[Any, ...]:
    return astuple(sampling)


def unpack_sampling(fields: tuple[Any, ...]) -> Sampling:
    return Sampling(*fields)


def pack_logprobs(logprobs: Sequence[Logprobs] | None) -> list[tuple[Any, ...]] | None:
    return None if logprobs is None else [(each.chosen, each.top) for each in logprobs]


def unpack_logprobs(fields: Sequence[tuple[Any, ...]] | None) -> list[Logprobs] | None:
    return None if fields is None else [Logprobs(*each) for each in fields]
