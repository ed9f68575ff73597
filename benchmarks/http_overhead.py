"""Cost of the path to the clients: streams of tokens through the whole server, and the CPU time of each process.

    python -m benchmarks.http_overhead --model-dir demo_model --streams 32 256

Every stream is one client that streams an answer over gRPC (`--protocol http`: over HTTP); all begin at once. Figures
are medians of --repeats runs after a warm-up: tokens and responses per second, and for each process of the server and
for this client the CPU time per response in microseconds, which other load on the machine hardly changes. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from tritonclient.grpc import service_pb2_grpc

from benchmarks.bench import cpu_name
from benchmarks.server import Server, running_server
from engine.wire.triton import infer_request

STREAMS_PER_CHANNEL = 32
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def body_of(index: int, prompt_len: int, answer_len: int) -> dict[str, Any]:
    ids = [100 + (index * 7919 + place * 31) % 800 for place in range(prompt_len)]
    name = f"{index}-{time.monotonic_ns()}"
    fixed = {"ignore_eos": True, "temperature": 0, "stream": True}
    return {"req_id": name, "input_ids": ids, "max_dec_len": answer_len, **fixed}


async def over_grpc(port: int, bodies: list[dict[str, Any]]) -> int:
    """Stream all answers over gRPC. Return the number of responses."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(-(-len(bodies) // STREAMS_PER_CHANNEL))
    ]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]

    async def one(index: int, body: dict[str, Any]) -> int:
        responses = [each async for each in stubs[index % len(stubs)].ModelStreamInfer(iter([infer_request(body)]))]
        last = responses[-1].infer_response.raw_output_contents[0][4:]
        answer = json.loads(last)
        assert isinstance(answer, list) and answer[0]["is_end"], last
        return len(responses)

    counts = await asyncio.gather(*(one(index, body) for index, body in enumerate(bodies)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return sum(counts)


async def over_http(port: int, bodies: list[dict[str, Any]]) -> int:
    """Stream all answers over HTTP. Return the number of responses."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(body: dict[str, Any]) -> int:
            async with session.post(url, json=body) as response:
                lines = [line async for line in response.content]
            assert json.loads(lines[-1])["finish_reason"], lines[-1]
            return len(lines)

        return sum(await asyncio.gather(*map(one, bodies)))


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU seconds that this client and each process of the server have used so far, by name."""
    state = server.run_dir.read_state()
    assert state
    spent = {"client": sum(os.times()[:2])}
    for process in state.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        spent[process.name] = (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
    return spent


def measure(args: argparse.Namespace, count: int, server: Server) -> dict[str, Any]:
    over, port = {"grpc": (over_grpc, "SERVICE_GRPC_PORT"), "http": (over_http, "SERVICE_HTTP_PORT")}[args.protocol]
    runs = []
    for _ in range(args.repeats + 1):
        bodies = [body_of(index, args.prompt_len, args.answer_len) for index in range(count)]
        before, started = cpu_seconds(server), time.perf_counter()
        num_responses = asyncio.run(over(server.ports[port], bodies))
        seconds, after = time.perf_counter() - started, cpu_seconds(server)
        spent = {name: 1e6 * (after[name] - before.get(name, 0.0)) / num_responses for name in after}
        rates = {"output_tok_s": count * args.answer_len / seconds, "responses_s": num_responses / seconds}
        runs.append(rates | {f"{name}_us": each for name, each in spent.items()})
    return {"streams": count} | {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", default="demo_model")
    parser.add_argument("--streams", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--answer-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    settings = {"MODEL_DIR": args.model_dir, "BATCH_SIZE": str(max(args.streams)), "MAX_NUM_BATCHED_TOKENS": "4096"}
    rows = []
    with running_server(settings) as server:
        for count in args.streams:
            rows.append(measure(args, count, server))
            print(", ".join(f"{name} {value:.0f}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"hardware": cpu_name(), "protocol": args.protocol, "rows": rows}))


if __name__ == "__main__":
    main()
