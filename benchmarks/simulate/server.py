"""A simulated server: the real engine loop with an executor that only knows durations, and the answers to polls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from benchmarks.simulate.step_time import ModelledExecutor, StepTimes
from benchmarks.simulate.traffic import answer_token, token_ids
from engine.core.loop import EngineLoop
from engine.core.types import Request, Sampling
from engine.core.updates import Update
from engine.errors import RequestError
from engine.settings.config import Config
from engine.wire import Delta, Final, ModelState, Usage
from gateway.backend import ModelLost, ModelUnreachable
from gateway.replicas.replica_set import ReplicaSet
from gateway.replicas.served import read_poll, write


class SimulatedServer:
    """Server of a model on the clock of the running event loop. As in `engine.link.server`, requests are read between
    two steps. `replicas` is its own front end, or records for the others what it computes."""

    def __init__(self, name: str, times: StepTimes, num_blocks: int, config: Config):
        self.name = name
        self._times, self._num_blocks, self._config = times, num_blocks, config
        self.num_steps = self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.num_kills = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        """Start with an empty cache."""
        self.is_up, self._is_awake = True, False
        identity = f"{self.name}.{self.num_kills}".encode()
        self.replicas = ReplicaSet(self, self._config, identity)  # type: ignore[arg-type]  # it has what a router calls
        self._executor = ModelledExecutor(self._times, answer_token)
        self._loop = EngineLoop(self._executor, self._num_blocks, self._config)  # type: ignore[arg-type]
        self._inbox: deque[Request | str] = deque()  # requests, and ids of those that are dropped
        self._open: dict[str, asyncio.Queue[Update | Exception]] = {}

    def kill(self) -> None:
        """End all requests as a closed connection does."""
        self.collect_counters()
        self.is_up, self.num_kills = False, self.num_kills + 1
        for queue in self._open.values():
            queue.put_nowait(ModelLost(f"{self.name} was killed"))
        self._open = {}

    def collect_counters(self) -> None:
        """Add the counters of the engine since its start to those of this server."""
        if self.is_up:
            stats = self._loop.stats()
            self.num_steps += int(stats["num_steps"])
            self.num_prompt_tokens += int(stats["num_prompt_tokens"])
            self.num_cached_tokens += int(stats["num_cached_tokens"])
            self.num_generated_tokens += int(stats["num_generated_tokens"])

    async def poll(self, request: bytes, timeout_s: float) -> bytes:
        """Return the answer to a poll, as the gateway of a replica does."""
        if not self.is_up:
            await asyncio.sleep(0)
            raise ConnectionError("connection refused")
        return write(await self.replicas.summary(read_poll(request)))

    async def probe(self, with_metrics: bool = False) -> ModelState:
        """Return the state of the model, see `gateway.backend.Backend`."""
        return ModelState(
            ready=self.is_up,
            num_open=len(self._open),
            num_waiting_tokens=self._loop.scheduler.waiting.num_tokens,
            model_hash="m",
        )

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        """Yield the answer to a request, see `gateway.backend.Backend`."""
        if not self.is_up:
            raise ModelUnreachable(f"{self.name} is down")
        request_id, prompt, [known] = body["req_id"], token_ids(body["messages"]), body.get("answer_ids", [[]])
        sampling = Sampling(body["max_dec_len"], min_new_tokens=body["max_dec_len"], temperature=0)
        request = Request(request_id, prompt + known, len(prompt), sampling)
        queue = self._open[request_id] = asyncio.Queue()
        self._inbox.append(request)
        self._wake()
        sent = len(known)
        try:
            while True:
                update = await queue.get()
                if isinstance(update, Exception):
                    raise update
                usage = Usage(len(prompt), sent + len(update.token_ids), request.num_cached)
                fields = (request_id, "", list(update.token_ids), sent, usage, 0)
                if update.finish_reason:
                    yield Final(*fields, finish_reason=update.finish_reason, tokens_all="", tokens_all_ids=[])
                    return
                yield Delta(*fields)
                sent += len(update.token_ids)
        finally:
            if self._open.get(request_id) is queue:
                del self._open[request_id]
                self._inbox.append(request_id)
                self._wake()

    async def close(self) -> None:
        """Do nothing: `kill` ends the requests."""

    def _wake(self) -> None:
        if self.is_up and not self._is_awake:
            self._is_awake = True
            clock = asyncio.get_running_loop()
            clock.call_soon(self._turn, self._loop)

    def _turn(self, loop: EngineLoop) -> None:
        """Read the requests that have arrived and make a step. It ends when the executor's clock says so."""
        if loop is not self._loop or not self.is_up:
            return  # it was killed
        clock = asyncio.get_running_loop()
        self._executor.now = clock.time()
        while self._inbox:
            self._read(self._inbox.popleft())
        if loop.is_idle:
            self._is_awake = False
            return
        updates = loop.step()
        clock.call_at(self._executor.now, self._send, loop, updates)

    def _send(self, loop: EngineLoop, updates: list[Update]) -> None:
        if loop is self._loop and self.is_up:
            for update in updates:
                request_id = update.request.request_id
                if queue := self._open.get(request_id):
                    queue.put_nowait(update)
                    if update.finish_reason:
                        del self._open[request_id]
            self._turn(loop)

    def _read(self, message: Request | str) -> None:
        if isinstance(message, str):
            self._loop.drop(message)
            return
        try:
            self._loop.add(message)
        except RequestError as error:
            self._open.pop(message.request_id).put_nowait(error)
