"""Matrix products of 8-bit floats on one GPU: `python -m benchmarks.fp8`.

First the kernels are checked: the codes of activations against numpy, and the products of every tile against float64.
Then every tile and torch's `_scaled_mm` are timed for the linear layers of Llama-3-8B, inside a CUDA graph, over
several copies of the weights so that these come from memory and not from the L2 cache. `weight-only` is `linear_fp8`
with bf16 activations. For each number of rows the fastest are printed, with the share of the limit: the larger of the
time to read the weights and the time of the products at the peak rate. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.executors.cuda.compilation import KernelCompiler
from engine.ops import reference
from engine.ops.cuda import fp8
from engine.ops.cuda.fp8_activations import Fp8Rows, quantize
from engine.ops.cuda.fp8_gemm import Fp8GemmTile, Weights, gemm, scaled_mm

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
ROWS = (1, 8, 16, 32, 64, 256, 2048, 8192)
CHECKED = ((1, 70, 300), (77, 1000, 1500), (64, 6144, 4096), (300, 4096, 14336))
PEAK = 1979e12  # operations per second on 8-bit floats, H100 SXM and H200
COLD = 200 << 20  # bytes of weights that are cycled through; more than the L2 cache
SAMPLES, SAMPLE_S = 5, 0.01

Candidate = Callable[[Tensor, Fp8Rows, Weights, Tensor], Any]  # of x, x quantized, the weights, and the output

FEW = [
    Fp8GemmTile(64, columns, 4, stages, splits=splits)
    for columns, stages in ((32, 7), (64, 6), (128, 5))
    for splits in (1, 2, 4)
]
MIDDLE = [
    *(Fp8GemmTile(64, 128, 4, 4, splits=splits) for splits in (1, 2, 4)),
    *(Fp8GemmTile(128, 64, 4, 4, splits=splits) for splits in (1, 2)),
    *(Fp8GemmTile(128, 128, 8, 4, splits=splits) for splits in (1, 2)),
    Fp8GemmTile(128, 128, 8, 4, is_exact=False),
    Fp8GemmTile(64, 256, 4, 4, is_exact=False),
]
MANY = [
    Fp8GemmTile(64, 128, 4, 3),
    Fp8GemmTile(64, 128, 4, 4),
    Fp8GemmTile(128, 64, 4, 4),
    Fp8GemmTile(128, 128, 8, 4),
    Fp8GemmTile(128, 128, 8, 4, is_persistent=True),
    *(Fp8GemmTile(128, 128, 4, 3, is_persistent=each, is_exact=False) for each in (False, True)),
    *(Fp8GemmTile(128, 128, 8, 4, is_persistent=each, is_exact=False) for each in (False, True)),
    *(Fp8GemmTile(128, 256, 8, 4 - each, is_persistent=each, is_exact=False) for each in (False, True)),
    *(Fp8GemmTile(256, 128, 8, 4 - each, is_persistent=each, is_exact=False) for each in (False, True)),
    *(Fp8GemmTile(64, 256, 4, 4, is_persistent=each, is_exact=False) for each in (False, True)),
]
ALL = tuple({*FEW, *MIDDLE, *MANY})


def tiles_for(num_rows: int) -> list[Fp8GemmTile]:
    """Return the tiles that are tried."""
    return FEW if num_rows <= 64 else MIDDLE if num_rows <= 256 else MANY


def name_of(tile: Fp8GemmTile) -> str:
    marks = [f"/{tile.splits}"] * (tile.splits > 1) + [" persistent"] * tile.is_persistent
    return f"{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}" + "".join(marks) + " fast" * (not tile.is_exact)


def matrix(columns: int, width: int, *, is_blocked: bool) -> Weights:
    """Return a random packed matrix."""
    numbers = torch.randn(columns, width, device="cuda").mul(64).clamp(-448, 448).to(torch.float8_e4m3fn)
    groups = -(-width // 128) if is_blocked else 1
    scale = torch.rand(columns, groups, device="cuda") * 1e-4 + 1e-4
    return Weights(*fp8.pack(numbers.view(torch.uint8), scale), None)


def values(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return what codes [R, blocks * 128] and scales [1 or blocks, R] stand for, in float64."""
    each = scale.t().double() if len(scale) == 1 else scale.t().double().repeat_interleave(128, 1)
    return numbers.double() * each


def check() -> dict[str, float]:
    """Raise AssertionError if a kernel is wrong. Return the largest relative error by tile, over all shapes."""
    rng = np.random.default_rng(0)
    errors: dict[str, float] = {}
    for num_rows, columns, width in CHECKED:
        for is_blocked in (False, True):
            x = torch.from_numpy(rng.standard_normal((num_rows, width)).astype(np.float32)).cuda().bfloat16()
            rows, weights = quantize(x, is_blocked=is_blocked), matrix(columns, width, is_blocked=is_blocked)
            _check_codes(x, rows, is_blocked=is_blocked)
            exact = values(rows.numbers, rows.scale) @ values(weights.numbers, weights.scale).t()
            for tile in ALL:
                if is_blocked and not tile.is_exact:
                    continue
                out = torch.empty(num_rows, columns, device="cuda", dtype=torch.bfloat16)
                gemm(rows, weights, out, tile)
                error = float((out.double() - exact).norm() / exact.norm())
                assert error < 0.01, f"{tile}, {num_rows} x {columns} x {width}: relative error {error}"
                errors[name_of(tile)] = max(error, errors.get(name_of(tile), 0))
            if not is_blocked and columns % 16 == 0:
                for is_fast in (False, True):
                    found = scaled_mm(rows, weights, is_fast=is_fast)
                    name = f"scaled_mm{' fast' * is_fast}"
                    errors[name] = max(errors.get(name, 0), float((found.double() - exact).norm() / exact.norm()))
    return errors


def _check_codes(x: Tensor, rows: Fp8Rows, *, is_blocked: bool) -> None:
    codes, scale = reference.to_fp8_rows(x.float().cpu().numpy(), is_blocked=is_blocked)
    assert np.array_equal(rows.scale.t().cpu().numpy(), scale), "scales differ from the definition"
    found = rows.numbers.view(torch.uint8).view(len(x), -1, 64, 2).transpose(2, 3).reshape(len(x), -1)
    assert np.array_equal(found[:, : x.shape[1]].cpu().numpy(), codes), "codes differ from the definition"


def check_invariance() -> bool:
    """Return whether every tile that sums without splits gives the same bits."""
    x, weights = torch.randn(300, 4096, device="cuda").bfloat16(), matrix(6144, 4096, is_blocked=False)
    rows, found = quantize(x, is_blocked=False), []
    for tile in ALL:
        if tile.is_exact and tile.splits == 1:
            found.append(torch.empty(300, 6144, device="cuda", dtype=torch.bfloat16))
            gemm(rows, weights, found[-1], tile)
    return all(torch.equal(each, found[0]) for each in found)


def candidates(num_rows: int, *, is_blocked: bool) -> Iterator[tuple[str, Candidate]]:
    """Yield the names and functions of everything that is timed for a number of rows."""
    for tile in tiles_for(num_rows):
        if tile.is_exact or not is_blocked:
            yield name_of(tile), partial(_by_tile, tile)
    if not is_blocked:
        for is_fast in (False, True):
            yield f"scaled_mm{' fast' * is_fast}", partial(_by_cublas, is_fast)
    yield "weight-only", lambda x, rows, weights, out: fp8.linear_fp8(x, weights.words, weights.scale)


def _by_tile(tile: Fp8GemmTile, x: Tensor, rows: Fp8Rows, weights: Weights, out: Tensor) -> None:
    gemm(rows, weights, out, tile)


def _by_cublas(is_fast: bool, x: Tensor, rows: Fp8Rows, weights: Weights, out: Tensor) -> Tensor:
    return scaled_mm(rows, weights, is_fast=is_fast)


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Return the median time of one of several calls, which are captured in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, count = [], 1
    for sample in range(SAMPLES + 1):
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end) / count / len(calls))
        if sample == 0:
            count = max(1, int(SAMPLE_S / (times.pop() * len(calls))))
    return statistics.median(times)


def measure(num_rows: int, name: str, bandwidth: float, *, is_blocked: bool) -> dict[str, float]:
    """Return the seconds of each candidate for one linear layer, and print the fastest."""
    columns, width = SHAPES[name]
    copies = max(2, -(-COLD // (columns * width)))
    matrices = [matrix(columns, width, is_blocked=is_blocked) for _ in range(copies)]
    x = torch.randn(num_rows, width, device="cuda").bfloat16()
    rows, out = quantize(x, is_blocked=is_blocked), x.new_empty(num_rows, columns)
    found = {"quantize": seconds([partial(quantize, x, is_blocked=is_blocked)] * 8)}
    for label, run in candidates(num_rows, is_blocked=is_blocked):
        found[label] = seconds([partial(run, x, rows, each, out) for each in matrices])
    limit = max(columns * width / bandwidth, 2 * num_rows * columns * width / PEAK)
    ranked = sorted((each for each in found if each != "quantize"), key=lambda each: found[each])
    for label in dict.fromkeys([*ranked[:4], *(each for each in ranked if each[0] in "sw")]):
        rate = 2 * num_rows * columns * width / found[label] / 1e12
        print(
            f"{num_rows:6} {name:8}{label:32}{1e6 * found[label]:9.1f} us{rate:8.0f} TFLOP/s"
            f"{columns * width / found[label] / 1e12:7.2f} TB/s{limit / found[label]:6.0%} of the limit",
            flush=True,
        )
    print(f"{'':15}quantize{1e6 * found['quantize']:33.1f} us", flush=True)
    return found


def read_bandwidth() -> float:
    """Return the bytes per second at which this GPU sums numbers."""
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return data.numel() * 4 / seconds([data.sum])


def compile_all() -> None:
    """Compile all kernels on all cores before they are checked and timed."""
    KernelCompiler(torch.device("cuda", 0), lambda text: None).compile_missing(run_all)


def run_all() -> None:
    sizes = [(num_rows, *shape) for num_rows in ROWS for shape in SHAPES.values()]
    for is_blocked in (False, True):
        for num_rows, columns, width in [*sizes, *CHECKED]:
            weights = matrix(columns, width, is_blocked=is_blocked)
            x = torch.randn(num_rows, width, device="cuda").bfloat16()
            rows, out = quantize(x, is_blocked=is_blocked), x.new_empty(num_rows, columns)
            if (num_rows, columns, width) in CHECKED:
                for tile in ALL:
                    gemm(rows, weights, out, tile)
            else:
                for _, run in candidates(num_rows, is_blocked=is_blocked):
                    run(x, rows, weights, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--blocked", nargs="*", type=int, default=(64, 256, 2048, 8192), help="one scale per 128 x 128")
    args = parser.parse_args()
    compile_all()
    errors, bandwidth = check(), read_bandwidth()
    is_invariant = check_invariance()
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth / 1e12:.2f} TB/s; all kernels agree with the definition")
    print("relative errors:", ", ".join(f"{name} {error:.5f}" for name, error in sorted(errors.items())))
    print("tiles without splits give", "equal bits" if is_invariant else "DIFFERENT bits")
    results: dict[str, Any] = {"bandwidth": bandwidth, "errors": errors, "is_invariant": is_invariant}
    for is_blocked, counts in ((False, args.rows), (True, args.blocked)):
        print("\n128x128 scales" if is_blocked else "\nscales by row")
        for num_rows in counts:
            found = {name: measure(num_rows, name, bandwidth, is_blocked=is_blocked) for name in SHAPES}
            best = sum(
                min(v for k, v in each.items() if k not in ("quantize", "weight-only")) for each in found.values()
            )
            quantized, kept = (sum(each[key] for each in found.values()) for key in ("quantize", "weight-only"))
            ms = [f"{1e3 * LAYERS * each:.2f} ms" for each in (best, quantized, kept)]
            print(f"{num_rows:6} all layers: best {ms[0]}, quantization {ms[1]}, weight-only {ms[2]}", flush=True)
            results[f"{'blocked ' * is_blocked}{num_rows}"] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
