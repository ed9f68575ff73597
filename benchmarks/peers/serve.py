"""HTTP benchmark of every server: `start_server`, `vllm serve` and `llama-server`, with one client for all of them.

The client uses OpenAI's completions with prompts of token ids, streamed. Tokens are counted by `usage`, because many
tokens of a model with random weights have no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from benchmarks.bench import settings_for
from benchmarks.peers.clock import MAX_REQUESTS, WARM_UP, make_prompts
from benchmarks.peers.rivals import Failed, Rival
from benchmarks.peers.table import Rates
from benchmarks.server import free_ports, running_server

STREAMS, PROMPT_LEN, ANSWER_LEN = (1, 8, 32), 128, 64
READY_WITHIN_S = 300


def ours(graph_dir: Path, seed: int) -> Rates:
    with running_server(settings_for(graph_dir, MAX_REQUESTS)) as server:
        return asyncio.run(drive(server.ports["SERVICE_HTTP_PORT"], "default", seed))


def theirs(rival: Rival, model: Path, seed: int) -> Rates:
    try:
        with a_rival(rival, model) as port:
            return asyncio.run(drive(port, str(model), seed))
    except (AssertionError, aiohttp.ClientError) as error:
        raise Failed(f"{rival.label} over HTTP: {error!r}, see {rival.folder}/log") from error


@contextlib.contextmanager
def a_rival(rival: Rival, model: Path) -> Iterator[int]:
    [port] = free_ports(1)
    with (rival.folder / "log").open("ab") as log:
        command = rival.command(rival.serve, model, str(port))
        server = subprocess.Popen(**command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_ready(server, port)
        yield port
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=20)


def wait_ready(server: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended with {server.returncode} before it was ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"the server was not ready within {READY_WITHIN_S} s")


async def drive(port: int, model: str, seed: int) -> Rates:
    """Return the tokens per second for each number of clients, who all begin at once. No prompt is repeated."""
    rates = {}
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as session:
        for count in STREAMS:
            prompts = make_prompts(2 * count, PROMPT_LEN, seed=100 * seed + count)
            for answer_len, part in ((WARM_UP, prompts[:count]), (ANSWER_LEN, prompts[count:])):
                started = time.perf_counter()
                body = {"model": model, "max_tokens": answer_len, "temperature": 0, "ignore_eos": True, "stream": True}
                body |= {"stream_options": {"include_usage": True}}
                answers = await asyncio.gather(*(one_stream(session, body | {"prompt": ids}) for ids in part))
                assert answers == [answer_len] * count, f"asked for {answer_len} tokens, answered {answers}"
            rates[str(count)] = [count * ANSWER_LEN / (time.perf_counter() - started)]
    return rates


async def one_stream(session: aiohttp.ClientSession, body: dict) -> int:
    usage: dict = {}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage.get("completion_tokens", 0)
