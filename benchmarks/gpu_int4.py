"""Time of products with 4-bit weights on one GPU: `python -m benchmarks.gpu_int4`.

Shows microseconds of each product of a layer of Llama-3-8B and their sum: in bfloat16, with 4-bit weights and the
kernels of all GPUs, and with that for Hopper where it is used. Each case is a CUDA graph of products with several
matrices, so that few of the weights are in the L2 cache. gate_up includes its activation.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_times import microseconds
from engine.executors.cuda.compilation import KernelCompiler
from engine.ops import cuda
from engine.ops.cuda import lowbit

INT4_GEMM = lowbit.int4_gemm
LEAST_BYTES = 300e6  # that all matrices of a case have


class Product(NamedTuple):
    name: str
    columns: int
    width: int
    is_gated: bool = False


PRODUCTS = [
    Product("gate_up", 28672, 4096, is_gated=True),
    Product("down", 4096, 14336),
    Product("qkv", 6144, 4096),
    Product("o", 4096, 4096),
]


def packed(product: Product, group: int) -> list[Any]:
    """Return a random packed matrix."""
    shape = product.columns, product.width // (4 * group)
    words = torch.randint(-32768, 32768, (*shape, group), device="cuda", dtype=torch.int16)
    scales = 0.01 + 0.01 * torch.rand(shape[1], shape[0], 4, device="cuda")
    return [words, scales.bfloat16().view(torch.int64).squeeze(2), None]


def dense(product: Product) -> list[Any]:
    return [torch.randn(product.columns, product.width, device="cuda", dtype=torch.bfloat16)]


def cases(product: Product, group: int) -> dict[str, Callable[[torch.Tensor], None]]:
    """Return functions that multiply rows by several matrices, of which there are `.copies`."""
    prefix = "gated_" if product.is_gated else ""
    num_copies = int(LEAST_BYTES // (product.columns * product.width // 2)) + 1
    weights = {"bfloat16": [dense(product) for _ in range(num_copies // 4 + 1)]}
    weights["4 bits, other kernels"] = weights["4 bits"] = [packed(product, group) for _ in range(num_copies)]

    def runner(name: str, matrices: list[list[Any]]) -> Callable[[torch.Tensor], None]:
        op = getattr(cuda, f"{prefix}linear" if name == "bfloat16" else f"{prefix}linear_int4")

        def run(x: torch.Tensor) -> None:
            lowbit.int4_gemm = None if "other" in name else INT4_GEMM  # type: ignore[assignment]
            for matrix in matrices:
                op(x, *matrix)

        run.copies = len(matrices)  # type: ignore[attr-defined]
        return run

    return {name: runner(name, matrices) for name, matrices in weights.items()}


def run_all(runs: list[Callable[[torch.Tensor], None]], inputs: list[torch.Tensor]) -> None:
    for x in inputs:
        for run in runs:
            run(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--group", type=int, choices=[64, 32], default=64, help="columns that share a scale")
    args = parser.parse_args()
    compiler, sums = KernelCompiler(torch.device("cuda", 0), lambda progress: None), dict[tuple[str, int], float]()
    for product in PRODUCTS:
        runs = cases(product, args.group)
        inputs = [torch.randn(rows, product.width, device="cuda", dtype=torch.bfloat16) for rows in args.rows]
        compiler.compile_missing(functools.partial(run_all, list(runs.values()), inputs))
        for x in inputs:
            times = {name: microseconds(lambda run=run, x=x: run(x)) / run.copies for name, run in runs.items()}  # type: ignore
            for name, time in times.items():
                sums[name, len(x)] = sums.get((name, len(x)), 0) + time
            shown = ", ".join(f"{name} {time:7.1f}" for name, time in times.items())
            print(f"{product.name:8} {len(x):5} rows: {shown}", flush=True)
    for rows in args.rows:
        shown = ", ".join(f"{name} {sums[name, rows]:7.1f}" for name in runs)
        print(f"{'sum':8} {rows:5} rows: {shown}", flush=True)


if __name__ == "__main__":
    main()
