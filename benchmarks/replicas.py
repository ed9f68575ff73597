"""Replicas under load while they are killed and cut off: lost and wrong answers, pauses, prefix hits, added latency.

    python -m benchmarks.replicas --kills 10 --cuts 4
    python -m benchmarks.replicas --kills 0 --cuts 0 --only throughput front_ends identical
    QUANT_TYPE=weight_only_int4 python -m benchmarks.replicas --only throughput --requests 96 --model CHECKPOINT

As root, each server has a network namespace of its own, with a link of 1 Gbit/s to a bridge. Without namespaces the
servers share the loopback interface and links are not cut. A server without replicas is the reference for right
answers, prefix hits and latency. Clients ask a random front end, and resume at another one when their connection is
lost. The exit status is 1 when an answer was lost or wrong. The last line is JSON.

The parts of the report (`--only` chooses some of them):

latency: times to the only token with and without replicas. The difference is what the router adds.
hits: share of the prompt tokens that were cached in --chats chats, at the replicas and at one server. With few chats,
    what counts is that each replica has to compute each of the 20 system prompts once.
throughput: tokens per second of the replicas, and before that of the same servers without REPLICAS; the processor time
    of all processes of the servers, which depends less on other work on the machine; and how many tokens the replica
    with the most load computed, divided by the mean.
front_ends: two front ends without a model are killed in turn. Lost and wrong answers, and tokens computed again.
identical: tool calls with log-probabilities and two choices are streamed while replicas are killed.
storm: lost and wrong answers and pauses while servers are killed and links are cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.network import Network
from benchmarks.replica_clients import DEMO_MODEL, Choices, Clients, Machine
from benchmarks.simulate.traffic import chats

NUM_TOKENS = 300
PARTS = ("latency", "hits", "throughput", "front_ends", "identical", "storm")
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
PARAMETERS = {"type": "object", "properties": {"numbers": INTEGERS}, "required": ["numbers"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": PARAMETERS}}


def cases(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return requests with long answers: greedy, seeded, with two choices, log-probabilities and a grammar."""
    long = {"min_dec_len": NUM_TOKENS}
    kinds: tuple[dict[str, Any], ...] = (
        {**long, "temperature": 0},
        {**long, "temperature": 3.0, "seed": 5},
        {**long, "temperature": 3.0, "seed": 7, "n": 2, "logprobs": 2},
        {"temperature": 2.0, "seed": 8, "guided_regex": "([a-z]+ ){60,}", "logprobs": 0},
    )
    common = {"max_dec_len": NUM_TOKENS}
    return [{**common, **kinds[i % 4], "text": f"Tell me about {rng.randint(0, 999)}."} for i in range(count)]


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
    expected = [await clients.answer(single, body) for body in asked]
    await under_load(clients, asked, expected, disturb(clients, network, args), args)
    return {
        **{"right": clients.num_right, "lost": len(clients.lost), "wrong": len(clients.wrong)},
        **{"resumed_by_clients": clients.num_resumed, "longest_pause_s": max(clients.pauses)},
        "longest_pause_of_resumed_s": max(clients.pauses_of_resumed, default=0.0),
    }


async def under_load(
    clients: Clients,
    asked: Sequence[dict[str, Any]],
    expected: Sequence[Choices],
    disturbance: Coroutine[Any, Any, None],
    args: argparse.Namespace,
) -> None:
    """Let clients ask until the disturbance has ended, and check all answers."""
    disturbing = asyncio.create_task(disturbance)

    async def client() -> None:
        while not disturbing.done():
            i = clients.rng.randrange(len(asked))
            await clients.check(asked[i], expected[i])
            await asyncio.sleep(clients.rng.uniform(0, args.think_s))

    await asyncio.gather(disturbing, *(client() for _ in range(args.streams)))


async def lost_front_ends(
    clients: Clients, machines: Sequence[Machine], fronts: Sequence[Machine], single: Machine, args: argparse.Namespace
) -> dict[str, Any]:
    """Kill front ends without a model in turn. Return how many of the tokens were not computed again by the replicas
    when clients resumed at the other front end."""
    own = Clients(clients.session, fronts, clients.rng)
    asked = cases(clients.rng, args.cases)
    expected = [await clients.answer(single, body) for body in asked]
    before = [await each.counters(clients.session) for each in machines]

    async def kill_fronts() -> None:
        for i in range(args.front_end_kills):
            await asyncio.sleep(clients.rng.uniform(1, 2))
            front = fronts[i % len(fronts)]
            front.kill()
            await asyncio.to_thread(front.start)

    await under_load(own, asked, expected, kill_fronts(), args)
    after = [await each.counters(clients.session) for each in machines]
    pairs = zip(before, after, strict=True)
    num_generated = sum(now.num_generated_tokens - then.num_generated_tokens for then, now in pairs)
    return {
        **{"right": own.num_right, "lost": len(own.lost), "wrong": len(own.wrong), "resumed": own.num_resumed},
        **{"generated_tokens": num_generated, "received_tokens": own.num_tokens},
        "share_not_computed_again": 1 - max(0.0, num_generated - own.num_tokens) / own.num_tokens,
    }


async def tool_calls(clients: Clients, machine: Machine, number: int) -> Any:
    """Return the text, tool calls and log-probabilities of an OpenAI stream with two choices."""
    body = {
        **{"model": "default", "messages": [{"role": "user", "content": f"Add the first {number} numbers."}]},
        **{"tools": [TOOL], "tool_choice": "required", "n": 2, "logprobs": True, "top_logprobs": 2},
        **{"temperature": 1.0, "seed": number, "max_tokens": NUM_TOKENS, "stream": True},
    }
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": [], "finish_reason": None} for _ in range(2)]
    async with clients.session.post(f"{machine.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            assert "error" not in event, event
            for each in event["choices"]:
                choice, calls = choices[each["index"]], each["delta"].get("tool_calls") or [{}]
                choice["text"] += each["delta"].get("content") or ""
                for call in calls:
                    function = call.get("function", {})
                    choice["text"] += function.get("name", "") + function.get("arguments", "")
                choice["logprobs"] += (each.get("logprobs") or {}).get("content") or []
                choice["finish_reason"] = each["finish_reason"] or choice["finish_reason"]
    assert all(choice["finish_reason"] for choice in choices)
    return json.dumps(choices)


async def identical(clients: Clients, machines: Sequence[Machine], args: argparse.Namespace) -> dict[str, Any]:
    """Kill replicas, but not the front end that is asked, while tool calls are streamed. Return how many streams had
    the same bytes as without a loss, and how many requests were sent to another replica."""
    front, *others = machines
    numbers = range(args.streams)
    expected = await asyncio.gather(*(tool_calls(clients, front, number) for number in numbers))
    num_lost, num_equal, num_streams = (await front.counters(clients.session)).num_lost, 0, 0
    for i in range(args.tool_kills):
        streams = [asyncio.create_task(tool_calls(clients, front, number)) for number in numbers]
        await asyncio.sleep(clients.rng.uniform(0.3, 0.8))
        killed = others[i % len(others)]
        killed.kill()
        found = await asyncio.gather(*streams)
        num_equal += sum(text == whole for text, whole in zip(found, expected, strict=True))
        num_streams += len(found)
        await asyncio.to_thread(killed.start)
        await asyncio.sleep(2)  # until it is known again
    num_lost = (await front.counters(clients.session)).num_lost - num_lost
    return {"equal": num_equal, "different": num_streams - num_equal, "sent_to_another_replica": num_lost}


async def throughput(clients: Clients, machines: Sequence[Machine], num_requests: int) -> dict[str, Any]:
    """Return tokens of answers per second of new prompts at all front ends in turn, the processor time of the servers,
    and how even the load was."""
    before, left = [await each.counters(clients.session) for each in machines], list(range(num_requests))
    used_s = sum(each.processor_s() for each in machines)
    salt, num_tokens, began = random.random(), 0, time.perf_counter()

    async def client() -> None:
        nonlocal num_tokens
        while left:
            number = left.pop()
            text = f"{number} of {salt}: please tell me a story about it. " * 8
            body = {"text": text, "min_dec_len": 64, "max_dec_len": 64, "temperature": 0}
            last = await clients.ask(machines[number % len(machines)], body)
            num_tokens += len(last["tokens_all_ids"])

    await asyncio.gather(*(client() for _ in range(4 * len(machines))))
    rate = num_tokens / (time.perf_counter() - began)
    used_s = sum(each.processor_s() for each in machines) - used_s
    after = [await each.counters(clients.session) for each in machines]
    loads = [now.num_computed - then.num_computed for then, now in zip(before, after, strict=True)]
    figures = {"tokens_per_s": rate, "processor_s_per_1000_requests": 1000 * used_s / num_requests}
    return {**figures, "load_max_over_mean": max(loads) / statistics.mean(loads)}


async def prefix_hits(clients: Clients, machines: Sequence[Machine], num_chats: int) -> dict[str, Any]:
    """Return the share of prompt tokens that were cached, of chats of 20 applications over the front ends."""
    hits, total, asked = 0, 0, enumerate(chats(1, num_chats))

    async def client() -> None:
        nonlocal hits, total
        for number, chat in asked:
            body = {"messages": chat.body["messages"], "max_dec_len": 8}
            last = await clients.ask(machines[number % len(machines)], body)
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


async def measure(
    machines: Sequence[Machine], fronts: Sequence[Machine], single: Machine, network: Network, args: argparse.Namespace
) -> Any:
    """Run the measurements and return the report."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        clients = Clients(session, machines, random.Random(args.seed))
        await asyncio.sleep(2)  # until the replicas know each other
        report: dict[str, Any] = {}
        if "latency" in args.only:
            for i in range(len(machines)):  # prompts of which each may belong to another server
                text = f"{i} is the number of this long prompt. " * 40
                report[f"latency_long_{i}"] = await latency(clients, machines[0], single, text, args.requests // 3)
            report["latency_short"] = await latency(clients, machines[0], single, "Hi", args.requests // 3)
        if "hits" in args.only:
            report["hits_single"] = await prefix_hits(clients, [single], args.chats)
            report["hits_replicas"] = await prefix_hits(clients, machines, args.chats)
        if "throughput" in args.only:
            report["throughput"] = await throughput(clients, machines, args.requests)
        print(json.dumps(report), file=sys.stderr, flush=True)
        if "front_ends" in args.only:
            report["front_ends"] = await lost_front_ends(clients, machines, fronts, single, args)
        if "identical" in args.only:
            report["identical"] = await identical(clients, machines, args)
        if "storm" in args.only:
            report["storm"] = await storm(clients, single, network, args)
    return report


async def measure_direct(machines: Sequence[Machine], num_requests: int) -> dict[str, Any]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        return await throughput(Clients(session, machines, random.Random(0)), machines, num_requests)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__.splitlines()[0])
    numbers = {"replicas": 3, "streams": 16, "kills": 10, "cuts": 4, "cases": 16, "requests": 600, "chats": 1500}
    for name, default in {**numbers, "front-end-kills": 6, "tool-kills": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="MODEL_DIR of the servers; default: the demo model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the report; default: all")
    parser.add_argument("--think-s", type=float, default=1.0, help="longest pause of a client between two requests")
    args = parser.parse_args()
    num_fronts = 2 if "front_ends" in args.only else 0
    started: list[Machine] = []
    model, measures_throughput_alone = {"MODEL_DIR": args.model}, set(args.only) == {"throughput"}
    with (
        tempfile.TemporaryDirectory(prefix="replicas-") as folder,
        Network(args.replicas + 1 + num_fronts) as network,
    ):
        *machines, single = [Machine(Path(folder), network, i, **model) for i in range(args.replicas + 1)]
        replicas = {"REPLICAS": ",".join(f"{each.ip}:{each.ports['SERVICE_GRPC_PORT']}" for each in machines)}
        front_end = {**model, **replicas, "SPLITWISE_ROLE": "scheduler"}
        fronts = [Machine(Path(folder), network, args.replicas + 1 + i, **front_end) for i in range(num_fronts)]

        def start(*servers: Machine) -> None:
            for each in servers:
                each.start()
                started.append(each)

        def stop() -> None:
            while started:
                started.pop().stop()

        direct: dict[str, Any] = {}
        try:
            if "throughput" in args.only:
                start(*machines)
                direct = asyncio.run(measure_direct(machines, args.requests))
                stop()
            for each in machines:
                each.env |= replicas
            start(*machines, *([] if measures_throughput_alone else [single]), *fronts)
            report = asyncio.run(measure(machines, fronts, single, network, args))
        finally:
            stop()
    if direct:
        report["throughput_direct"] = direct
        name = "processor_s_per_1000_requests"
        report["throughput_ratio"] = report["throughput"]["tokens_per_s"] / direct["tokens_per_s"]
        report["processor_time_ratio"] = direct[name] / report["throughput"][name]
    print(json.dumps({**vars(args), "namespaces": network.has_links, **report}))
    failed = sum(report.get(part, {}).get(kind, 0) for part in PARTS for kind in ("lost", "wrong", "different"))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
