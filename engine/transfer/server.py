"""Prefill side of the transfer: takes prompts from decode instances and sends them the blocks that they pull. Other
replicas pull blocks that are cached."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.prefill_jobs import PrefillJob, PrefillJobs, prefill_request
from engine.core.types import Request
from engine.executors.block_access import SharedCaches
from engine.settings.disaggregation import CUDA_IPC
from engine.transfer import messages
from engine.transfer.layout import BlockLayout

log = logging.getLogger(__name__)

Digests = Callable[[Sequence[int]], list[bytes]]
MAX_JOBS = 4096  # of one connection
READ_LIMIT = 1 << 20
WRITE_AHEAD_BYTES = 4 << 20  # so that the link is busy while the next block is prepared


@dataclass(frozen=True)
class ServedBlocks:
    """Blocks that a prefill instance serves. Functions are called in the thread of the transfer."""

    jobs: PrefillJobs
    read_block: Callable[[int], bytes]
    identity: Mapping[str, str]  # what decode instances must have in common with it
    vocab_size: int
    max_len: int  # tokens of a prompt
    digests: Digests | None = None  # of blocks that decode instances copy from GPUs
    shared: Sequence[SharedCaches] = ()  # of each rank, if there are `digests`
    layout: BlockLayout | None = None  # only if decode instances may have another number of ranks
    transfer: str = CUDA_IPC  # by which blocks are `shared`
    peer: str = "a decode instance"  # in the log


class PrefillServer:
    """Listens for decode instances, in a thread of its own. Raises OSError if it cannot listen."""

    def __init__(self, address: tuple[str, int], served: ServedBlocks, token: str, tls: ssl.SSLContext | None = None):
        self.epoch = secrets.token_bytes(16)
        self.served, self.token = served, token
        self.names = map("prefill-{}".format, itertools.count())
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listener = socket.create_server(address, family=family)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(listener, tls)), name="transfer")
        self._thread.daemon = True
        self._thread.start()

    async def _run(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, ssl=tls, limit=READ_LIMIT)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._welcome(reader, writer)
            await _Connection(self, reader, writer).serve()
        except (OSError, EOFError, TimeoutError) as error:
            log.info("%s has gone: %s", self.served.peer, error or "it was silent")
        except (ValueError, messages.TransferRefused) as error:
            log.warning("%s was refused: %s", self.served.peer, error)
        finally:
            writer.transport.abort()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first message. Raises TransferRefused with the reason, which the other side gets as well."""
        kind, fields, _ = await messages.read(reader, messages.LEASE_S)
        if kind != messages.HELLO or len(fields) < 2 or not isinstance(fields[0], str):
            raise ValueError("the first message is no hello")
        token, identity, reach = (*fields, "")[:3]
        reason = messages.difference(self.served.identity, identity)
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            reason = "API_KEY and API_KEYS of the prefill instance and the decode instance differ"
        shared = self.served.shared if reach and reach == messages.reach(self.served.transfer) else ()
        welcome = messages.WELCOME, self.epoch, shared, self.served.layout
        writer.write(messages.pack(*((messages.REFUSED, reason) if reason else welcome)))
        await writer.drain()
        if reason:
            raise messages.TransferRefused(reason)


class _Connection:
    """One decode instance. Its jobs end when it ends or is silent, which releases their blocks."""

    def __init__(self, server: PrefillServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._served, self._epoch, self._names = server.served, server.epoch, server.names
        self._reader, self._writer = reader, writer
        self._jobs: dict[int, PrefillJob] = {}  # by the ids of the decode instance
        self._job_id_of: dict[str, int] = {}
        writer.transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self._outbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]
        try:
            await next(asyncio.as_completed(tasks))  # neither ends but by an error
        finally:
            self._writer.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # a cancelled task may still read a message
            for job in self._jobs.values():
                self._served.jobs.end(job)

    def ready(self, job: PrefillJob, indices: Sequence[int]) -> None:
        kind = messages.READY if job.request else messages.FOUND
        self._post(kind, self._job_id_of.get(job.name), indices)

    def failed(self, job: PrefillJob, reason: str) -> None:
        self._post(messages.FAILED, self._job_id_of.get(job.name), reason)

    def _post(self, *message: Any) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    async def _receive(self) -> None:
        while True:
            kind, fields, _ = await messages.read(self._reader, messages.LEASE_S)
            if kind == messages.COMPUTE:
                self._compute(*fields)
            elif kind == messages.FIND:
                job_id, keys = fields
                self._begin(job_id, next(self._names), None, keys)
            elif kind == messages.PULL:
                job_id, indices = fields
                for index in indices:
                    self._outbox.put_nowait((messages.PULL, job_id, index))
            elif kind == messages.LOCATE:
                self._outbox.put_nowait((messages.LOCATE, *fields))
            elif kind == messages.END and (job := self._jobs.pop(fields[0], None)):
                del self._job_id_of[job.name]
                self._served.jobs.end(job)

    def _compute(self, *fields: Any) -> None:
        """Begin to compute a prompt. Raises ValueError for values that the engine must not get."""
        job_id, token_ids, stop_token_ids, salt, queue_position, keys = fields
        are_ids = 0 < len(token_ids) <= self._served.max_len and set(map(type, token_ids)) == {int}
        if not (are_ids and min(token_ids) >= 0 and max(token_ids) < self._served.vocab_size):
            raise ValueError("a message with a wrong prompt")
        if not (isinstance(stop_token_ids, tuple) and set(map(type, stop_token_ids)) <= {int}):
            raise ValueError("a message with wrong stop tokens")
        if not (tuple(map(type, queue_position)) == (str, int) and isinstance(salt, str)):
            raise ValueError("a message with a wrong queue position")
        name = next(self._names)
        self._begin(job_id, name, prefill_request(name, token_ids, salt, queue_position, stop_token_ids), keys)

    def _begin(self, job_id: Any, name: str, request: Request | None, keys: Any) -> None:
        """Begin a job. Raises ValueError for values that the engine must not get."""
        if not (isinstance(job_id, int) and job_id not in self._jobs and len(self._jobs) < MAX_JOBS):
            raise ValueError("a message with a wrong job")
        if not (isinstance(keys, tuple) and keys and set(map(type, keys)) == {bytes} and len(set(keys)) == len(keys)):
            raise ValueError("a message with wrong keys")
        job = PrefillJob(name, request, keys, self)
        self._jobs[job_id], self._job_id_of[name] = job, job_id
        self._served.jobs.begin(job)

    async def _send(self) -> None:
        beats = self._loop.create_task(self._beat())
        answers: Mapping[str, Callable[..., bytes]] = {messages.PULL: self._block, messages.LOCATE: self._places}
        try:
            while True:
                kind, *fields = await self._outbox.get()
                answer = answers.get(kind)
                self._writer.write(answer(*fields) if answer else messages.pack(kind, *fields))
                await messages.within(messages.LEASE_S, self._writer.drain())
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(messages.BEAT_S)
            self._outbox.put_nowait((messages.BEAT,))

    def _block(self, job_id: int, index: int) -> bytes:
        """Return the message with a block, or nothing if its job has ended."""
        job = self._jobs.get(job_id)
        block = job.block_ids.get(index) if job else None
        if job is None or block is None:
            return b""
        content = self._served.read_block(block)
        if not job.is_leased:  # the block may have been overwritten while it was read
            return b""
        digest = messages.checksum(self._epoch, job.keys[index], content)
        return messages.pack(messages.BLOCK, job_id, index, digest, content=content)

    def _places(self, job_id: int, indices: Sequence[int]) -> bytes:
        """Return the message with the places of blocks, or nothing if their job has ended."""
        job, digests_of = self._jobs.get(job_id), self._served.digests
        found = [(index, job.block_ids[index]) for index in indices if index in job.block_ids] if job else []
        if job is None or digests_of is None or not found:
            return b""
        digests = digests_of([block for _, block in found])
        if not job.is_leased:  # the blocks may have been overwritten while they were read
            return b""
        places = [
            (index, block, messages.checksum(self._epoch, job.keys[index], digest))
            for (index, block), digest in zip(found, digests, strict=True)
        ]
        return messages.pack(messages.LOCATED, job_id, places)
