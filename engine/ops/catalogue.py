"""The catalogue of ops: each is declared here once.

The table of docs/ops.md, the operators that Paddle knows, the C structures and call records of the CPU's kernels with
their shape rules and checks, the functions of `engine.ops.cuda` and what executors may fuse are derived from it.
`engine.ops.reference` defines the same names in numpy.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from typing import Any

from engine.ops.catalogue_experts import mixture_ops
from engine.ops.catalogue_latent import LATENT_OPS, PROJECTED_LATENT_ATTENTION
from engine.ops.catalogue_states import GATED_DELTA_NET, STATE_OPS
from engine.ops.catalogue_vision import VISION_OPS
from engine.ops.declaration import LOGITS, Op, arrays, attributes, table

LINEAR = "linear_ops.h"
QUANTIZED = "quantized_linear.h"
FP8 = ("linear_fp8", "linear_a8w8_fp8")
BYTES = "y[t, n] = scale[n] · sum_k x[t, k] · weight[n, k] + bias[n]"


def op(name: str, inputs: str, outputs: str, given: str = "", *, formula: str, **more: Any) -> Op:
    return Op(name, arrays(inputs), arrays(outputs), attributes(given), formula, **{"header": f"{name}.h", **more})


PLAIN = (  # of models without mixtures of experts
    op(
        "embedding",
        "token_ids i32 [T], table! f32|bf16|f16 [V, H]",
        "y [T, H]",
        "first_id int",
        formula="row `token_ids[t] − first_id` of the table; zeros for an id whose row another rank holds.",
        ids_below=(("token_ids", "2147483648"),),
        cuda="pointwise",
    ),
    op(
        "rms_norm",
        "x [T, H], weight [H]",
        "y [T, H]",
        "epsilon float",
        formula="`y = x / sqrt(mean(x²) + epsilon) · weight` (Zhang and Sennrich, 2019).",
        cuda="norms",
    ),
    op(
        "add_rms_norm",
        "x [T, H], residual [T, H], weight [H]",
        "y [T, H], residual [T, H]",
        "epsilon float",
        formula="`residual += x; y = rms_norm(residual)`.",
        cuda="norms",
    ),
    op(
        "layer_norm",
        "x [T, H], weight [H], bias? [H]",
        "y [T, H]",
        "epsilon float",
        formula="`y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + epsilon) · weight + bias` (Ba et al., 2016).",
        cuda="norms",
    ),
    op(
        "linear",
        "x [T, K], weight! f32|bf16|f16 [N, K], bias? [N]",
        "y [T, N]",
        formula="""`y[t, n] = sum_k x[t, k] · weight[n, k] + bias[n]`. With a `bf16` weight, `x` is rounded to bf16
        first (nearest, ties to even), with an `f16` one to f16; products and sums are f32.""",
        weights=("weight",),
        header=LINEAR,
        cuda="products",
        is_row_wise=False,
    ),
    op(
        "linear_int8",
        "x [T, K], weight! i8 [N, K], scale [N], bias? [N]",
        "y [T, N]",
        formula=f"`{BYTES}`, `x` first rounded to 8 bits in groups of 64.",
        weights=("weight", "scale"),
        header=QUANTIZED,
        cuda="lowbit",
        is_row_wise=False,
    ),
    op(
        "linear_a8w8",
        "x [T, K], weight! i8 [N, K], scale [N], bias? [N]",
        "y [T, N]",
        formula="as `linear_int8`, `x` rounded a row at a time.",
        weights=("weight", "scale"),
        header=QUANTIZED,
        cuda="lowbit",
        is_row_wise=False,
    ),
    op(
        "linear_int4",
        "x [T, K], weight! u8 [N, pad(K, 128) // 2], scale! bf16 [N, G], zero?! bf16 [N, G], bias? [N]",
        "y [T, N]",
        formula="""as `linear_int8` with the weight `(code[n, k] − zero[n, k // g]) · scale[n, k // g]` in groups of
        `g = pad(K, 128) / G`, 64 or 32, and `x` rounded to 8 bits in groups of as many; `zero` is 8 where it is not
        given. Byte `k // 2` of a row holds code `k`, the lower half the even one. Codes from `K` on count for
        nothing.""",
        requires=("64 * G == pad(K, 128) or 32 * G == pad(K, 128)",),
        weights=("weight", "scale", "zero"),
        header=QUANTIZED,
        cuda="lowbit",
        is_row_wise=False,
    ),
    op(
        "linear_fp8",
        "x [T, K], weight u8 [N, K], scale [N, G], bias? [N]",
        "y [T, N]",
        formula="""`linear` with the `bf16` weight `number[n, k] · scale[n, k // 128]`, or `scale[n, 0]` where `G` is
        1, rounded once. A byte is the number that it is as e4m3: a sign, four bits of exponent, three of
        mantissa, no infinity.""",
        requires=("G == 1 or G == (K + 127) // 128",),
        weights=("weight", "scale"),
        header=LINEAR,
        cuda="fp8",
        is_row_wise=False,
    ),
    op(
        "linear_a8w8_fp8",
        "x [T, K], weight u8 [N, K], scale [N, G], bias? [N]",
        "y [T, N]",
        formula="""`y[t, n] = sum_k a[t, k] · number[n, k] · scale[n, k // 128] + bias[n]` with `x` rounded to 8-bit
        floats: `a` is `s · e4m3(x / s)`, nearest, ties to even, where `s` is the largest magnitude of the row, or of
        its 128 columns where `G` is above 1, divided by 448. A GPU rounds them only where that is
        faster.""",
        requires=("G == 1 or G == (K + 127) // 128",),
        weights=("weight", "scale"),
        header=LINEAR,
        cuda="a8w8_fp8",
        is_row_wise=False,
    ),
    op(
        "rotary_angles",
        "positions i32 [T], inv_freq [half]",
        "y [T, 2 * half]",
        "attention_scaling float",
        formula="""`angle[t, i] = f32(positions[t]) · inv_freq[i]`; the row is `[cos(angle), sin(angle)] ·
        attention_scaling`.""",
        cuda="pointwise",
    ),
    op(
        "mrope_angles",
        "positions i32 [3, T], inv_freq [half], axes i32 [half]",
        "y [T, 2 * half]",
        "attention_scaling float",
        formula="""as `rotary_angles` with `angle[t, i] = f32(positions[axes[i], t]) · inv_freq[i]`, where the rows of
        `positions` are time, height and width (M-RoPE, Wang et al., 2024).""",
        ids_below=(("axes", "3"),),
        cuda="pointwise",
    ),
    op(
        "head_norm",
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], q_weight [head_dim], k_weight [head_dim]",
        "y [T, (num_heads + 2 * num_kv_heads) * head_dim]",
        "num_heads int, num_kv_heads int, epsilon float",
        formula="""`rms_norm` over each head of the query part with `q_weight` and of the key part with `k_weight`; the
        value part is copied (Qwen3).""",
    ),
    op(
        "paged_attention",
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], cos_sin [T, rotary_dim], "
        "kv_cache f32|bf16|f16|i8 [num_blocks, 2, num_kv_heads, block_size, row_width], query_starts i32 [B + 1], "
        "context_lens i32 [B], block_tables i32 [B, max_blocks], sinks? [num_heads]",
        "out [T, num_heads * head_dim], kv_cache f32|bf16|f16|i8 [num_blocks, 2, num_kv_heads, block_size, row_width]",
        "num_heads int, num_kv_heads int, scale float, window int, softcap float",
        formula="""for the request `b` whose tokens are rows `query_starts[b] .. query_starts[b+1]`: row `j` of it has
        position `p = context_lens[b] + j`. (1) query and key heads are rotated by halves, the first `R` of
        `D` elements (`R` is `rotary_dim`, `D` is `head_dim`): `x1' = x1·cos − x2·sin`, `x2' = x2·cos +
        x1·sin` with `x1 = x[:R/2]`, `x2 = x[R/2:R]` (Su et al., 2021, in the layout of Hugging Face). (2)
        Key and value of position `p` go to block `block_tables[b, p // block_size]`, row `p % block_size`,
        rounded to the cache's type: with `i8` as D codes and the two bytes of a bf16 scale (`row_width` is
        `D + 2` then, otherwise `D`), `s = bf16(m / 127)` with `m` the largest magnitude and code `x · (1 /
        s)` to the nearest, ties to even, within ±127. (3) `out = softmax(scale · q·Kᵀ) V` over the
        positions `0..p` of the request's blocks, with a `window` above 0 over `p − window + 1 .. p`; with a
        `softcap` above 0 the scores are `softcap · tanh(score / softcap)`; with `sinks`, `exp(sinks[h])` is
        added to the sum that the weights of head `h` are divided by. Query head `h` reads key/value head `h //
        (num_heads / num_kv_heads)`. Sums run block by block in the order of positions with the online softmax (Milakov
        and Gimelshein, 2018), f32. With a `bf16` cache `scale · q` and the weights of a block, `exp(score −
        largest so far)`, are rounded to bf16 before they are multiplied or added up. With an `i8` cache the
        scales are applied to scores and weights; on a CPU `scale · q` of a head, and what the weights of a
        block then are, are first rounded to 16 bits (see below) in a group of their own, with a smaller `L`
        where D or block_size is above 520.""",
        requires=(
            "num_heads % num_kv_heads == 0",
            "window >= 0",
            "rotary_dim <= head_dim",
            "rotary_dim % 2 == 0",
            "head_dim % 2 == 0",
            "row_width == head_dim + 2 * (kv_cache_type == kI8)",
        ),
        cuda="attention",
        is_row_wise=False,
    ),
    op(
        "swiglu",
        "gate_up [T, 2 * F]",
        "y [T, F]",
        formula="`silu(gate) · up`, gate the first half (Shazeer, 2020); `silu(z) = z / (1 + exp(−z))`.",
        cuda="pointwise",
    ),
    op(
        "gather_rows",
        "x [T, H], rows i32 [S]",
        "y [S, H]",
        formula="`y[s] = x[rows[s]]`.",
        ids_below=(("rows", "T"),),
        cuda="products",
    ),
    op(
        "replace_rows",
        "x [T, H], rows i32 [T], values [E, W]",
        "y [T, H]",
        formula="`y[t]` is the first H values of `values[rows[t]]`, and `x[t]` where `rows[t]` is -1.",
        requires=("H <= W",),
        cuda="pointwise",
    ),
    op(
        "geglu",
        "gate_up [T, 2 * F]",
        "y [T, F]",
        formula="`gelu(gate) · up`, gate the first half (Shazeer, 2020), with `gelu` as below.",
        cuda="pointwise",
    ),
    op(
        "gelu",
        "x [T, F]",
        "y [T, F]",
        formula="`y = x / (1 + exp(−2 u))` with `u = 0.79788456 · (x + 0.044715 · x³)`: GELU by tanh (Hendrycks and "
        "Gimpel, 2016).",
        cuda="pointwise",
    ),
    op(
        "relu_squared",
        "x [T, F]",
        "y [T, F]",
        formula="`y = max(x, 0)²` (So et al., 2021).",
        cuda="pointwise",
    ),
    op("add", "x [T, H], y [T, H]", "z [T, H]", formula="`z = x + y`.", cuda="pointwise"),
    op("scale", "x [T, H]", "y [T, H]", "factor float", formula="`y = factor · x`.", cuda="pointwise"),
    op(
        "softcap", "x [T, H]", "y [T, H]", "cap float", formula="`y = cap · tanh(x / cap)` (Gemma 2).", cuda="pointwise"
    ),
    op(
        "square_sums",
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]",
        "y [T, 2]",
        "num_heads int, num_kv_heads int, head_dim int",
        formula="""the sums of the squares of the query part and of the key part, in f32. `all_reduce` makes those of
        all ranks of it.""",
        cuda="norms",
    ),
    op(
        "wide_norm",
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], sums [T, 2], q_weight [num_heads * head_dim], "
        "k_weight [num_kv_heads * head_dim]",
        "y [T, (num_heads + 2 * num_kv_heads) * head_dim]",
        "num_heads int, num_kv_heads int, head_dim int, q_size int, k_size int, epsilon float",
        formula="""the query part becomes `q / sqrt(sums[t, 0] / q_size + epsilon) · q_weight`, the key part `k /
        sqrt(sums[t, 1] / k_size + epsilon) · k_weight`: an RMS norm over the heads of all ranks (OLMo 2); the
        value part is copied.""",
        cuda="norms",
    ),
    op(
        "rotate_heads",
        "qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], cos_sin [T, rotary_dim]",
        "y [T, (num_heads + 2 * num_kv_heads) * head_dim]",
        "num_heads int, num_kv_heads int, head_dim int",
        formula="the query and key heads rotated as in step (1) of `paged_attention`; the value part is copied.",
        cuda="rotate_and_cache",
        requires=("rotary_dim <= head_dim", "rotary_dim % 2 == 0"),
    ),
    op(
        "all_reduce",
        "x [T, N]",
        "y [T, N]",
        formula="""the sum of `x` over all ranks, added in the order of the ranks, so that all have the same bits. A
        process that is alone gets its own `x`.""",
        header="collectives.h",
        cuda="group",
        is_row_wise=False,
    ),
    op(
        "all_gather",
        "x [T, N]",
        "y [T, width]",
        "num_ranks int, width int",
        formula="""`x` of each rank side by side, in their order; columns beyond `width`, which fill up the last share,
        are cut off.""",
        requires=("0 <= width", "width <= num_ranks * N"),
        header="collectives.h",
        cuda="group",
        is_row_wise=False,
    ),
    *LATENT_OPS,
    *STATE_OPS,
    *VISION_OPS,
)
EXPORTED: tuple[Op, ...] = (
    *PLAIN,
    *mixture_ops([each for each in PLAIN if each.weights and each.name != "linear_a8w8_fp8"]),
)
OPS: dict[str, Op] = {each.name: each for each in EXPORTED}


def _gated(linear: Op) -> Op:
    """Return the fusion of a linear layer with the `swiglu` that is the only reader of its output."""
    return replace(
        linear,
        name=f"gated_{linear.name}",
        outputs=arrays("y [T, N // 2]"),
        formula=f"`swiglu({linear.name}(..))`.",
        requires=(*linear.requires, "N % 2 == 0"),
        header="" if linear.name in FP8 else "gated_linear.h",
        fuses=(linear.name, "swiglu"),
    )


LINEAR_ADD = replace(
    OPS["linear"],
    name="linear_add",
    inputs=(*OPS["linear"].inputs, *arrays("z [T, N]")),
    formula="`linear(..) + z`.",
    header="",
    is_row_wise=False,
    fuses=("linear", "add"),
)


def _summed(product: Op) -> Op:
    """Return the fusion of a product with the sum over all ranks and the norm behind it."""
    norm = OPS["add_rms_norm"]
    return replace(
        norm,
        name=f"{product.name}_all_reduce_add_rms_norm",
        inputs=(*product.inputs, norm.inputs[1], replace(norm.inputs[2], name="norm_weight")),
        attributes=(*product.attributes, *norm.attributes),
        formula=f"`add_rms_norm(all_reduce({product.name}(..)), residual, norm_weight)`.",
        header="",
        cuda="rank_products",
        is_row_wise=False,
        fuses=(product.name, "all_reduce", "add_rms_norm"),
        weights=("weight",),
    )


FUSED = (
    *(_gated(each) for each in EXPORTED if each.weights),
    replace(
        OPS["paged_attention"],
        name="head_norm_paged_attention",
        inputs=(*OPS["head_norm"].inputs, *OPS["paged_attention"].inputs[1:]),
        attributes=attributes("num_heads int, num_kv_heads int, epsilon float, scale float, window int, softcap float"),
        formula="`paged_attention(head_norm(qkv, ..), ..)`.",
        header="",
        fuses=("head_norm", "paged_attention"),
    ),
    LINEAR_ADD,
    *(_summed(each) for each in (OPS["linear"], OPS["expert_down"], LINEAR_ADD)),
    replace(
        OPS["add_rms_norm"],
        name="all_reduce_add_rms_norm",
        formula="`add_rms_norm(all_reduce(x), residual, weight)`.",
        header="",
        cuda="group",
        is_row_wise=False,
        fuses=("all_reduce", "add_rms_norm"),
    ),
    PROJECTED_LATENT_ATTENTION,
    GATED_DELTA_NET,
    *(
        replace(
            OPS[name],
            name=fused,
            formula=f"`{name}` with its output in f32, whatever the type of the activations.",
            header="",
            fuses=(name, LOGITS),
        )
        for name, fused in (("linear", "logits"), ("linear_int8", "logits_int8"))
    ),
)
OPS |= {each.name: each for each in FUSED}
CPU_OPS = tuple(each for each in OPS.values() if each.header)  # in the order of the C enumeration


def main() -> None:
    """Print the table and the formulas of docs/ops.md."""
    sys.stdout.write(documentation())


def documentation() -> str:
    formulas = [f"- `{each.name}`: {each.formula}" for each in EXPORTED]
    wrapped = [
        textwrap.fill(" ".join(text.split()), 120, subsequent_indent="  ", break_on_hyphens=False) for text in formulas
    ]
    return "\n".join([table(EXPORTED), "Formulas", *wrapped, ""])


if __name__ == "__main__":
    main()
