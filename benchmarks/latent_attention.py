"""Time of latent attention alone on one GPU, in the shape of DeepSeek-V2-Lite: `python -m benchmarks.latent_attention`.

Each case is a CUDA graph of a few layers with a cache each. The share of the memory bandwidth counts the cached rows.
With --products the products before and after attention are measured as well, in absorbed and in expanded form.
"""

from __future__ import annotations

import argparse
from types import ModuleType

import torch

from benchmarks.gpu import bandwidth
from benchmarks.gpu_times import microseconds as graph_time
from engine.dtypes import latent_groups
from engine.ops import cuda
from engine.ops.cuda import invariant
from engine.ops.cuda.prefill_attention import KnownStarts, PromptChunk

HEADS, LATENT, ROPE, Q_DIM, V_DIM, BLOCK = 16, 512, 64, 192, 128, 64
INT8_ROW = LATENT + ROPE + 2 * len(latent_groups(LATENT, ROPE))
CASES = (1, 1024, 1), (8, 1024, 1), (64, 1024, 1), (256, 1024, 1), (32, 8192, 1), (1, 0, 8192), (1, 6144, 2048)
CHUNKS = (1, 0, 8192), (8, 0, 1024), (16, 0, 512), (1, 6144, 2048), (1, 24576, 8192), (1, 7680, 512), (1, 7936, 256)


def microseconds(  # noqa: PLR0913
    ops: ModuleType, num_requests: int, cached: int, new: int, is_int8: bool, products: str = ""
) -> float:
    """Return the time of one layer for requests with `cached` tokens in the cache and `new` tokens each; `products` is
    the form of attention that is measured with its products."""
    num_tokens, width = num_requests * new, LATENT + ROPE
    num_blocks = -(-(cached + new) // BLOCK)
    layers = 2 if num_requests * cached > 100_000 or new > 1 else 8

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def numbers(count: int, step: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device="cuda") * step

    rows = randn(num_tokens, HEADS * LATENT), randn(num_tokens, HEADS * Q_DIM), randn(num_tokens, width)
    angles, norm = torch.randn(num_tokens, ROPE, device="cuda"), torch.ones(LATENT, device="cuda")
    blocks = num_requests * num_blocks, BLOCK
    if is_int8:  # every byte is 60: small codes and scales
        caches = [torch.full((*blocks, INT8_ROW), 60, device="cuda", dtype=torch.int8) for _ in range(layers)]
    else:
        caches = [randn(*blocks, width) for _ in range(layers)]
    lens = torch.full((num_requests,), cached, dtype=torch.int32, device="cuda")
    where = numbers(num_requests + 1, new), lens, numbers(num_requests * num_blocks, 1).view(num_requests, -1)
    given = {"num_heads": HEADS, "epsilon": 1e-6, "scale": 0.1}
    key_weight, value_weight = randn(HEADS * LATENT, Q_DIM - ROPE), randn(HEADS * V_DIM, LATENT)
    long = [PromptChunk(each, each * new, each * new + new, cached) for each in range(num_requests)]
    starts = KnownStarts(where[0], long if products == "expanded" else ())

    def run() -> None:
        for cache in caches:
            if products:
                of_all = norm, angles, cache, starts, *where[1:], value_weight
                ops.projected_latent_attention(rows[1], key_weight, *rows[1:], *of_all, **given)
            else:
                ops.latent_attention(*rows, norm, angles, cache, *where, **given)

    return graph_time(run) / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--invariant", action="store_true", help="use the kernels of BATCH_INVARIANT=1")
    parser.add_argument("--int8-cache", action="store_true", help="use an int8 KV cache")
    parser.add_argument("--products", action="store_true", help="measure long prompts in both forms, with products")
    args = parser.parse_args()
    if args.products:
        print(torch.cuda.get_device_name())
        for num_requests, cached, new in CHUNKS:
            case = num_requests, cached, new, args.int8_cache
            times = [microseconds(cuda, *case, kind) for kind in ("absorbed", "expanded")]
            shown = "absorbed {:8.1f} us, expanded {:8.1f} us".format(*times)
            print(f"{num_requests:4} requests, {cached:5} cached, {new:5} new tokens: {shown}")
        return
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, {speed / 1e12:.2f} TB/s")
    for num_requests, cached, new in CASES:
        time = microseconds(invariant if args.invariant else cuda, num_requests, cached, new, args.int8_cache)
        read = num_requests * (cached + new) * (INT8_ROW if args.int8_cache else 2 * (LATENT + ROPE))
        share = read / speed * 1e6 / time
        print(f"{num_requests:4} requests, {cached:5} cached, {new:5} new tokens: {time:8.1f} us, {share:4.0%}")


if __name__ == "__main__":
    main()
