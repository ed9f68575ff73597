"""Servers of `benchmarks.replicas` that can be killed, and clients that resume their answers at another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.network import Network
from benchmarks.server import Server
from server_scripts.run_dir import children_of

GIVE_UP_S = 60.0
DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"
FAMILIES = (
    "llm_prompt_tokens_total",
    "llm_cached_prompt_tokens_total",
    "llm_generated_tokens_total",
    "llm_replica_lost_requests_total",
)


class Counters(NamedTuple):
    """Sums of the metrics in FAMILIES."""

    num_prompt_tokens: float
    num_cached_tokens: float
    num_generated_tokens: float
    num_lost: float

    @property
    def num_computed(self) -> float:
        """Return the number of tokens of prompts and answers that were computed."""
        return self.num_prompt_tokens - self.num_cached_tokens + self.num_generated_tokens


class Machine(Server):
    """A server with an address of its own, which can be killed as by a loss of power."""

    def __init__(self, folder: Path, network: Network, number: int, **more: str):
        self.network, self.number, self.ip = network, number, network.address(number)
        settings = {"SERVICE_HOST": self.ip, "CPU_THREADS": "1", "MODEL_DIR": str(DEMO_MODEL), "DRAIN_DELAY": "0"}
        super().__init__(folder / str(number), {**settings, "DRAIN_TIMEOUT": "0", "START_TIMEOUT": "60", **more})
        self.is_up = False

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.ports['SERVICE_HTTP_PORT']}"

    def run(self, name: str, *arguments: str) -> None:
        command = [*self.network.enter(self.number), sys.executable, "-m", f"server_scripts.{name}", *arguments]
        subprocess.run(command, env=self.env, check=True, stdout=sys.stderr)

    def start(self) -> None:
        for attempt in range(5):  # a start may fail on a machine that is so busy
            try:
                self.run("start")
                self.is_up = True
                return
            except subprocess.CalledProcessError:
                if attempt == 4:
                    raise

    def stop(self) -> None:
        self.run("stop", "10")

    async def counters(self, session: aiohttp.ClientSession) -> Counters:
        """Return what the server has computed since its start, or this front end has lost."""
        async with session.get(f"{self.url}/metrics") as response:
            page = await response.text()
        sums = dict.fromkeys(FAMILIES, 0.0)
        for name, value in re.findall(r"^(\w+)(?:{.*})? (\S+)$", page, re.MULTILINE):
            if name in sums:
                sums[name] += float(value)
        return Counters(*sums.values())

    def processor_s(self) -> float:
        """Return the processor time of all processes of the server since their start."""
        state = self.run_dir.read_state()
        assert state
        pids, num_ticks = [state.supervisor.pid], 0
        for pid in pids:
            pids += children_of(pid)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            num_ticks += int(fields[11]) + int(fields[12])
        return num_ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.is_up = False
        state = self.run_dir.read_state()
        assert state
        for process in (state.supervisor, *state.processes):  # the supervisor first, because it restarts the others
            with contextlib.suppress(ProcessLookupError):
                process.kill()


Choices = list[list[tuple[int, Any]]]  # tokens of each choice with their log-probabilities


class Clients:
    """Clients of all front ends, and what they have seen."""

    def __init__(self, session: aiohttp.ClientSession, machines: Sequence[Machine], rng: random.Random):
        self.session, self.machines, self.rng = session, machines, rng
        self.num_right = self.num_resumed = self.num_tokens = 0
        self.lost: list[str] = []
        self.wrong: list[dict[str, Any]] = []
        # Longest pause of each answer in seconds, of those whose client kept its front end and of the others
        self.pauses: list[float] = []
        self.pauses_of_resumed: list[float] = []

    async def ask(self, machine: Machine, body: dict[str, Any]) -> dict[str, Any]:
        """Return the last line of an answer."""
        body = {**body, "stream": True}
        async with self.session.post(f"{machine.url}/v1/chat/completions", json=body) as response:
            lines = [json.loads(line) async for line in response.content]
        assert response.status == 200 and not lines[-1]["error_msg"], lines[-1]
        return dict(lines[-1])

    async def check(self, body: dict[str, Any], expected: Choices) -> None:
        """Ask until the answer is complete, and compare its tokens and their log-probabilities."""
        tokens: Choices = [[] for _ in range(body.get("n", 1))]
        body = {**body, "req_id": uuid.uuid4().hex, "stream": True}
        seen_at = began = time.monotonic()
        pause, is_resumed = 0.0, False
        while True:
            asked = with_position(body, tokens)
            machine = self.rng.choice([each for each in self.machines if each.is_up])
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                async for line in self._lines(machine, asked):
                    now = time.monotonic()
                    pause, seen_at = max(pause, now - seen_at), now
                    if line["error_msg"]:
                        break
                    add(tokens, line)
                    if line["is_end"]:
                        (self.pauses_of_resumed if is_resumed else self.pauses).append(pause)
                        self.num_right += tokens == expected
                        self.num_tokens += sum(map(len, tokens))
                        if tokens != expected:
                            self.wrong.append(body)
                            print(f"wrong: {difference(tokens, expected)}: {asked}", file=sys.stderr)
                        return
            self.num_resumed, is_resumed = self.num_resumed + 1, True
            if time.monotonic() - max(seen_at, began) > GIVE_UP_S:
                self.lost.append(body["req_id"])
                return
            await asyncio.sleep(0.1)

    async def answer(self, machine: Machine, body: dict[str, Any]) -> Choices:
        """Return the choices of an answer that is not interrupted."""
        choices: Choices = [[] for _ in range(body.get("n", 1))]
        async for line in self._lines(machine, {**body, "stream": True}):
            assert not line["error_msg"], line
            add(choices, line)
        return choices

    async def _lines(self, machine: Machine, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=3)  # a front end that is cut off is left
        async with self.session.post(f"{machine.url}/v1/chat/completions", json=body, timeout=timeout) as response:
            async for line in response.content:
                yield json.loads(line)


def add(choices: Choices, line: dict[str, Any]) -> None:
    """Add the tokens of a line, with their log-probabilities, to the choices of an answer."""
    token_ids = line["token_ids"]
    choices[line["index"]] += zip(token_ids, line.get("logprobs") or [None] * len(token_ids), strict=True)


def difference(found: Choices, expected: Choices) -> str:
    """Return where an answer differs from the expected one, with three tokens from there."""
    for index, (own, right) in enumerate(zip(found, expected, strict=True)):
        if own != right:
            at = next((i for i, (one, other) in enumerate(zip(own, right, strict=False)) if one != other), len(own))
            return (
                f"choice {index} has {own[at : at + 3]} at token {at} of {len(own)},"
                f" expected {right[at : at + 3]} of {len(right)}"
            )
    return "nothing"


def with_position(body: dict[str, Any], choices: Choices) -> dict[str, Any]:
    """Return the request for what is missing of an answer."""
    return {**body, "resume_from": [len(each) for each in choices]} if any(choices) else body
