"""Time of the products of a few tokens with their experts on one GPU: `python -m benchmarks.gpu_experts`.

Each case is a CUDA graph of layers with routers of their own, which choose experts of the same matrices. There are so
many layers that few of the matrices that one reads are in the L2 cache. The time of a layer includes its router. The
limit is the time to read the matrices of the experts that are hit at the memory bandwidth. --kernels shows what each
kernel adds to the time of a layer.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.gpu import bandwidth, busy_share
from benchmarks.gpu_times import microseconds
from engine.models.quantize import to_int4
from engine.ops import cuda
from engine.ops.cuda import fp8, lowbit, mxfp4
from engine.ops.cuda.forward_context import forward_pass

LEAST_BYTES = 400e6  # that all layers read
BITS = {"dense": 16, "int4": 4.25, "mxfp4": 4.25, "int8": 8, "fp8": 8}
ROUTE = {
    **{"scoring": 0, "num_groups": 1, "top_groups": 1, "group_best": 1, "renormalize": 1, "epsilon": 0.0},
    **{"minimum": 0.0, "factor": 1.0, "first_expert": 0},
}
SILU = {"activation": 0, "limit": 0.0, "alpha": 1.0, "offset": 0.0}


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
}


class Case(NamedTuple):
    run: Callable[[], None]
    num_layers: int
    num_hit: float  # experts of a layer, on average


def stack(kind: str, rows: int, width: int) -> list[torch.Tensor | None]:
    """Return random matrices of experts. Those of 4 bits repeat the codes of a few rows."""
    if kind == "dense":
        return [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / width**0.5]
    if kind in ("int8", "fp8"):
        codes = torch.randint(0, 96, (rows, width), device="cuda", dtype=torch.int8)
        scale = torch.full((rows,), 1e-3, device="cuda")
        if kind == "int8":
            return [*lowbit.pack_int8(codes, scale)][:2]
        return [*fp8.pack(codes.view(torch.uint8), scale[:, None])]
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (rows, width // 2), device="cuda", dtype=torch.uint8)
        exponents = torch.randint(116, 122, (rows, width // 32), device="cuda", dtype=torch.uint8)
        return [*mxfp4.pack(codes, exponents)]
    codes, scale = to_int4(torch.randn(256, width).numpy() / width**0.5)
    times = -(-rows // 256)
    given = (torch.from_numpy(codes).cuda(), torch.from_numpy(scale).cuda().view(torch.bfloat16))
    packed = lowbit.pack_int4(*[each.repeat(times, 1)[:rows] for each in given])
    return [packed.words, packed.scale, None]


def case(shape: Shape, kind: str, num_rows: int) -> Case:
    """Return the products of rows with experts of several layers."""
    suffix = "" if kind == "dense" else f"_{kind}"
    both = [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)]
    up, down = (stack(kind, shape.num_experts * rows, width) for rows, width in both)
    num_layers = 2 + int(LEAST_BYTES // (num_bytes(shape, kind) * min(1, shape.top_k * num_rows / shape.num_experts)))
    x = torch.randn(num_rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
    routers = [torch.randn(shape.num_experts, shape.hidden, device="cuda") / 32 for _ in range(num_layers)]
    route = {**ROUTE, "top_k": shape.top_k}
    num_hit = sum(len(cuda.moe_route(x, router, **route)[0].unique()) for router in routers) / num_layers

    def run() -> None:
        given = {"num_experts": shape.num_experts}
        for router in routers:
            with forward_pass():
                ids, weights = cuda.moe_route(x, router, **route)
                h = getattr(cuda, f"expert_gate_up{suffix}")(x, ids, *up, **given, **SILU)
                getattr(cuda, f"expert_down{suffix}")(h, ids, weights, *down, **given)

    return Case(run, num_layers, num_hit)


def num_bytes(shape: Shape, kind: str) -> float:
    """Return the bytes of the matrices of all experts of a layer."""
    return shape.num_experts * 3 * shape.inner * shape.hidden * BITS[kind] / 8


def show_kernels(measured: Case, num_shown: int) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        measured.run()
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    busy_share(profile, measured.num_layers, num_shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", choices=BITS, default=["dense", "int4"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--kernels", type=int, default=0, help="number of kernels to show for each case")
    args = parser.parse_args()
    speed = bandwidth()
    for name, kind, num_rows in itertools.product(args.shapes, args.kinds, args.rows):
        measured = case(SHAPES[name], kind, num_rows)
        limit = num_bytes(SHAPES[name], kind) * measured.num_hit / SHAPES[name].num_experts / speed * 1e6
        found = microseconds(measured.run) / measured.num_layers
        hit = f"{measured.num_hit:5.1f} experts"
        print(f"{name:18} {kind:6} {num_rows:3} rows, {hit}: {found:7.1f} us, limit {limit:6.1f}", flush=True)
        if args.kernels:
            show_kernels(measured, args.kernels)


if __name__ == "__main__":
    main()
