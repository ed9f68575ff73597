"""Builds the inputs of latent_attention: requests of given lengths over one shuffled pool of blocks."""

import dataclasses

import numpy as np

from engine.dtypes import latent_groups, to_bf16
from engine.ops.reference import latent_parts, to_latent_int8
from tests.pure.paged_batch import PagedBatch


@dataclasses.dataclass
class LatentBatch:
    """`context[b]` positions are in the cache already, `count[b]` new tokens come."""

    context: list[int]
    count: list[int]
    num_heads: int = 4
    latent_dim: int = 24
    rope_dim: int = 8
    nope_dim: int = 10
    block_size: int = 8
    dtype: str = "f32"
    log_scale: float = 0.0

    def __post_init__(self):
        sizes = {"rotary_dim": self.rope_dim, "block_size": self.block_size}
        paged = PagedBatch(self.context, self.count, **sizes)  # its tables, positions and angles
        rng = np.random.default_rng(1)
        self.starts, self.lens, self.tables = paged.query_starts, paged.context_lens, paged.block_tables
        self.cos_sin, self.norm_weight = paged.cos_sin, rng.standard_normal(self.latent_dim).astype(np.float32) + 1
        self.attributes = {"num_heads": self.num_heads, "epsilon": 1e-6, "scale": 0.3, "log_scale": self.log_scale}
        widths = self.num_heads * self.latent_dim, self.num_heads * (self.nope_dim + self.rope_dim)
        row_width = self.latent_dim + self.rope_dim
        self.rows = [rng.standard_normal((len(paged.qkv), n), np.float32) for n in (*widths, row_width)]
        cache = rng.standard_normal((self.tables.size, self.block_size, row_width), np.float32)
        self.kv_cache = {"f32": np.array, "bf16": to_bf16, "int8": self._to_int8}[self.dtype](cache)

    def _to_int8(self, rows):
        groups = latent_groups(self.latent_dim, self.rope_dim)
        made = np.empty((*rows.shape[:2], rows.shape[2] + 2 * len(groups)), np.int8)
        codes, scales = latent_parts(made, groups)
        codes[...], scales[...] = to_latent_int8(rows, groups)
        return made

    def run(self, ops, kv_cache, part=None):
        """Run the tokens first .. end of request b for each (first, end) of `part`, or all, in one step."""
        part = part or {b: (0, n) for b, n in enumerate(self.count)}
        chosen, ends = list(part), list(part.values())
        rows = np.concatenate([np.arange(*part[b]) + self.starts[b] for b in chosen])
        starts = np.cumsum([0, *(end - first for first, end in ends)], dtype=np.int32)
        lens = (self.lens[chosen] + [first for first, _ in ends]).astype(np.int32)
        given = [*(each[rows] for each in self.rows), self.norm_weight, self.cos_sin[rows], kv_cache]
        out, same = ops.latent_attention(
            *given, starts, lens, self.tables[chosen], **self.attributes, log_scale_from=20
        )
        assert same is kv_cache
        return out
