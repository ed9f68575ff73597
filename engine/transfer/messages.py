"""Messages between decode and prefill instances, or between replicas, of which the one that pulls is called decode
instance here: a msgpack array that starts with its kind, and a content of bytes."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from engine.settings.disaggregation import NIXL

T = TypeVar("T")

PROTOCOL = 7  # raised with every change of the messages
HELLO = "hello"  # decode -> prefill: [token, identity, `reach` of its KV_TRANSFER, or "" if it only uses TCP]
# prefill -> decode: [epoch of the process, shared caches of all ranks if it has the same `reach`, layout]
WELCOME = "welcome"
REFUSED = "refused"  # prefill -> decode: [reason]
# decode -> prefill: [job, all token ids but the last, stop token ids, salt, (owner, priority), keys of the blocks]
COMPUTE = "compute"
FIND = "find"  # decode -> prefill, between replicas: [job, keys of the blocks]
FOUND = "found"  # prefill -> decode: [job, indices of keys]  only these blocks are cached and can be pulled
READY = "ready"  # prefill -> decode: [job, indices of keys]  these blocks can be pulled
PULL = "pull"  # decode -> prefill: [job, indices of keys]
BLOCK = "block"  # prefill -> decode: [job, index of the key, checksum], and the block as content
LOCATE = "locate"  # decode -> prefill: [job, indices of keys], in place of PULL if caches are shared
LOCATED = "located"  # prefill -> decode: [job, (index of the key, block, checksum of its digest) for each block]
FAILED = "failed"  # prefill -> decode: [job, reason]  no more blocks will be ready
END = "end"  # decode -> prefill: [job]  its blocks are not needed any more
BEAT = "beat"  # both ways: []

BEAT_S = 0.5
SILENT_S = 2.0  # a prefill instance that has sent nothing for this time is lost
LEASE_S = 4.0  # blocks of a decode instance that has sent nothing for this time are released
CONNECT_WITHIN_S = 2.0
READ_BYTES = 1 << 18  # at a time, so that a slow link does not look like silence
MAX_HEADER_BYTES = 64 << 20
NO_CONTENT = memoryview(b"")
LENGTHS = struct.Struct("<II")  # bytes of the array and of the content


class TransferRefused(Exception):
    """The prefill instance cannot serve this decode instance."""


def pack(kind: str, *fields: Any, content: bytes = b"") -> bytes:
    header = msgpack.packb((kind, *fields))
    return LENGTHS.pack(len(header), len(content)) + header + content


async def read(
    reader: asyncio.StreamReader, silent_s: float, memory: memoryview = NO_CONTENT
) -> tuple[str, Sequence[Any], memoryview]:
    """Return kind, fields and content of the next message. The content is a part of `memory`, which is overwritten.

    Raises TimeoutError if nothing arrives for `silent_s`, EOFError at the end of the connection, and ValueError for a
    message that `pack` has not made."""
    header_len, content_len = LENGTHS.unpack(await _read(reader, LENGTHS.size, silent_s))
    if header_len > MAX_HEADER_BYTES or content_len > len(memory):
        raise ValueError(f"a message of {header_len} and {content_len} bytes is too long")
    try:
        message = msgpack.unpackb(await _read(reader, header_len, silent_s), use_list=False)
        kind, *fields = message
    except (TypeError, msgpack.UnpackException, msgpack.ExtraData) as error:
        raise ValueError(f"the message is no msgpack array: {error}") from None
    content = memory[:content_len]
    await _read_into(reader, content, silent_s)
    return kind, fields, content


async def _read(reader: asyncio.StreamReader, count: int, silent_s: float) -> bytes:
    found = bytearray(count)
    await _read_into(reader, memoryview(found), silent_s)
    return bytes(found)


async def _read_into(reader: asyncio.StreamReader, memory: memoryview, silent_s: float) -> None:
    start = 0
    while start < len(memory):
        part = await within(silent_s, reader.read(min(len(memory) - start, READ_BYTES)))
        if not part:
            raise EOFError("the connection was closed")
        memory[start : start + len(part)] = part
        start += len(part)


async def within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`. Raises TimeoutError."""
    try:
        return await asyncio.wait_for(awaitable, timeout_s)
    except asyncio.TimeoutError:  # another class before Python 3.11
        raise TimeoutError(f"it was silent for {timeout_s:g} s") from None


def reach(transfer: str) -> str:
    """Return a text that is equal on instances that can share their caches by a transfer other than TCP."""
    return NIXL if transfer == NIXL else host_id()


def host_id() -> str:
    """Return a text that differs between hosts, or an empty text if this host has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def checksum(epoch: bytes, key: bytes, content: bytes | memoryview) -> int:
    """Return the checksum of a block, or of its digest, which also covers its key and the process that has computed
    it."""
    return zlib.crc32(content, zlib.crc32(epoch + key))


def difference(ours: Mapping[str, str], theirs: Any) -> str:
    """Return a sentence about the first item in which two identities differ, or an empty text."""
    if not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        return "it is another version of this server"
    for name, value in ours.items():
        if theirs[name] != value:
            return f"{name} of the prefill instance is {value}, that of the decode instance is {theirs[name]}"
    return ""
