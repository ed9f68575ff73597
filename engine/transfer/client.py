"""Decode side of the transfer: asks prefill instances for prompts and writes the blocks that they have finished, or
asks other replicas for what they have cached."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine.address import in_url
from engine.core.remote_prefill import Pull
from engine.executors.block_access import STAGED, DeviceBlocks, FetchedBlocks, SharedCaches
from engine.settings.disaggregation import CUDA_IPC, NIXL, TCP
from engine.settings.replicas import addresses_of
from engine.transfer import messages
from engine.transfer.layout import BlockLayout
from engine.transfer.staging import Staging

log = logging.getLogger(__name__)

RETRY_S = 1.0
READ_LIMIT = 1 << 22
NO_PREFILL_INSTANCE = "no prefill instance listens there, on its ENGINE_WORKER_QUEUE_PORT"


@dataclass(frozen=True)
class PulledBlocks:
    """Destination of pulled blocks. Functions are called in the thread of the transfer."""

    write_block: Callable[[int, bytes | memoryview], None]
    block_bytes: int  # of all ranks
    identity: Mapping[str, str]  # see `ServedBlocks`
    device: DeviceBlocks | None = None  # copies blocks from other instances
    needs_device: bool = False  # refuse prefill instances whose blocks `device` cannot copy
    layout: BlockLayout | None = None  # of the blocks here; only if prefill instances may have another number of ranks
    transfer: str = CUDA_IPC  # how `device` gets blocks; NIXL: it has `FetchedBlocks`


class PrefillClient:
    """Connections to prefill instances, in a thread of their own (see `BlockSource`)."""

    kind = "prefill instance"  # in the log
    only_finds = False  # ask for cached blocks only, and connect when they are needed

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        pulled: PulledBlocks,
        token: str,
        tls: Callable[[str], ssl.SSLContext | None] = lambda host: None,
    ):
        self.pulled, self.token, self.tls = pulled, token, tls
        self.staging = Staging(cast(FetchedBlocks, pulled.device)) if pulled.transfer == NIXL else None
        self._has_news = threading.Event()
        self._instance_of: dict[Pull, _Instance] = {}  # of open pulls; used by the engine's thread only
        self._loop = asyncio.new_event_loop()
        self.instances = [_Instance(self, address, index) for index, address in enumerate(addresses)]
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        return self.num_connected > 0

    @property
    def num_connected(self) -> int:
        return sum(each.is_connected for each in self.instances)

    def begin(self, pull: Pull) -> bool:
        connected = [each for each in self.instances if each.is_connected]
        if not connected:
            return False
        num_tokens = dict.fromkeys(connected, 0)  # of the prompts that it computes for this engine
        for each, instance in self._instance_of.items():
            num_tokens[instance] = num_tokens.get(instance, 0) + len(each.request.token_ids)
        chosen = self._instance_of[pull] = min(connected, key=lambda each: num_tokens[each])
        self._loop.call_soon_threadsafe(chosen.begin, pull)
        return True

    def end(self, pull: Pull) -> None:
        if instance := self._instance_of.pop(pull, None):
            self._loop.call_soon_threadsafe(instance.end, pull)

    def wait(self, timeout_s: float) -> None:
        self._has_news.wait(timeout_s)
        self._has_news.clear()

    def notify(self) -> None:
        """Wake the engine."""
        self._has_news.set()

    def refusals(self, within_s: float) -> list[str]:
        """Wait until every instance has answered, at most `within_s`. Return why some of them cannot be used."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not all(each.has_answered for each in self.instances):
            time.sleep(0.01)
        refused = [each for each in self.instances if each.refusal]
        return [f"the {each.name} cannot be used: {each.refusal}" for each in refused]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for instance in self.instances:
            instance.task = self._loop.create_task(instance.run())
        self._loop.run_forever()


class ReplicaClient(PrefillClient):
    """Connections to other replicas, which are opened when a request names one. They send what they have cached."""

    kind, only_finds = "replica", True

    def __init__(
        self, pulled: PulledBlocks, token: str, tls: Callable[[str], ssl.SSLContext | None] = lambda host: None
    ):
        super().__init__((), pulled, token, tls)
        self._by_address: dict[str, _Instance] = {}

    def begin(self, pull: Pull) -> bool:
        address = pull.request.cached_at
        if address not in self._by_address:
            [host_and_port] = addresses_of("cached_at", address, "the REPLICA_CACHE_PORT")
            self._by_address[address] = _Instance(self, host_and_port, len(self._by_address))
        instance = self._instance_of[pull] = self._by_address[address]
        self._loop.call_soon_threadsafe(instance.begin, pull)
        return True


class _Instance:
    """One prefill instance. All but the attributes are used in the thread of the transfer only."""

    def __init__(self, client: PrefillClient, address: tuple[str, int], index: int):
        self.name = f"{client.kind} {in_url(address[0])}:{address[1]}"
        self.is_connected = self.has_answered = False
        self.refusal = ""
        self.task: asyncio.Task[None] | None = None
        self._client, self._address, self._index = client, address, index
        self._job_ids = itertools.count()
        self._pulls: dict[int, Pull] = {}
        self._queued: list[Pull] = []  # until it is connected
        self._num_missing: dict[int, int] = {}  # blocks by job
        self._epoch = b""
        self._is_shared = False  # its caches are open here
        self._layout: BlockLayout | None = None  # of its blocks
        self._writer: asyncio.StreamWriter | None = None
        self._problem = ""  # the one that was logged last
        self._fetches: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Stay connected, until cancelled."""
        while True:
            await self._run_once()
            await asyncio.sleep(RETRY_S)

    async def _run_once(self) -> None:
        try:
            await self._connect_and_read()
        except Exception as error:  # whatever it is, prompts are computed here until the next attempt
            problem = _text(error)
            if problem != self._problem:
                then = "" if self.refusal else "; prompts are computed here"
                log.warning("%s: %s%s", self.name, problem, then)
            self._problem = problem
        self._lose()

    def begin(self, pull: Pull) -> None:
        if self.is_connected:
            self._ask(pull)
        elif self._client.only_finds:
            self._queued.append(pull)
            if self.task is None or self.task.done():
                self.task = asyncio.create_task(self._run_once())
        else:
            self._finish(pull)

    def _ask(self, pull: Pull) -> None:
        job_id, request = next(self._job_ids), pull.request
        self._pulls[job_id], self._num_missing[job_id] = pull, len(pull.keys)
        pull.asked_at = time.monotonic()
        if self._client.only_finds:
            self._send(messages.FIND, job_id, pull.keys)
            return
        position = (request.owner, request.priority)
        token_ids = request.token_ids[: request.max_cached_tokens]
        stop_ids = request.sampling.stop_token_ids
        self._send(messages.COMPUTE, job_id, token_ids, stop_ids, request.salt, position, pull.keys)

    def end(self, pull: Pull) -> None:
        for job_id in [job_id for job_id, each in self._pulls.items() if each is pull]:
            self._send(messages.END, job_id)
            del self._pulls[job_id], self._num_missing[job_id]

    async def _connect_and_read(self) -> None:
        host, port = self._address
        tls, pulled = self._client.tls(host), self._client.pulled
        opening = asyncio.open_connection(host, port, ssl=tls, limit=READ_LIMIT)
        try:
            reader, self._writer = await messages.within(messages.CONNECT_WITHIN_S, opening)
            reach = messages.reach(pulled.transfer) if pulled.device else ""
            self._send(messages.HELLO, self._client.token, pulled.identity, reach)
            kind, fields, _ = await messages.read(reader, messages.SILENT_S)
        except (EOFError, ConnectionResetError, ConnectionAbortedError):  # it may be about to end
            raise ConnectionError(f"it has closed the connection without an answer; {_about_tls(tls)}") from None
        except ssl.SSLCertVerificationError as error:
            kind, fields = messages.REFUSED, (f"its certificate is not accepted: {error.verify_message}",)
        except (ssl.SSLError, ValueError):
            kind, fields = messages.REFUSED, (f"{NO_PREFILL_INSTANCE}; {_about_tls(tls)}",)
        self.refusal = fields[0] if kind == messages.REFUSED else ""
        if kind == messages.WELCOME:
            self._epoch, shared, layout = fields
            self.refusal = self._agree(layout) or self._open(shared)
        self.has_answered = True
        if kind != messages.WELCOME or self.refusal:
            raise messages.TransferRefused(self.refusal or NO_PREFILL_INSTANCE)
        self.is_connected = True
        log.info("%s is connected, KV_TRANSFER=%s", self.name, pulled.transfer if self._is_shared else TCP)
        for pull in [each for each in self._queued if each.is_open]:
            self._ask(pull)
        self._queued.clear()
        beats = asyncio.create_task(self._beat())
        memory = memoryview(bytearray(self._block_bytes))
        try:
            while True:
                self._receive(*await messages.read(reader, messages.SILENT_S, memory))
        finally:
            beats.cancel()

    def _agree(self, layout: Sequence[Any] | None) -> str:
        """Note the layout of its blocks. Return why they cannot be used here, or an empty text."""
        ours = self._client.pulled.layout
        self._layout = BlockLayout(*layout) if layout else ours
        if (ours is None) != (layout is None):
            return "its blocks have another layout"
        if ours and self._layout and ours.num_ranks != self._layout.num_ranks:
            log.info("%s has %d ranks, here are %d", self.name, self._layout.num_ranks, ours.num_ranks)
        return ours.difference(self._layout) if ours and self._layout else ""

    @property
    def _block_bytes(self) -> int:
        return self._layout.block_bytes if self._layout else self._client.pulled.block_bytes

    def _open(self, shared: Sequence[SharedCaches]) -> str:
        """Open the caches of the instance. Return why it must be refused, or an empty text."""
        pulled, reason = self._client.pulled, "it is on another host or does not share its caches"
        if pulled.transfer == NIXL:
            reason = "the prefill instance has another KV_TRANSFER"
        if pulled.device is None:
            return ""
        if self._layout != pulled.layout:
            shared, reason = (), "it has another number of ranks"
        try:
            if shared:
                pulled.device.open(self._index, shared)
                self._is_shared = True
                return ""
        except (OSError, ValueError) as error:
            reason = f"its caches cannot be opened: {error}"
        if pulled.needs_device:
            return f"KV_TRANSFER is {pulled.transfer}, but {reason}"
        log.info("%s: blocks come over TCP, %s", self.name, reason)
        return ""

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(messages.BEAT_S)
            self._send(messages.BEAT)

    def _receive(self, kind: str, fields: Sequence[Any], content: memoryview) -> None:
        if kind == messages.BEAT:
            return
        job_id, *rest = fields
        if job_id not in self._pulls:  # it has ended here
            return
        if kind == messages.READY:
            self._request(job_id, *rest)
        elif kind == messages.FOUND:
            self._find(job_id, *rest)
        elif kind == messages.LOCATED:
            self._locate(job_id, *rest)
        elif kind == messages.BLOCK:
            index, digest = rest
            self._write(job_id, index, digest, content)
        elif kind == messages.FAILED:
            log.warning("%s: %s", self.name, rest[0])
            self._finish(self._pulls[job_id])

    def _write(self, job_id: int, index: int, digest: int, content: memoryview) -> None:
        pull, pulled = self._pulls[job_id], self._client.pulled
        key, is_whole = pull.keys[index], len(content) == self._block_bytes
        if not is_whole or digest != messages.checksum(self._epoch, key, content):
            self._refuse_block(pull)
            return
        own = pulled.layout.convert(content, self._layout) if pulled.layout and self._layout else content
        with pull.lock:
            if not pull.is_open:
                return
            pulled.write_block(pull.block_ids[index], own)
        self._arrive(job_id, [index])

    def _find(self, job_id: int, indices: Sequence[int]) -> None:
        pull = self._pulls[job_id]
        pull.num_found = self._num_missing[job_id] = len(indices)
        if indices:
            self._request(job_id, indices)
        else:
            self._finish(pull)

    def _request(self, job_id: int, indices: Sequence[int]) -> None:
        if not self._is_shared:
            self._send(messages.PULL, job_id, indices)
            return
        staging = self._client.staging
        size = staging.max_blocks if staging else len(indices)
        for start in range(0, len(indices), size):
            self._send(messages.LOCATE, job_id, indices[start : start + size])

    def _locate(self, job_id: int, places: Sequence[tuple[int, int, int]]) -> None:
        if staging := self._client.staging:
            task = asyncio.create_task(self._fetch(staging, job_id, places))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)
        elif self._is_shared:
            self._copy(job_id, self._index, places)
        else:
            raise ValueError("blocks were located, but no caches are shared")

    async def _fetch(self, staging: Staging, job_id: int, places: Sequence[tuple[int, int, int]]) -> None:
        """Read blocks into the staging area and copy them from there. If that fails, request them over TCP."""
        try:
            async with staging.fetch(self._index, [block for _, block, _ in places]) as slots:
                if job_id in self._pulls:
                    staged = [(index, slot, digest) for (index, _, digest), slot in zip(places, slots, strict=True)]
                    self._copy(job_id, STAGED, staged)
                return
        except TimeoutError:
            log.info("%s: the staging area is full; blocks come over TCP", self.name)
        except OSError as error:
            if self._is_shared and job_id in self._pulls:  # otherwise it may have been connected again meanwhile
                log.warning("%s: blocks come over TCP from now on: %s", self.name, error)
                self._close()
        if job_id in self._pulls:
            self._send(messages.PULL, job_id, [index for index, _, _ in places])

    def _copy(self, job_id: int, peer: int, places: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from the caches of the instance, which may have ended their lease: then they may be overwritten
        meanwhile, which changes their digest."""
        pull, device = self._pulls[job_id], self._client.pulled.device
        assert device is not None
        with pull.lock:
            if not pull.is_open:
                return
            digests = device.copy(peer, [(block, pull.block_ids[index]) for index, block, _ in places])
        for (index, _, expected), digest in zip(places, digests, strict=True):
            if expected != messages.checksum(self._epoch, pull.keys[index], digest):
                self._refuse_block(pull)
                return
        self._arrive(job_id, [index for index, _, _ in places])

    def _refuse_block(self, pull: Pull) -> None:
        log.warning("%s: a block has a wrong checksum", self.name)
        self._finish(pull)

    def _arrive(self, job_id: int, indices: Sequence[int]) -> None:
        """Let the engine publish blocks that were written."""
        pull = self._pulls[job_id]
        pull.arrived_at = time.monotonic()
        pull.arrived += indices
        self._num_missing[job_id] -= len(indices)
        if not self._num_missing[job_id]:
            pull.has_ended = True
        self._client.notify()

    def _send(self, *message: Any) -> None:
        if self._writer:
            self._writer.write(messages.pack(*message))

    def _finish(self, pull: Pull) -> None:
        """Note that no more blocks will arrive."""
        pull.has_ended = True
        self._client.notify()

    def _close(self) -> None:
        """Close the caches of the instance."""
        if self._is_shared and self._client.pulled.device:
            self._is_shared = False
            self._client.pulled.device.close(self._index)

    def _lose(self) -> None:
        self.is_connected = False
        self._close()
        if self._writer:
            self._writer.transport.abort()
            self._writer = None
        for pull in (*self._pulls.values(), *self._queued):
            self._finish(pull)
        self._pulls.clear()
        self._queued.clear()
        self._num_missing.clear()


def _about_tls(tls: ssl.SSLContext | None) -> str:
    return f"TLS_CERT_FILE, which is {'set' if tls else 'not set'} here, must be set on both instances or on neither"


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and not isinstance(error, (ssl.SSLError, socket.gaierror)):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
