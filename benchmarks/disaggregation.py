"""Prefill and decode instance beside a mixed server: latencies, and answers while engines are killed.

    python -m benchmarks.disaggregation --kills 10 --cuts 4

As root, each server has a network namespace of its own, with a link of 1 Gbit/s to a bridge. Without namespaces the
servers share the loopback interface and links are not cut. The exit status is 1 when an answer was lost or wrong, or
blocks were not released. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.network import Network
from benchmarks.replicas import Clients, Machine
from engine.settings.disaggregation import NIXL, TCP

RELEASED_WITHIN_S = 5.0
NUM_TOKENS = 100  # of an answer during kills
FAMILIES = ("llm_remote_prefills_total", "llm_remote_prefill_failures_total", "llm_pulled_blocks_total")


class Instances:
    """The prefill and the decode instance, and a mixed server as reference."""

    def __init__(self, folder: Path, network: Network, transfer: str):
        self.network = network
        self.prefill, self.decode, self.mixed = [Machine(folder, network, i) for i in range(3)]
        port = self.prefill.ports["SERVICE_HTTP_PORT"] + 400
        for machine in (self.prefill, self.decode):
            machine.env |= {"KV_TRANSFER": transfer, "UCX_TLS": "tcp,self"}  # not from memory to memory of one host
        self.prefill.env |= {"SPLITWISE_ROLE": "prefill"}
        self.decode.env |= {"SPLITWISE_ROLE": "decode", "PREFILL_INSTANCES": f"{self.prefill.ip}:{port}"}
        self.all = [self.prefill, self.decode, self.mixed]

    def kill_engine(self, machine: Machine) -> None:
        state = machine.run_dir.read_state()
        assert state
        for process in state.processes:
            if process.name == "engine":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


async def metric(clients: Clients, machine: Machine, family: str) -> float:
    async with clients.session.get(f"{machine.url}/metrics") as response:
        found = re.search(rf"^{family} (\S+)$", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def is_ready(clients: Clients, machine: Machine) -> bool:
    url = f"http://{machine.ip}:{machine.ports['HEALTH_HTTP_PORT']}/v2/health/ready"
    async with clients.session.get(url) as response:
        return response.status == 200


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(300) for _ in range(num_tokens)]


async def first_token_s(clients: Clients, machine: Machine, token_ids: list[int]) -> float:
    began = time.perf_counter()
    await clients.ask(machine, {"input_ids": token_ids, "max_dec_len": 1})
    return time.perf_counter() - began


async def latency(clients: Clients, each: Instances, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median time to the only token in ms: of new prompts on the mixed server and on the decode instance, in
    alternation, and of prompts that only have to be transferred, because the prefill instance has cached them."""
    rng = random.Random(2)
    times: dict[str, list[float]] = {"mixed": [], "decode": [], "transfer": [], "cached": []}
    before = await metric(clients, each.decode, FAMILIES[2])
    for _ in range(args.requests):
        token_ids = prompt(rng, args.prompt_tokens)
        times["mixed"].append(await first_token_s(clients, each.mixed, token_ids))
        times["decode"].append(await first_token_s(clients, each.decode, token_ids))
        token_ids = prompt(rng, args.prompt_tokens)
        await first_token_s(clients, each.prefill, token_ids)
        times["transfer"].append(await first_token_s(clients, each.decode, token_ids))
        times["cached"].append(await first_token_s(clients, each.decode, token_ids))
    num_blocks = (await metric(clients, each.decode, FAMILIES[2]) - before) / (2 * args.requests)
    found = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in times.items()}
    return {**found, "blocks_per_prompt": num_blocks}


async def inter_token(clients: Clients, machine: Machine, args: argparse.Namespace, *, is_loaded: bool) -> float:
    """Return the 99th percentile of the time between two tokens in ms, while long prompts arrive or not."""
    rng, gaps = random.Random(3), []

    async def load() -> None:
        while True:
            await first_token_s(clients, machine, prompt(rng, args.prompt_tokens))

    loads = [asyncio.create_task(load()) for _ in range(2 * is_loaded)]
    body = {"text": "Count.", "min_dec_len": 600, "max_dec_len": 600, "stream": True}
    async with clients.session.post(f"{machine.url}/v1/chat/completions", json=body) as response:
        seen_at = 0.0
        async for _ in response.content:
            now = time.perf_counter()
            gaps += [now - seen_at] if seen_at else []
            seen_at = now
    for task in loads:
        task.cancel()
    await asyncio.gather(*loads, return_exceptions=True)
    return 1e3 * statistics.quantiles(gaps, n=100)[98]


async def transfer(clients: Clients, machine: Machine) -> None:
    """Wait until a decode instance lets a prompt be computed, and 10 seconds at most."""
    before, deadline = await metric(clients, machine, FAMILIES[0]), time.monotonic() + 10
    while await metric(clients, machine, FAMILIES[0]) <= before and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


async def disturb(clients: Clients, each: Instances, args: argparse.Namespace) -> None:
    """Kill engines and cut links while prompts are transferred."""
    events = ["kill prefill", "kill decode"] * args.kills + ["cut"] * (args.cuts if each.network.has_links else 0)
    clients.rng.shuffle(events)
    for event in events:
        await transfer(clients, each.decode)
        await asyncio.sleep(clients.rng.uniform(0.0, 0.3))
        print(event, file=sys.stderr, flush=True)
        if event == "cut":
            each.network.set_link(each.prefill.number, up=False)
            await asyncio.sleep(RELEASED_WITHIN_S)
            each.network.set_link(each.prefill.number, up=True)
        else:
            each.kill_engine(each.prefill if event == "kill prefill" else each.decode)
        await asyncio.sleep(4)  # until it is back


async def storm(clients: Clients, each: Instances, args: argparse.Namespace) -> dict[str, Any]:
    """Return what clients of the decode instance have seen during the disturbances."""
    clients.machines, each.decode.is_up = [each.decode], True
    disturbing = asyncio.create_task(disturb(clients, each, args))
    rng = random.Random(args.seed)

    async def client() -> None:
        while not disturbing.done():
            sampling = rng.choice(({"temperature": 0}, {"temperature": 2.0, "infer_seed": rng.randrange(1000)}))
            body = {"input_ids": prompt(rng, args.prompt_tokens), "min_dec_len": NUM_TOKENS, "max_dec_len": NUM_TOKENS}
            expected = await clients.ask(each.mixed, {**body, **sampling})
            await clients.check({**body, **sampling}, expected["tokens_all_ids"])

    await asyncio.gather(disturbing, *(client() for _ in range(args.streams)))
    for machine in each.all[:2]:  # until the last one that was killed is back
        while not await is_ready(clients, machine):
            await asyncio.sleep(0.1)
    held = {"prefill": 1.0, "decode": 1.0}
    deadline = time.monotonic() + RELEASED_WITHIN_S
    while any(held.values()) and time.monotonic() < deadline:
        held = {name: await metric(clients, getattr(each, name), "llm_kv_blocks_held") for name in held}
        await asyncio.sleep(0.1)
    return {
        **{"right": clients.num_right, "lost": len(clients.lost), "wrong": len(clients.wrong), "held_after": held},
        **{"resumed_by_clients": clients.num_resumed, "longest_pause_s": max(clients.pauses, default=0.0)},
    }


async def measure(each: Instances, args: argparse.Namespace) -> dict[str, Any]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        clients = Clients(session, each.all, random.Random(args.seed))
        await asyncio.sleep(2)  # until the instances are connected
        report: dict[str, Any] = {"latency": await latency(clients, each, args)}
        for name in ("mixed", "decode"):
            for is_loaded in (False, True):
                gap = await inter_token(clients, getattr(each, name), args, is_loaded=is_loaded)
                report[f"inter_token_p99_ms_{name}_{'loaded' if is_loaded else 'idle'}"] = gap
        report["counters"] = {family: await metric(clients, each.decode, family) for family in FAMILIES}
        print(json.dumps(report), file=sys.stderr, flush=True)
        report["storm"] = await storm(clients, each, args)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disaggregation", description=__doc__.splitlines()[0])
    defaults = {"streams": 4, "kills": 10, "cuts": 4, "requests": 20, "prompt-tokens": 2000}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transfer", choices=(TCP, NIXL), default=TCP)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disaggregation-") as folder, Network(3) as network:
        each, started = Instances(Path(folder), network, args.transfer), []
        try:
            for machine in each.all:
                machine.start()
                started.append(machine)
            report = asyncio.run(measure(each, args))
        finally:
            for machine in started:
                machine.stop()
    print(json.dumps({**vars(args), "namespaces": network.has_links, **report}))
    seen = report["storm"]
    return int(bool(seen["lost"] or seen["wrong"] or any(seen["held_after"].values())))


if __name__ == "__main__":
    sys.exit(main())
