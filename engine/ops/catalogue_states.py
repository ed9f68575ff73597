"""The ops of layers that keep a state of fixed size for each request: a part of the catalogue, and their layout.

A state is a list of lines of `head_dim` numbers, f32. They fill the rows of a cache that the request's table names, a
row after another, whatever the type of the cache is.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.cache_groups import MAX_REJECTED
from engine.ops.declaration import Op, arrays, attributes

CHUNK = 64  # positions between two states of the delta rule
OPEN = CHUNK + 16  # positions since the stored state whose keys, updates and decays are kept
HISTORY = 16  # positions whose inputs the convolution keeps
assert MAX_REJECTED < OPEN - CHUNK

STATE = (
    "state f32|bf16|f16|i8 [num_blocks, planes, slices, rows, row_width], query_starts i32 [B + 1], "
    "context_lens i32 [B], state_tables i32 [B, num_parts]"
)
UPDATED = "state f32|bf16|f16|i8 [num_blocks, planes, slices, rows, row_width]"

STATE_OPS = (
    Op(
        "causal_conv",
        arrays(f"x [T, C], weight [C, 1, K], {STATE}"),
        arrays(f"y [T, C], {UPDATED}"),
        attributes("head_dim int"),
        f"""the depthwise convolution over the positions of each request, `y[p, c] = silu(sum_k weight[c, 0, k] · x[p −
        K + 1 + k, c])` with zeros before position 0, added in the order of `k`. Rows and positions are as in
        `paged_attention`. The state keeps the last {HISTORY} inputs: for each `head_dim` channels {HISTORY} lines, the
        input of position `p` in line `p % {HISTORY}`.""",
        requires=("C % head_dim == 0", "head_dim % 16 == 0", f"K <= {HISTORY - MAX_REJECTED + 1}"),
        header="causal_conv.h",
        cuda="recurrent_states",
        is_row_wise=False,
    ),
    Op(
        "gated_delta_rule",
        arrays(
            "qkv [T, (2 * num_k_heads + num_v_heads) * head_dim], gates [T, 2 * num_v_heads], a_log [num_v_heads], "
            f"dt_bias [num_v_heads], {STATE}"
        ),
        arrays(f"out [T, num_v_heads * head_dim], {UPDATED}"),
        attributes("num_k_heads int, num_v_heads int, head_dim int, first_line int"),
        f"""for each value head with a state `S` [D, D] that begins with zeros, and the key head `h // (num_v_heads /
        num_k_heads)`: `S ← exp(g) S; u = beta (v − k·S); S ← S + k uᵀ; out = q·S` with `k / sqrt(k·k + 1e-6)`, the same
        of `q` divided by `sqrt(D)`, `beta = sigmoid(gates[:, h])` and `g = −exp(a_log) · log(1 + exp(gates[:,
        num_v_heads + h] + dt_bias))` (Yang et al., 2024). Rows and positions are as in `paged_attention`. The state is
        stored at multiples of {CHUNK} positions; `G` is the sum of `g` since then, and of each position since then the
        state keeps `k`, `u` and `G`. So `u_t = beta (v − exp(G_t) k·S − sum_i exp(G_t − G_i) (k·k_i) u_i)`, `out_t =
        exp(G_t) q·S + sum_i exp(G_t − G_i) (q·k_i) u_i`, and behind {CHUNK} positions `S ← exp(G) S + sum_i exp(G −
        G_i) k_i u_iᵀ`, each added in the order of positions. A step may compute up to {MAX_REJECTED} of the last
        positions of the step before again. From `first_line` on the state has, for each key head, {OPEN} lines of keys
        and for each of its value heads `D` lines of `S`, {OPEN} lines of updates, and the decays, behind which the
        first one has the number of closed chunks. A GPU stores the state at multiples of 16 positions, and of each
        position `p` since then `k`, which is not normalized, `u`, `v`, `g` and `beta` in the same lines, at `p % 32`;
        each value head has a number of closed chunks. Its sums are float32 sums of matrix products in chunks of 16
        positions. If `qkv` has 16 bits, factors that are float32 numbers, such as those of the state, are rounded to 17
        bits.""",
        requires=("num_v_heads % num_k_heads == 0", "head_dim % 16 == 0"),
        header="gated_delta_rule.h",
        cuda="delta_rule",
        is_row_wise=False,
    ),
    Op(
        "gated_rms_norm",
        arrays("x [T, N], gate [T, N], weight [head_dim]"),
        arrays("y [T, N]"),
        attributes("epsilon float"),
        "`rms_norm(x) · silu(gate)`, each head of `head_dim` elements normalized by itself.",
        requires=("N % head_dim == 0",),
        header="gated_rms_norm.h",
        cuda="gates",
    ),
    Op(
        "sigmoid_gate",
        arrays("x [T, N], gate [T, N]"),
        arrays("y [T, N]"),
        (),
        "`y = x / (1 + exp(−gate))`.",
        header="sigmoid_gate.h",
        cuda="gates",
    ),
)


CONV, RULE, NORM, _ = STATE_OPS
GATED_DELTA_NET = replace(
    RULE,
    name="gated_delta_net",
    inputs=(*CONV.inputs, *RULE.inputs[1:], *NORM.inputs[1:]),
    outputs=(*arrays("y [T, num_v_heads * head_dim]"), *RULE.outputs[1:]),
    attributes=(*RULE.attributes, *NORM.attributes),
    formula="`gated_rms_norm(gated_delta_rule(causal_conv(x, ..), ..), ..)`.",
    header="",
    fuses=(CONV.name, RULE.name, NORM.name),
)


def conv_lines(num_channels: int, head_dim: int) -> int:
    """Return the number of lines that the state of a convolution takes."""
    return num_channels // head_dim * HISTORY


def delta_lines(num_k_heads: int, num_v_heads: int, head_dim: int) -> int:
    """Return the number of lines that the state of a gated delta rule takes."""
    return num_k_heads * OPEN + num_v_heads * (head_dim + OPEN + decay_lines(head_dim))


def decay_lines(head_dim: int) -> int:
    """Return the number of lines that hold the decays of a value head and the number of closed chunks."""
    return -(-(OPEN + 1) // head_dim)
