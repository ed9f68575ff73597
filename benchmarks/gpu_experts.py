"""Time of the products of a few tokens with their experts on one GPU: `python -m benchmarks.gpu_experts`.

Each case is a CUDA graph of layers with matrices of their own, together more than 100 MB, so that none is in the L2
cache. The limit is the time to read the matrices of the experts that are hit at the memory bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.gpu import bandwidth
from benchmarks.gpu_times import microseconds
from engine.models.quantize import to_int4
from engine.ops import cuda
from engine.ops.cuda import lowbit

LEAST_BYTES = 100e6  # of the matrices of all layers
BITS = {"dense": 16, "int4": 4.25}
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


def stack(kind: str, rows: int, width: int) -> list[torch.Tensor | None]:
    """Return random matrices of experts. Those of 4 bits repeat the codes of a few rows."""
    if kind == "dense":
        return [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) / width**0.5]
    codes, scale = to_int4(torch.randn(256, width).numpy() / width**0.5)
    times = -(-rows // 256)
    given = (torch.from_numpy(codes).cuda(), torch.from_numpy(scale).cuda().view(torch.bfloat16))
    packed = lowbit.pack_int4(*[each.repeat(times, 1)[:rows] for each in given])
    return [packed.words, packed.scale, None]


def case(shape: Shape, kind: str, num_rows: int) -> tuple[Callable[[], None], int, int]:
    """Return a function that multiplies rows by matrices of several layers, the number of layers, and the number of
    experts that are hit in each."""
    suffix = "" if kind == "dense" else f"_{kind}"
    both = [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)]
    num_layers = 1 + int(LEAST_BYTES // num_bytes(shape, kind))
    layers = [[stack(kind, shape.num_experts * rows, width) for rows, width in both] for _ in range(num_layers)]
    x = torch.randn(num_rows, shape.hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(shape.num_experts)[: shape.top_k] for _ in range(num_rows)]).int().cuda()
    weights = torch.rand(num_rows, shape.top_k, device="cuda")

    def run() -> None:
        for up, down in layers:
            topk_ids = ids.clone()  # whose order is not known
            setattr(topk_ids, "num_experts", shape.num_experts)  # noqa: B010 - as `moe_route` leaves it
            given = {"num_experts": shape.num_experts}
            h = getattr(cuda, f"expert_gate_up{suffix}")(x, topk_ids, *up, **given, **SILU)
            getattr(cuda, f"expert_down{suffix}")(h, topk_ids, weights, *down, **given)

    return run, num_layers, len(ids.unique())


def num_bytes(shape: Shape, kind: str) -> float:
    """Return the bytes of the matrices of all experts of a layer."""
    return shape.num_experts * 3 * shape.inner * shape.hidden * BITS[kind] / 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", choices=BITS, default=[*BITS])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8])
    args = parser.parse_args()
    speed = bandwidth()
    for name, kind, num_rows in itertools.product(args.shapes, args.kinds, args.rows):
        run, num_layers, num_hit = case(SHAPES[name], kind, num_rows)
        limit = num_bytes(SHAPES[name], kind) * num_hit / SHAPES[name].num_experts / speed * 1e6
        found = microseconds(run) / num_layers
        print(f"{name:18} {kind:6} {num_rows:3} rows, {num_hit:3} experts: {found:7.1f} us, limit {limit:6.1f}")


if __name__ == "__main__":
    main()
