"""Builds the inputs of paged_attention: requests of given lengths over one shuffled pool of blocks."""

from dataclasses import dataclass

import numpy as np

from engine.dtypes import to_bf16
from engine.ops.reference import to_cached_int8


@dataclass
class PagedBatch:
    """`context[b]` positions are in the cache already, `count[b]` new tokens come."""

    context: list[int]
    count: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    block_size: int = 8
    dtype: str = "f32"
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        num_tokens = sum(self.count)
        self.query_starts = np.cumsum([0, *self.count], dtype=np.int32)
        self.context_lens = np.array(self.context, np.int32)
        lengths = self.context_lens + np.diff(self.query_starts)
        max_blocks = int(-(-lengths.max() // self.block_size)) + 1
        num_blocks = max_blocks * len(self.context)
        self.block_tables = rng.permutation(num_blocks).astype(np.int32).reshape(-1, max_blocks)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = rng.standard_normal((num_tokens, width)).astype(np.float32)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(self.context, self.count, strict=True)])
        angles = positions[:, None] * 0.3 ** np.arange(self.rotary_dim // 2)
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        cache = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        cache = rng.standard_normal(cache).astype(np.float32)
        self.sinks = rng.standard_normal(self.num_heads).astype(np.float32) if self.has_sinks else None
        self.kv_cache = {"f32": np.array, "bf16": to_bf16, "int8": to_cached_int8}[self.dtype](cache)

    @property
    def attributes(self) -> dict[str, float]:
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        return {**heads, "scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}

    def run(self, ops, kv_cache: np.ndarray) -> np.ndarray:
        return self.run_part(ops, kv_cache, {b: (0, n) for b, n in enumerate(self.count)})

    def run_part(self, ops, kv_cache: np.ndarray, part: dict[int, tuple[int, int]]) -> np.ndarray:
        """Compute a part of the tokens of some requests in one step: for request b those from `part[b][0]` to below
        `part[b][1]`."""
        chosen = list(part)
        rows = np.concatenate([np.arange(*part[b]) + self.query_starts[b] for b in chosen])
        query_starts = np.cumsum([0, *(end - first for first, end in part.values())], dtype=np.int32)
        context_lens = (self.context_lens[chosen] + [first for first, _ in part.values()]).astype(np.int32)
        arrays = self.qkv[rows], self.cos_sin[rows], kv_cache, query_starts, context_lens, self.block_tables[chosen]
        out, same = ops.paged_attention(*arrays, self.sinks, **self.attributes)
        assert same is kv_cache
        return out
