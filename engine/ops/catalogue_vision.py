"""The ops of vision networks, and of what decoders do with their features: a part of the catalogue."""

from __future__ import annotations

from engine.ops.declaration import Op, arrays, attributes

VISION_OPS = (
    Op(
        "bidirectional_attention",
        arrays("qkv [T, 3 * num_heads * head_dim], cos_sin [T, rotary_dim], segment_ends i32 [B]"),
        arrays("out [T, num_heads * head_dim]"),
        attributes("num_heads int, scale float, is_bf16 int"),
        """every row attends to all rows of its segment `b`, which are `segment_ends[b-1] .. segment_ends[b]`, and
        to no others. Query and key heads are rotated as in step (1) of `paged_attention`; `out = softmax(scale · q·Kᵀ)
        V`. Sums run in pieces of 128 rows of the segment with the online softmax, f32. With `is_bf16` the rotated
        `scale · q · log2(e)`, keys, values and the weights of a piece, `2^(score − largest so far)`, are rounded to
        bf16 before they are multiplied or added up.""",
        requires=("rotary_dim <= head_dim", "rotary_dim % 2 == 0", "head_dim % 2 == 0"),
        header="bidirectional_attention.h",
        cuda="vision",
        is_row_wise=False,
    ),
    Op(
        "interpolate_rows",
        arrays("table [N, H], rows i32 [T, num_rows], weights [T, num_rows]"),
        arrays("y [T, H]"),
        (),
        "`y[t] = sum_j weights[t, j] · table[rows[t, j]]`, in the order of `j`: learned positions of a grid of another"
        " size.",
        ids_below=(("rows", "N"),),
        header="interpolate_rows.h",
        cuda="vision",
    ),
    Op(
        "concat_rows",
        arrays("x [T, H], rows i32 [S, num_rows]"),
        arrays("y [S, num_rows * H]"),
        (),
        "`y[s]` is the rows `x[rows[s, 0]]`, `x[rows[s, 1]]`, .. side by side: patches that are merged into a token.",
        ids_below=(("rows", "T"),),
        header="concat_rows.h",
        cuda="vision",
    ),
    Op(
        "add_gathered_rows",
        arrays("x [T, H], rows i32 [T], values [E, W]"),
        arrays("y [T, H]"),
        attributes("column int"),
        "`y[t] = x[t] + values[rows[t], column .. column + H − 1]`, and `x[t]` where `rows[t]` is -1: features of an"
        " image that are added behind a layer of the decoder (DeepStack; Meng et al., 2024).",
        requires=("0 <= column", "column + H <= W"),
        header="add_gathered_rows.h",
        cuda="pointwise",
    ),
    Op(
        "gelu_erf",
        arrays("x [T, F]"),
        arrays("y [T, F]"),
        (),
        "`y = x · (1 + erf(x / sqrt(2))) / 2`: GELU (Hendrycks and Gimpel, 2016).",
        header="gelu_erf.h",
        cuda="vision",
    ),
)
