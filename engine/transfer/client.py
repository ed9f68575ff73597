"""Decode side of the transfer: asks prefill instances for prompts and writes the blocks that they have finished."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.address import in_url
from engine.core.remote_prefill import Pull
from engine.transfer import messages

log = logging.getLogger(__name__)

RETRY_S = 1.0
READ_LIMIT = 1 << 22


@dataclass(frozen=True)
class PulledBlocks:
    """Destination of pulled blocks. `write_block` is called in the thread of the transfer."""

    write_block: Callable[[int, bytes | memoryview], None]
    block_bytes: int  # of all ranks
    identity: Mapping[str, str]  # see `ServedBlocks`


class PrefillClient:
    """Connections to prefill instances, in a thread of their own (see `BlockSource`)."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        pulled: PulledBlocks,
        token: str,
        tls: Callable[[str], ssl.SSLContext | None] = lambda host: None,
    ):
        self.pulled, self.token, self.tls = pulled, token, tls
        self._has_news = threading.Event()
        self._instance_of: dict[Pull, _Instance] = {}  # of open pulls; used by the engine's thread only
        self._loop = asyncio.new_event_loop()
        self.instances = [_Instance(self, address) for address in addresses]
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        return any(each.is_connected for each in self.instances)

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
        """Wait until every instance has answered, at most `within_s`. Return the reasons of those that refuse."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not all(each.has_answered for each in self.instances):
            time.sleep(0.01)
        return [f"the prefill instance {each.name} refuses: {each.refusal}" for each in self.instances if each.refusal]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for instance in self.instances:
            instance.task = self._loop.create_task(instance.run())
        self._loop.run_forever()


class _Instance:
    """One prefill instance. All but the attributes are used in the thread of the transfer only."""

    def __init__(self, client: PrefillClient, address: tuple[str, int]):
        self.name = f"{in_url(address[0])}:{address[1]}"
        self.is_connected = self.has_answered = False
        self.refusal = ""
        self.task: asyncio.Task[None] | None = None
        self._client, self._address = client, address
        self._numbers = itertools.count()
        self._pulls: dict[int, Pull] = {}
        self._num_missing: dict[int, int] = {}  # blocks by the number of the pull
        self._epoch = b""
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Stay connected, until cancelled."""
        reason = ""
        while True:
            try:
                await self._connect_and_read()
            except Exception as error:  # whatever it is, prompts are computed here until the next attempt
                problem = str(error) or type(error).__name__
                if problem != reason:
                    log.warning("prefill instance %s: %s; prompts are computed here", self.name, problem)
                reason = problem
            self._lose()
            await asyncio.sleep(RETRY_S)

    def begin(self, pull: Pull) -> None:
        if not self._writer or not self.is_connected:
            self._finish(pull)
            return
        number, request = next(self._numbers), pull.request
        self._pulls[number], self._num_missing[number] = pull, len(pull.keys)
        position = (request.owner, request.priority)
        self._send(messages.COMPUTE, number, request.token_ids, request.salt, position, pull.keys)

    def end(self, pull: Pull) -> None:
        for number in [number for number, each in self._pulls.items() if each is pull]:
            self._send(messages.END, number)
            del self._pulls[number], self._num_missing[number]

    async def _connect_and_read(self) -> None:
        host, port = self._address
        tls = self._client.tls(host)
        opening = asyncio.open_connection(host, port, ssl=tls, limit=READ_LIMIT)
        reader, self._writer = await messages.within(messages.CONNECT_WITHIN_S, opening)
        self._send(messages.HELLO, self._client.token, self._client.pulled.identity)
        kind, fields, _ = await messages.read(reader, messages.SILENT_S)
        self.refusal = fields[0] if kind == messages.REFUSED else ""
        self.has_answered = True
        if kind != messages.WELCOME:
            raise messages.TransferRefused(self.refusal or "it is no prefill instance")
        [self._epoch] = fields
        self.is_connected = True
        log.info("prefill instance %s is connected", self.name)
        beats = asyncio.create_task(self._beat())
        memory = memoryview(bytearray(self._client.pulled.block_bytes))
        try:
            while True:
                self._receive(*await messages.read(reader, messages.SILENT_S, memory))
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(messages.BEAT_S)
            self._send(messages.BEAT)

    def _receive(self, kind: str, fields: Sequence[Any], content: memoryview) -> None:
        if kind == messages.BEAT:
            return
        number, *rest = fields
        if number not in self._pulls:  # it has ended here
            return
        if kind == messages.READY:
            self._send(messages.PULL, number, *rest)
        elif kind == messages.BLOCK:
            index, digest = rest
            self._write(number, index, digest, content)
        elif kind == messages.FAILED:
            log.warning("prefill instance %s: %s", self.name, rest[0])
            self._finish(self._pulls[number])

    def _write(self, number: int, index: int, digest: int, content: memoryview) -> None:
        pull, pulled = self._pulls[number], self._client.pulled
        key, is_whole = pull.keys[index], len(content) == pulled.block_bytes
        if not is_whole or digest != messages.checksum(self._epoch, key, content):
            log.warning("prefill instance %s: a block has a wrong checksum", self.name)
            self._finish(pull)
            return
        with pull.lock:
            if not pull.is_open:
                return
            pulled.write_block(pull.block_ids[index], content)
        pull.arrived.append(index)
        self._num_missing[number] -= 1
        if not self._num_missing[number]:
            pull.has_ended = True
        self._client.notify()

    def _send(self, *message: Any) -> None:
        if self._writer:
            self._writer.write(messages.pack(*message))

    def _finish(self, pull: Pull) -> None:
        """Note that no more blocks will arrive."""
        pull.has_ended = True
        self._client.notify()

    def _lose(self) -> None:
        self.is_connected = False
        if self._writer:
            self._writer.transport.abort()
            self._writer = None
        for pull in self._pulls.values():
            self._finish(pull)
        self._pulls.clear()
        self._num_missing.clear()
