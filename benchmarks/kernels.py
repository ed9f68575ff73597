"""Efficiency of the CPU kernels relative to the machine's limits: `python -m benchmarks.kernels`.

Shapes are those of Qwen2.5-0.5B. Times are medians of several runs over weights that do not fit in a cache. The output
is a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from engine.dtypes import latent_groups, to_bf16
from engine.executors.cpu.program import large_pages
from engine.ops import build, cpu
from engine.ops.cpu.calls import Packed
from engine.ops.reference import latent_parts, to_cached_int8, to_latent_int8
from engine.ops.sampling_rows import SamplingRows

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 896, 4864, 24, 14, 2, 64, 151936
LINEARS = {"qkv": (1152, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
OPS = ("linear", "linear_int8", "linear_a8w8", "linear_int4")
ATTENTIONS = ((1, 1, 1024), (1, 1, 8192), (32, 1, 128), (32, 1, 2048), (1, 128, 0), (1, 1024, 0), (1, 1024, 7168))
# Latent attention has the shape of DeepSeek-V2-Lite.
LATENT_HEADS, LATENT, ROPE, LATENT_Q_DIM = 16, 512, 64, 192
LATENT_ATTENTIONS = ((1, 1, 128), (1, 1, 8192), (8, 1, 2048), (1, 512, 7680))
RNG = np.random.default_rng(0)


def random_f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def seconds(run, repeats: int) -> float:
    """Return the median time of a call in seconds. The first call is not counted."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@functools.cache
def limits_library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/limits.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"]
        subprocess.run(
            [*build.compiler(), *flags, "-o", path, str(Path(__file__).parent / "machine_peaks.cc")], check=True
        )
        lib = ctypes.CDLL(path)
    lib.peak_bf16_flops.restype = lib.read_bandwidth.restype = ctypes.c_double
    return lib


def measured_limits(threads: int) -> tuple[float, float]:
    """Measure bf16 FLOP/s and the bytes/s that all threads read. Measure this close to a benchmark, because machines
    drift."""
    lib, data = limits_library(), large_pages(1 << 29)
    data[:] = 1
    flops = max(lib.peak_bf16_flops(threads, ctypes.c_int64(10_000_000)) for _ in range(3))
    address, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.size // 8)
    return flops, max(lib.read_bandwidth(threads, address, size, streams) for _ in range(3) for streams in (1, 2, 4))


def in_large_pages(array: np.ndarray) -> np.ndarray:
    """Copy the array into large pages, where the engine keeps its activations."""
    copy = large_pages(array.nbytes)[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def prepared(op: str, inputs: list, y: np.ndarray, attributes: dict | None = None) -> Callable[[], None]:
    """Return a function that computes `op` into `y`."""
    return cpu.load().prepared(op, inputs, y, attributes or {})


def packed(op: str, rows: np.ndarray) -> np.ndarray:
    """Return the weight `rows` in the layout that the engine uses for `op`."""
    ops = cpu.load()
    if not (num_bytes := ops.packed_bytes(op, rows.shape, rows.itemsize)):
        return rows
    assert num_bytes == rows.nbytes, "a copy holds no more than the shape says"
    into = large_pages(num_bytes)
    ops.pack(op, rows, into)
    return into[:num_bytes].view(rows.dtype).reshape(rows.shape).view(Packed)


@functools.cache
def weights_of(name: str, op: str) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return the weights with their scales, of as many layers as needed to keep them out of the caches."""
    num_out, width = LINEARS.get(name, (VOCAB, HIDDEN))
    copies = 1 if name == "logits" else LAYERS
    if op == "linear":
        bits = packed(op, to_bf16(random_f32(num_out, width)))
        return [(bits.copy(), None) for _ in range(copies)]
    kind, columns = (np.uint8, width // 2) if op == "linear_int4" else (np.int8, width)
    codes = RNG.integers(-128, 128, (num_out, columns), np.int8).view(kind)
    scale = packed(op, to_bf16(random_f32(num_out, width // 64))) if op == "linear_int4" else random_f32(num_out)
    return [(packed(op, codes), scale.copy()) for _ in range(copies)]


def bench_linear(name: str, op: str, tokens: int, limits: tuple[float, float]) -> dict:
    """Measure a linear op.

    The limit is the larger of the times to read the weight and to compute the products; int8 products take half the
    time of bf16 products.
    """
    num_out, width = LINEARS.get(name, (VOCAB, HIDDEN))
    x, y = (in_large_pages(array) for array in (random_f32(tokens, width), np.zeros((tokens, num_out), np.float32)))
    weights = weights_of(name, op)
    # All calls write to the same memory, because fresh memory for the outputs would add to the time.
    calls = [prepared(op, [x, weight, *([] if scale is None else [scale])], y) for weight, scale in weights]

    def run():
        for call in calls:
            call()

    each = seconds(run, 3 if tokens >= 128 else 7) / len(weights)
    flops, num_bytes = 2 * tokens * num_out * width, sum(a.nbytes for a in weights[0] if a is not None)
    peak = limits[0] * (1 if op == "linear" else 2)
    best = max(flops / peak if peak else 0, num_bytes / limits[1])
    return row(f"{op} {name} T={tokens}", each, best, f"{flops / each / 1e9:.0f} GFLOP/s")


def bench_attention(requests: int, tokens: int, context: int, bits: int, limits: tuple[float, float]) -> dict:
    """Measure attention. The limit is the larger of the times to read keys and values and to compute the products."""
    blocks, rows = -(-(context + tokens) // 64), requests * tokens
    made = {8: to_cached_int8, 16: to_bf16}[bits](random_f32(requests * blocks, 2, KV_HEADS, 64, HEAD_DIM))
    caches = [made.copy() for _ in range(4)]
    starts = np.arange(requests + 1, dtype=np.int32) * tokens
    tables = RNG.permutation(requests * blocks).astype(np.int32)
    widths = (HEADS + 2 * KV_HEADS) * HEAD_DIM, HEAD_DIM, HEADS * HEAD_DIM
    qkv, angles, out = (in_large_pages(random_f32(rows, width)) for width in widths)
    lens = np.full(requests, context, np.int32)

    given = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "scale": 0.125}
    tables = tables.reshape(requests, blocks)
    calls = [prepared("paged_attention", [qkv, angles, cache, starts, lens, tables], out, given) for cache in caches]

    def run():
        for call in calls:
            call()

    each = seconds(run, 5) / len(caches)
    seen = requests * (tokens * context + tokens * (tokens + 1) // 2)
    flops, num_bytes = 4 * seen * HEADS * HEAD_DIM, made.nbytes * (context + tokens) // (blocks * 64)
    best = max(flops / limits[0] if limits[0] else 0, num_bytes / limits[1])
    name = f"attention of {bits} bits B={requests} T={tokens} context={context}"
    return row(name, each, best, f"{flops / each / 1e9:.0f} GFLOP/s, {num_bytes / each / 1e9:.1f} GB/s")


def bench_latent_attention(requests: int, tokens: int, context: int, bits: int, limits: tuple[float, float]) -> dict:
    """Measure latent attention. The limit is the larger of the times to read the cache and to compute the products."""
    blocks, rows, width = -(-(context + tokens) // 64), requests * tokens, LATENT + ROPE
    numbers, groups = random_f32(requests * blocks, 64, width), latent_groups(LATENT, ROPE)
    if bits == 8:
        made = np.empty((len(numbers), 64, width + 2 * len(groups)), np.int8)
        codes, scales = latent_parts(made, groups)
        codes[...], scales[...] = to_latent_int8(numbers, groups)
    else:
        made = to_bf16(numbers)
    caches = [in_large_pages(made) for _ in range(4)]
    starts, lens = np.arange(requests + 1, dtype=np.int32) * tokens, np.full(requests, context, np.int32)
    tables = RNG.permutation(requests * blocks).astype(np.int32).reshape(requests, blocks)
    sizes = LATENT_HEADS * LATENT, LATENT_HEADS * LATENT_Q_DIM, width, ROPE
    q_latent, q, latent, angles = (in_large_pages(random_f32(rows, size)) for size in sizes)
    out, norm = in_large_pages(random_f32(rows, sizes[0])), np.ones(LATENT, np.float32)
    given = {"num_heads": LATENT_HEADS, "epsilon": 1e-6, "scale": 0.1, "log_scale": 0.0, "log_scale_from": 1}
    arrays = [[q_latent, q, latent, norm, angles, cache, starts, lens, tables] for cache in caches]
    calls = [prepared("latent_attention", each, out, given) for each in arrays]

    def run():
        for call in calls:
            call()

    each = seconds(run, 5) / len(caches)
    seen = requests * (tokens * context + tokens * (tokens + 1) // 2)
    flops, num_bytes = 2 * seen * LATENT_HEADS * (2 * LATENT + ROPE), made.nbytes * (context + tokens) // (blocks * 64)
    best = max(flops / limits[0] if limits[0] else 0, num_bytes / limits[1])
    name = f"latent attention of {bits} bits B={requests} T={tokens} context={context}"
    return row(name, each, best, f"{flops / each / 1e9:.0f} GFLOP/s, {num_bytes / each / 1e9:.1f} GB/s")


def bench_small(name: str, run, num_bytes: int, limits: tuple[float, float]) -> dict:
    each = seconds(run, 15)
    return row(name, each, num_bytes / limits[1], f"{num_bytes / each / 1e9:.1f} GB/s")


def row(name: str, each: float, best: float, rate: str) -> dict:
    print(f"{name:<40} {each * 1e6:>11.1f} us {best * 1e6:>11.1f} us {best / each:>7.0%}   {rate}", flush=True)
    return {"name": name, "seconds": each, "limit_seconds": best}


def sampling_cases(rows: int) -> dict[str, SamplingRows]:
    cases = {name: SamplingRows.greedy(rows) for name in ("greedy", "temperature", "top_p", "top_k", "logprobs")}
    for name in ("temperature", "top_p", "top_k"):
        cases[name].temperature[:] = 0.8
    cases["top_p"].top_p[:] = 0.9
    cases["top_k"].top_k[:] = 50
    cases["logprobs"].num_logprobs[:] = 5
    return cases


def cases() -> Iterator[tuple[str, Callable[[tuple[float, float]], dict]]]:
    """Yield the beginning of each case's name and the function that measures it."""
    for op in OPS:
        weights_of.cache_clear()
        for tokens in (1, 2, 4, 8, 32, 128, 1024):
            for name in LINEARS:
                yield f"{op} {name} T={tokens}", functools.partial(bench_linear, name, op, tokens)
        for tokens in (1, 8, 32):
            yield f"{op} logits T={tokens}", functools.partial(bench_linear, "logits", op, tokens)
    for shape, bits in itertools.product(ATTENTIONS, (16, 8)):
        yield "attention", functools.partial(bench_attention, *shape, bits)
    for shape, bits in itertools.product(LATENT_ATTENTIONS, (16, 8)):
        yield "latent attention", functools.partial(bench_latent_attention, *shape, bits)
    for name, run, num_bytes in small_cases():
        yield name, functools.partial(bench_small, name, run, num_bytes)


def small_cases() -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield the name of each small case, the function to time, and the bytes that it reads and writes."""
    for tokens in (1, 32, 1024):
        x, weight, wide = random_f32(tokens, HIDDEN), random_f32(HIDDEN), random_f32(tokens, 2 * FFN)
        norm = functools.partial(cpu.add_rms_norm, x, x.copy(), weight, epsilon=1e-6)
        yield f"add_rms_norm T={tokens}", norm, x.nbytes * 4
        yield f"swiglu T={tokens}", functools.partial(cpu.swiglu, wide), wide.nbytes * 3 // 2
    for scale in (1.0, 4.0):
        logits = random_f32(32, VOCAB) * np.float32(scale)
        for name, rows in sampling_cases(32).items():
            sample = functools.partial(cpu.sample, logits, rows)
            yield f"sample {name} S=32 sigma={scale:.0f}", sample, logits.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    options = parser.parse_args()
    cpu.set_num_threads(options.threads)
    limits = measured_limits(options.threads)
    print(f"{cpu.cpu_isa()}, {options.threads} threads: bf16 {limits[0] / 1e9:.0f} GFLOP/s, {limits[1] / 1e9:.1f} GB/s")
    print(f"{'':<40} {'measured':>14} {'limit':>14}   ratio")
    rows = [case(limits) for name, case in cases() if options.only in name]
    print(json.dumps({"isa": cpu.cpu_isa(), "threads": options.threads, "limits": limits, "rows": rows}))


if __name__ == "__main__":
    main()
