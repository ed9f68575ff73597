"""Rate at which a decode instance pulls KV blocks from a prefill instance on GPUs, without a model.

    python -m benchmarks.gpu_transfer --gpus 0 1        # from GPU 0 to GPU 1
    python -m benchmarks.gpu_transfer --gpus 0 0        # between two processes of one GPU

Each process sees its own GPU only. `pull` is the whole transfer with its messages and the digests on both sides, `copy`
the copy and its digests alone, `digests` what the prefill instance computes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.transfer import ReadyJobs, pull_s

LAYOUTS = {  # layers, and the shape of a block of a layer in bfloat16
    "llama-3-8b": (32, (2, 8, 64, 128)),
    "llama-3-8b-of-8": (32, (2, 1, 64, 128)),
    "qwen2.5-0.5b": (24, (2, 2, 64, 64)),
    "deepseek-v3": (61, (1, 1, 64, 576)),
}


def blocks_of(layout: str, num_blocks: int) -> Any:
    """Return access to the blocks of caches with random content."""
    import torch

    from engine.executors.cuda.blocks import CudaBlocks
    from engine.executors.cuda.cache import Caches
    from engine.models.kv_cache import ATTENTION_AXES, CacheSpec

    num_layers, shape = LAYOUTS[layout]
    specs = [CacheSpec(f"kv_cache_{n}", "bfloat16", (-1, *shape), ATTENTION_AXES) for n in range(num_layers)]
    caches, device = Caches(specs, torch.device("cuda", 0)), torch.device("cuda", 0)
    caches.allocate(num_blocks)
    for layer in caches.words:
        layer.random_(-(2**62), 2**62)
    torch.cuda.synchronize()
    return CudaBlocks(caches, device), caches.block_bytes


def serve(layout: str, num_blocks: int, shares: bool) -> None:
    """Serve the blocks until the standard input is closed."""
    from engine.transfer.server import PrefillServer, ServedBlocks

    blocks, _ = blocks_of(layout, num_blocks)
    shared: Any = (blocks.digests, blocks.share()) if shares else ()
    jobs: Any = ReadyJobs()
    served = ServedBlocks(jobs, blocks.read_block, {}, 1 << 20, 1 << 20, *shared)
    print(PrefillServer(("127.0.0.1", 0), served, "").port, flush=True)
    sys.stdin.read()


def rate(num_bytes: int, seconds: Sequence[float]) -> float:
    """Return the median rate in GB/s, the first time being a warm-up."""
    return 1e-9 * num_bytes / statistics.median(seconds[1:])


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(layout: str, gigabytes: float, rounds: int, transfer: str, port: int) -> dict[str, float]:
    from engine.ops.cuda import block_copy
    from engine.transfer.client import PrefillClient, PulledBlocks

    num_blocks = num_blocks_of(layout, gigabytes)
    blocks, size = blocks_of(layout, num_blocks)
    device = blocks if transfer == "cuda_ipc" else None
    pulled = PulledBlocks(blocks.write_block, size, {}, device, device is not None)
    client = PrefillClient([("127.0.0.1", port)], pulled, "")
    while not client.is_ready:
        assert not client.refusals(0), client.refusals(0)
        time.sleep(0.01)
    total = num_blocks * size
    found = {"pull_gb_s": rate(total, [pull_s(client, num_blocks) for _ in range(rounds + 1)])}
    if device:
        everything = [(block, block) for block in range(num_blocks)]
        for count in (16, 32, 64, 128):
            block_copy.NUM_PROGRAMS = count
            copies = [timed(lambda: blocks.copy(0, everything)) for _ in range(rounds + 1)]
            digests = [timed(lambda: blocks.digests(range(num_blocks))) for _ in range(rounds + 1)]
            found[f"copy_gb_s_{count}"] = rate(total, copies)
            found[f"digests_gb_s_{count}"] = rate(total, digests)
    return found


def num_blocks_of(layout: str, gigabytes: float) -> int:
    num_layers, shape = LAYOUTS[layout]
    elements = num_layers
    for size in shape:
        elements *= size
    return int(gigabytes * 1e9 / (2 * elements))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs=2, default=["0", "0"], help="GPUs of the prefill and of the decode instance")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--transfer", choices=("cuda_ipc", "tcp"), default="cuda_ipc")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=LAYOUTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, num_blocks_of(args.serve, args.gigabytes), args.transfer == "cuda_ipc")
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus[1]  # before torch is imported
    report = {}
    for layout in args.layouts:
        command = [sys.executable, "-m", "benchmarks.gpu_transfer", "--serve", layout, "--transfer", args.transfer]
        command += ["--gigabytes", str(args.gigabytes)]
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": args.gpus[0]}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as server:
            assert server.stdout and server.stdin
            port = int(server.stdout.readline())
            report[layout] = measure(layout, args.gigabytes, args.rounds, args.transfer, port)
            server.stdin.close()
        print(layout, {name: round(value, 1) for name, value in report[layout].items()}, flush=True)
    print(json.dumps({"gpus": args.gpus, "transfer": args.transfer, "gigabytes": args.gigabytes, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
