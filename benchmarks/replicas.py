"""Replicas under load while they are killed and cut off: lost and wrong answers, pauses, prefix hits, added latency.

    python -m benchmarks.replicas --kills 10 --cuts 4

As root, each server has a network namespace of its own, with a link of 1 Gbit/s to a bridge. Without namespaces the
servers share the loopback interface and links are not cut. A server without replicas is the reference for right
answers, prefix hits and latency. Clients ask a random front end, and resume at another one when their connection is
lost. The exit status is 1 when an answer was lost or wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.network import Network
from benchmarks.server import Server

NUM_TOKENS, GIVE_UP_S = 300, 60.0
DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo_model"


class Machine(Server):
    """A server with an address of its own, which can be killed as by a loss of power."""

    def __init__(self, folder: Path, network: Network, number: int):
        self.network, self.number, self.ip = network, number, network.address(number)
        settings = {"SERVICE_HOST": self.ip, "CPU_THREADS": "1", "MODEL_DIR": str(DEMO_MODEL), "DRAIN_DELAY": "0"}
        super().__init__(folder / str(number), {**settings, "DRAIN_TIMEOUT": "0", "START_TIMEOUT": "60"})
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

    def kill(self) -> None:
        self.is_up = False
        state = self.run_dir.read_state()
        assert state
        for process in (state.supervisor, *state.processes):  # the supervisor first, because it restarts the others
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class Clients:
    """Clients of all front ends, and what they have seen."""

    def __init__(self, session: aiohttp.ClientSession, machines: Sequence[Machine], rng: random.Random):
        self.session, self.machines, self.rng = session, machines, rng
        self.num_right = self.num_resumed = 0
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

    async def check(self, body: dict[str, Any], expected: list[int]) -> None:
        """Ask until the answer is complete, and compare its tokens."""
        tokens: list[int] = []
        body = {**body, "req_id": uuid.uuid4().hex, "stream": True}
        seen_at = began = time.monotonic()
        pause, is_resumed = 0.0, False
        while True:
            machine = self.rng.choice([each for each in self.machines if each.is_up])
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                async for line in self._lines(machine, {**body, "resume_from": len(tokens)} if tokens else body):
                    now = time.monotonic()
                    pause, seen_at = max(pause, now - seen_at), now
                    if line["error_msg"]:
                        break
                    tokens += line["token_ids"]
                    if line["is_end"]:
                        (self.pauses_of_resumed if is_resumed else self.pauses).append(pause)
                        self.num_right += tokens == expected
                        self.wrong += [body] if tokens != expected else []
                        return
            self.num_resumed, is_resumed = self.num_resumed + 1, True
            if time.monotonic() - max(seen_at, began) > GIVE_UP_S:
                self.lost.append(body["req_id"])
                return
            await asyncio.sleep(0.1)

    async def _lines(self, machine: Machine, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=3)  # a front end that is cut off is left
        async with self.session.post(f"{machine.url}/v1/chat/completions", json=body, timeout=timeout) as response:
            async for line in response.content:
                yield json.loads(line)


def cases(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return requests with long answers, greedy and seeded."""
    common = {"min_dec_len": NUM_TOKENS, "max_dec_len": NUM_TOKENS}
    sampled = ({"temperature": 0}, {"temperature": 3.0, "seed": 5})
    return [{**common, **sampled[i % 2], "text": f"Tell me about {rng.randint(0, 999)}."} for i in range(count)]


async def disturb(clients: Clients, network: Network, args: argparse.Namespace) -> None:
    """Kill servers and cut their links, one at a time, and wait until each is back."""
    events = ["kill"] * args.kills + ["cut"] * (args.cuts if network.has_links else 0)
    clients.rng.shuffle(events)
    for event in events:
        machine = clients.rng.choice(clients.machines)
        await asyncio.sleep(clients.rng.uniform(0.5, 2))
        print(f"{event} {machine.ip}", file=sys.stderr, flush=True)
        if event == "kill":
            machine.kill()
            await asyncio.to_thread(machine.start)
        else:
            network.set_link(machine.number, up=False)
            await asyncio.sleep(4)
            network.set_link(machine.number, up=True)
    await asyncio.sleep(2)


async def storm(clients: Clients, single: Machine, network: Network, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the clients have seen during the disturbances."""
    asked = cases(clients.rng, args.cases)
    expected = [(await clients.ask(single, body))["tokens_all_ids"] for body in asked]
    disturbing = asyncio.create_task(disturb(clients, network, args))

    async def client() -> None:
        while not disturbing.done():
            i = clients.rng.randrange(len(asked))
            await clients.check(asked[i], expected[i])
            await asyncio.sleep(clients.rng.uniform(0, args.think_s))

    await asyncio.gather(disturbing, *(client() for _ in range(args.streams)))
    return {
        **{"right": clients.num_right, "lost": len(clients.lost), "wrong": len(clients.wrong)},
        **{"resumed_by_clients": clients.num_resumed, "longest_pause_s": max(clients.pauses)},
        "longest_pause_of_resumed_s": max(clients.pauses_of_resumed, default=0.0),
    }


async def prefix_hits(clients: Clients, machines: Sequence[Machine], num_requests: int) -> dict[str, Any]:
    """Return the share of prompt tokens that were cached, of chats of 20 applications over the front ends."""
    rng, hits, total, count = random.Random(1), 0, 0, 0
    systems = [f"{rng.random()} You are helpful. " * rng.randint(5, 40) for _ in range(20)]
    questions = [(rng.choice(systems), f"{rng.random()}") for _ in range(num_requests)]

    async def client() -> None:
        nonlocal hits, total, count
        while questions:
            system, question = questions.pop()
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            count += 1
            last = await clients.ask(machines[count % len(machines)], {"messages": messages, "max_dec_len": 8})
            hits, total = hits + last["usage"]["cached_tokens"], total + last["usage"]["prompt_tokens"]

    await asyncio.gather(*(client() for _ in range(8)))
    return {"hit_rate": hits / total}


async def latency(clients: Clients, first: Machine, single: Machine, text: str, count: int) -> dict[str, Any]:
    """Return times to the only token of prompts that begin with `text` in ms, in alternation without and with
    replicas.
    """
    times: dict[str, list[float]] = {"single": [], "replicas": []}
    for i in range(2 * count):
        machine, name = ((single, "single"), (first, "replicas"))[i % 2]
        began = time.perf_counter()
        await clients.ask(machine, {"text": f"{text} {i // 2}", "max_dec_len": 1})
        times[name].append(1e3 * (time.perf_counter() - began))
    cuts = {name: statistics.quantiles(each, n=100) for name, each in times.items()}
    found = {f"{name}_p{p}_ms": cuts[name][p - 1] for name in cuts for p in (50, 99)}
    return {**found, **{f"added_p{p}_ms": cuts["replicas"][p - 1] - cuts["single"][p - 1] for p in (50, 99)}}


async def measure(machines: Sequence[Machine], single: Machine, network: Network, args: argparse.Namespace) -> Any:
    """Run all measurements and return the report."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        clients = Clients(session, machines, random.Random(args.seed))
        await asyncio.sleep(2)  # until the replicas know each other
        report: dict[str, Any] = {}
        for i in range(len(machines)):  # prompts of which each may belong to another server
            text = f"{i} is the number of this long prompt. " * 40
            report[f"latency_long_{i}"] = await latency(clients, machines[0], single, text, args.requests // 3)
        report["latency_short"] = await latency(clients, machines[0], single, "Hi", args.requests // 3)
        report["hits_single"] = await prefix_hits(clients, [single], args.requests)
        report["hits_replicas"] = await prefix_hits(clients, machines, args.requests)
        print(json.dumps(report), file=sys.stderr, flush=True)
        report["storm"] = await storm(clients, single, network, args)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    for name, default in {"replicas": 3, "streams": 16, "kills": 10, "cuts": 4, "cases": 16, "requests": 600}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--think-s", type=float, default=1.0, help="longest pause of a client between two requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder, Network(args.replicas + 1) as network:
        *machines, single = [Machine(Path(folder), network, i) for i in range(args.replicas + 1)]
        addresses = [f"{each.ip}:{each.ports['SERVICE_GRPC_PORT']}" for each in machines]
        started = []
        try:
            for each in (*machines, single):
                each.env |= {"REPLICAS": ",".join(addresses)} if each is not single else {}
                each.start()
                started.append(each)
            report = asyncio.run(measure(machines, single, network, args))
        finally:
            for each in started:
                each.stop()
    print(json.dumps({**vars(args), "namespaces": network.has_links, **report}))
    return int(bool(report["storm"]["lost"] or report["storm"]["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
