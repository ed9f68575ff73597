"""The ops of latent attention: a part of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from engine.ops.declaration import Op, arrays, attributes

CACHE = "kv_cache f32|bf16|f16|i8 [num_blocks, block_size, row_width]"
NUM_GROUPS = "((latent_dim + 63) // 64 + (rope_dim + 63) // 64)"  # of an i8 row, each with a scale

LATENT_OPS = (
    Op(
        "head_linear",
        arrays("x [T, num_heads * stride], weight f32|bf16|f16 [num_heads * N, K]"),
        arrays("y [T, num_heads * N]"),
        attributes("num_heads int"),
        """`linear` for each head with a matrix of its own: `y[t, h, n] = sum_k x[t, h, k] · weight[h, n, k]` over the
        first `K` of the `stride` elements that a head has in `x`.""",
        requires=("K <= stride",),
        header="head_linear.h",
        cuda="head_products",
        is_row_wise=False,
    ),
    Op(
        "latent_attention",
        arrays(
            "q_latent [T, num_heads * latent_dim], q [T, num_heads * q_dim], latent [T, latent_dim + rope_dim], "
            f"norm_weight [latent_dim], cos_sin [T, rope_dim], {CACHE}, query_starts i32 [B + 1], "
            "context_lens i32 [B], block_tables i32 [B, max_blocks]"
        ),
        arrays(f"out [T, num_heads * latent_dim], {CACHE}"),
        attributes("num_heads int, epsilon float, scale float, log_scale float, log_scale_from int"),
        """multi-head latent attention in absorbed form (DeepSeek-V2, 2024): all heads share one cached row per
        position, which is the key, and whose first `latent_dim` elements are the value. Requests, positions `p` and
        blocks are those of `paged_attention`. (1) The cached row is `rms_norm` of the first `latent_dim` elements of
        `latent` with `norm_weight`, and the others rotated by halves with `cos_sin`, rounded to the cache's type.
        With `i8`, the row has groups of 64 elements, the last of the first `latent_dim` and of the others with what
        is left, and each group has codes and a bf16 scale as a key of `paged_attention` has. A block holds the codes
        of all its rows, then for each group the scales of all rows; `row_width` is the number of their bytes divided
        by `block_size`. (2) The query of a head is `q_latent`, and the last `rope_dim` of its `q_dim` elements in
        `q`, rotated likewise; it is multiplied by `scale`, and with a `log_scale` above 0 by `1 + log_scale · ln(1 +
        p // log_scale_from)`. (3) `out = softmax(q·Kᵀ) V` over the positions `0..p`. Sums run block by block with
        the online softmax and the roundings of `paged_attention` within runs of `pad(512, block_size)` positions.
        The runs are then merged in their order in f32. With an `i8` cache, on a CPU the query of a head is rounded
        to 16 bits in the groups of the row, and the weights of a block, multiplied by the scales of a group, to
        multiples of the largest weight times the largest scale divided by `L`, as in `paged_attention`; a GPU rounds
        the products of codes and scales to the type of the queries.""",
        requires=(
            "latent_dim % 2 == 0",
            "rope_dim % 2 == 0",
            "rope_dim <= q_dim",
            "log_scale_from > 0",
            f"row_width == latent_dim + rope_dim + 2 * {NUM_GROUPS} * (kv_cache_type == kI8)",
            "latent_dim % 4 * (kv_cache_type == kI8) == 0",
            "rope_dim % 4 * (kv_cache_type == kI8) == 0",
        ),
        header="latent_attention.h",
        cuda="mla",
        is_row_wise=False,
    ),
)
PRODUCT, ATTENTION = LATENT_OPS
PROJECTED_LATENT_ATTENTION = replace(
    ATTENTION,
    name="projected_latent_attention",
    inputs=(
        *arrays("x [T, num_heads * q_dim], key_weight f32|bf16|f16 [num_heads * latent_dim, K]"),
        *ATTENTION.inputs[1:],
        *arrays("value_weight f32|bf16|f16 [num_heads * N, latent_dim]"),
    ),
    outputs=(*arrays("y [T, num_heads * N]"), *ATTENTION.outputs[1:]),
    formula="`head_linear(latent_attention(head_linear(x, key_weight), x, ..), value_weight)`; `q` is `x`.",
    header="",
    cuda="expanded_mla",
    fuses=(PRODUCT.name, ATTENTION.name, PRODUCT.name),
)
