"""The definition of every op of `docs/ops.md`, in numpy. Slow and readable: the oracle of all tests.

Arrays are dense float32 in and out; sums run in float64 so that a kernel is judged by its own error alone.
bf16 arrays are uint16 bit patterns. Ops with an in-place input return it as their last output.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Protocol

import ml_dtypes
import numpy as np

from engine.dtypes import FP8_BLOCK, as_f32, from_bf16, from_fp8, from_mxfp4, latent_groups, scale_bytes, to_bf16
from engine.ops.reference_experts import add_gated, expert_ops, moe_route
from engine.ops.reference_sampling import sample
from engine.ops.reference_states import causal_conv, gated_delta_rule, gated_rms_norm, sigmoid_gate
from engine.ops.reference_vision import (
    add_gathered_rows,
    bidirectional_attention,
    concat_rows,
    gelu_erf,
    interpolate_rows,
)

__all__ = ["add_gated", "causal_conv", "gated_delta_rule", "gated_rms_norm", "moe_route", "sample", "sigmoid_gate"]
__all__ += ["add_gathered_rows", "bidirectional_attention", "concat_rows", "gelu_erf", "interpolate_rows"]

LARGEST = np.float32(127)  # code of an activation
LARGEST_FP8 = np.float32(448)
NUMBERS_PER_STEP = 64  # of activations, where a row has more steps than one
SMALLEST = np.float32(1e-30)  # magnitude that `in_steps` tells from zero


class Group(Protocol):
    """The ranks of one model, as one of them sees them."""

    num_ranks: int

    def exchange(self, x: np.ndarray) -> list[np.ndarray]:
        """Return what every rank gives, in rank order. All ranks call it, equally often."""
        ...


class Alone:
    num_ranks = 1

    def exchange(self, x: np.ndarray) -> list[np.ndarray]:
        return [x]


ALONE = Alone()


def of(group: Group) -> SimpleNamespace:
    """Return the ops of a rank. Those of this module itself belong to a process without a group."""
    bound = {op.__name__: functools.partial(op, group=group) for op in (all_reduce, all_gather)}
    return SimpleNamespace(**{**globals(), **bound})


def all_reduce(x: np.ndarray, *, group: Group = ALONE) -> np.ndarray:
    first, *others = group.exchange(x)
    total = first.copy()
    for share in others:  # in float32: the order and the rounding are part of the definition
        total += share
    return total


def all_gather(x: np.ndarray, *, num_ranks: int, width: int, group: Group = ALONE) -> np.ndarray:
    assert group.num_ranks == num_ranks
    return np.concatenate(group.exchange(x), axis=1)[:, :width]


def embedding(token_ids: np.ndarray, table: np.ndarray, *, first_id: int) -> np.ndarray:
    assert (token_ids >= 0).all()
    rows = token_ids - first_id
    is_here = (rows >= 0) & (rows < len(table))
    return np.where(is_here[:, None], as_f32(table[np.where(is_here, rows, 0)]), np.float32(0))


def rms_norm(x: np.ndarray, weight: np.ndarray, *, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    return (wide / np.sqrt(mean_square + epsilon) * weight).astype(np.float32)


def add_rms_norm(
    x: np.ndarray, residual: np.ndarray, weight: np.ndarray, *, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    residual += x
    return rms_norm(residual, weight, epsilon=epsilon), residual


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, *, epsilon: float) -> np.ndarray:
    centered = x.astype(np.float64)
    centered -= centered.mean(axis=-1, keepdims=True)
    y = centered / np.sqrt(np.square(centered).mean(axis=-1, keepdims=True) + epsilon) * weight
    return (y if bias is None else y + bias).astype(np.float32)


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    if weight.dtype == np.uint16:
        x = from_bf16(to_bf16(x))
    if weight.dtype == np.float16:
        with np.errstate(over="ignore"):  # becomes infinite
            x = x.astype(np.float16)
    y = x.astype(np.float64) @ as_f32(weight).astype(np.float64).T
    if bias is not None:
        y += bias
    return y.astype(np.float32)


def linear_int8(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    y = in_steps(x, NUMBERS_PER_STEP) @ weight.astype(np.float64).T * scale
    return (y if bias is None else y + bias).astype(np.float32)


def linear_a8w8(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    y = in_steps(x, x.shape[1]) @ weight.astype(np.float64).T * scale
    return (y if bias is None else y + bias).astype(np.float32)


def linear_int4(
    x: np.ndarray,
    weight: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    group = 2 * weight.shape[1] // scale.shape[1]
    y = in_steps(x, group) @ int4_numbers(weight, scale, zero)[:, : x.shape[1]].T
    return (y if bias is None else y + bias).astype(np.float32)


def in_steps(x: np.ndarray, group: int) -> np.ndarray:
    """Return float64 multiples, up to LARGEST, of a step for every `group` numbers of a row. A number that is not
    finite makes its whole group NaN.
    """
    rounded = np.empty(x.shape, np.float64)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group]
        # In float32: a rounding that differs is another number.
        most = np.abs(part).max(axis=1, initial=0, keepdims=True)
        inverse = np.divide(LARGEST, most, out=np.zeros_like(most), where=most > SMALLEST)
        with np.errstate(invalid="ignore"):  # infinite times 0
            codes = np.rint(part * inverse).astype(np.float64)
            rounded[:, start : start + group] = codes * (most / LARGEST)
    return rounded


def int4_numbers(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> np.ndarray:
    """Return float64 [N, K'] of two codes a byte, the first in the lower half."""
    numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(*scale.shape, -1).astype(np.float64)
    origin = 8 if zero is None else from_bf16(zero)[:, :, None]
    return ((numbers - origin) * from_bf16(scale)[:, :, None]).reshape(len(codes), -1)


def int4_values(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> np.ndarray:
    """Return the values of int4 codes, rounded to bf16."""
    return to_bf16(int4_numbers(codes, scale, zero).astype(np.float32))


def linear_fp8(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return linear(x, to_bf16(from_fp8(weight, scale)), bias)


def linear_mxfp4(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return linear(x, to_bf16(from_mxfp4(weight, scale)), bias)


expert_gate_up, expert_down = expert_ops(linear)
expert_gate_up_int8, expert_down_int8 = expert_ops(linear_int8)
expert_gate_up_a8w8, expert_down_a8w8 = expert_ops(linear_a8w8)
expert_gate_up_int4, expert_down_int4 = expert_ops(linear_int4)
expert_gate_up_fp8, expert_down_fp8 = expert_ops(linear_fp8)
expert_gate_up_mxfp4, expert_down_mxfp4 = expert_ops(linear_mxfp4)


def linear_a8w8_fp8(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    is_blocked = scale.shape[1] > 1
    numbers, steps = to_fp8_rows(x, is_blocked=is_blocked)
    return linear(from_fp8(numbers, steps), from_fp8(weight, scale), bias)


def to_fp8_rows(x: np.ndarray, *, is_blocked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return activations [T, K] as 8-bit floats u8 [T, K], and scales f32 [T, 1], or [T, K / 128] of 128 columns each.

    The largest magnitude that shares a scale becomes 448 or -448. An element that is not finite makes them NaN.
    """
    width = x.shape[1]
    groups = (
        np.pad(x, ((0, 0), (0, -width % FP8_BLOCK))).reshape(len(x), -(-width // FP8_BLOCK), FP8_BLOCK)
        if is_blocked
        else x[:, None]
    )
    with np.errstate(invalid="ignore"):
        steps = np.abs(groups).max(axis=2, keepdims=True) / LARGEST_FP8
        quotients = groups / np.where(steps == 0, np.float32(1), steps)
        numbers = np.clip(quotients, -LARGEST_FP8, LARGEST_FP8).astype(ml_dtypes.float8_e4m3fn)
    return numbers.view(np.uint8).reshape(len(x), groups.shape[1] * groups.shape[2])[:, :width], steps[..., 0]


def rotary_angles(positions: np.ndarray, inv_freq: np.ndarray, *, attention_scaling: float) -> np.ndarray:
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)  # the product is float32
    return (np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * attention_scaling).astype(np.float32)


def mrope_angles(
    positions: np.ndarray, inv_freq: np.ndarray, axes: np.ndarray, *, attention_scaling: float
) -> np.ndarray:
    angle = (positions.astype(np.float32)[axes].T * inv_freq).astype(np.float64)  # the product is float32
    return (np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * attention_scaling).astype(np.float32)


def head_norm(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
) -> np.ndarray:
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, -1).copy()
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    query[:] = rms_norm(query, q_weight, epsilon=epsilon)
    key[:] = rms_norm(key, k_weight, epsilon=epsilon)
    return heads.reshape(qkv.shape)


def rotate(heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of every head [T, heads, D] by halves."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    x1, x2 = heads[..., :half], heads[..., half : 2 * half]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, heads[..., 2 * half :]], axis=-1)


def paged_attention(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: np.ndarray,
    cos_sin: np.ndarray,
    kv_cache: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    sinks: np.ndarray | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    block_size, head_dim = kv_cache.shape[3], kv_cache.shape[4] - scale_bytes(kv_cache.dtype)
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query = rotate(heads[:, :num_heads], cos_sin)
    key = rotate(heads[:, num_heads : num_heads + num_kv_heads], cos_sin)
    value = heads[:, num_heads + num_kv_heads :]
    if kv_cache.dtype == np.uint16:
        key, value = to_bf16(key), to_bf16(value)
    if kv_cache.dtype == np.int8:
        key, value = to_cached_int8(key), to_cached_int8(value)

    out = np.empty_like(query)
    for b, context_len in enumerate(context_lens):
        rows = range(query_starts[b], query_starts[b + 1])
        for position, row in enumerate(rows, context_len):
            block = block_tables[b, position // block_size]
            kv_cache[block, :, :, position % block_size] = key[row], value[row]
        for position, row in enumerate(rows, context_len):
            first = max(0, position - window + 1) if window else 0
            seen = block_tables[b, first // block_size : position // block_size + 1]
            places = first % block_size, position + 1 - first // block_size * block_size
            out[row] = _attend(query[row] * np.float32(scale), kv_cache[seen], places, softcap, sinks)
    return out.reshape(len(qkv), num_heads * head_dim), kv_cache


def to_cached_int8(rows: np.ndarray) -> np.ndarray:
    """Quantize rows [..., D] to D codes and the two bytes of a bf16 scale."""
    largest = np.abs(rows).max(axis=-1, keepdims=True)  # in float32: a rounding that differs is another number
    bits = to_bf16(largest / np.float32(127))
    scale = from_bf16(bits)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.clip(np.rint(rows * inverse), -127, 127).astype(np.int8)
    return np.concatenate([codes, bits.view(np.int8)], axis=-1)


def from_cached_int8(rows: np.ndarray) -> np.ndarray:
    return rows[..., :-2] * from_bf16(np.ascontiguousarray(rows[..., -2:]).view(np.uint16))


def _attend(
    query: np.ndarray, blocks: np.ndarray, places: tuple[int, int], softcap: float, sinks: np.ndarray | None
) -> np.ndarray:
    """Attend with the query [Hq, D] of one token to the positions from places[0] to below places[1] of the blocks
    [n, 2, Hkv, block_size, D], block by block."""
    _, total, out = _softmax_sums(query, blocks, places, softcap, sinks)
    return (out / total).reshape(query.shape)


def _softmax_sums(
    query: np.ndarray, blocks: np.ndarray, places: tuple[int, int], softcap: float, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest score, the sum of the weights and the weighted sum of the values [Hkv, heads a group, ..]."""
    rounded = (lambda x: from_bf16(to_bf16(x.astype(np.float32)))) if blocks.dtype == np.uint16 else (lambda x: x)
    numbers = from_cached_int8(blocks) if blocks.dtype == np.int8 else as_f32(blocks)
    grouped = rounded(query).reshape(numbers.shape[2], -1, query.shape[-1])  # [Hkv, heads a group, D]
    largest = np.full((*grouped.shape[:2], 1), -np.inf)
    total, out = np.zeros_like(largest), np.zeros(grouped.shape)
    if sinks is not None:
        largest, total = sinks.astype(np.float64).reshape(largest.shape), np.ones_like(largest)
    block_size = numbers.shape[3]
    for i, (keys, values) in enumerate(numbers.astype(np.float64)):
        first, end = max(0, places[0] - i * block_size), min(block_size, places[1] - i * block_size)
        keys, values = keys[:, first:end], values[:, first:end]
        scores = np.einsum("hgd,hpd->hgp", grouped, keys)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        before, largest = largest, np.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights, keep = rounded(np.exp(scores - largest)), np.exp(before - largest)
        total = total * keep + weights.sum(axis=-1, keepdims=True)
        out = out * keep + np.einsum("hgp,hpd->hgd", weights, values)
    return largest, total, out


def head_linear(x: np.ndarray, weight: np.ndarray, *, num_heads: int) -> np.ndarray:
    weights = weight.reshape(num_heads, -1, weight.shape[1])
    heads = x.reshape(len(x), num_heads, x.shape[1] // num_heads)[..., : weight.shape[1]]
    return np.concatenate([linear(heads[:, h], weights[h]) for h in range(num_heads)], axis=1)


def latent_attention(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    q_latent: np.ndarray,
    q: np.ndarray,
    latent: np.ndarray,
    norm_weight: np.ndarray,
    cos_sin: np.ndarray,
    kv_cache: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    num_heads: int,
    epsilon: float,
    scale: float,
    log_scale: float = 0.0,
    log_scale_from: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    (width,), rope_dim, block_size = norm_weight.shape, cos_sin.shape[1], kv_cache.shape[1]
    normed = rms_norm(latent[:, :width], norm_weight, epsilon=epsilon)
    rows = np.concatenate([normed, rotate(latent[:, None, width:], cos_sin)[:, 0]], axis=1)
    rows = to_bf16(rows) if kv_cache.dtype == np.uint16 else rows
    groups = latent_groups(width, rope_dim)
    codes, scales = latent_parts(kv_cache, groups) if kv_cache.dtype == np.int8 else (kv_cache, None)
    turned = rotate(q.reshape(len(q), num_heads, -1)[..., q.shape[1] // num_heads - rope_dim :], cos_sin)
    query = np.concatenate([q_latent.reshape(len(q), num_heads, width), turned], axis=-1)
    out = np.empty((len(q), num_heads, width), np.float32)
    for b, context_len in enumerate(context_lens):
        of_request = range(query_starts[b], query_starts[b + 1])
        for position, row in enumerate(of_request, context_len):
            at = block_tables[b, position // block_size], position % block_size
            if scales is None:
                codes[at] = rows[row]
            else:
                codes[at], scales[at] = to_latent_int8(rows[row], groups)
        for position, row in enumerate(of_request, context_len):
            factor = scale * (1 + log_scale * np.log(1 + position // log_scale_from))
            seen = codes[block_tables[b, : position // block_size + 1]]
            if scales is not None:
                seen = from_latent_int8(seen, scales[block_tables[b, : position // block_size + 1]], groups)
            out[row] = _attend_to_latents(query[row] * np.float32(factor), seen, position + 1)[:, :width]
    return out.reshape(len(q), -1), kv_cache


def latent_parts(kv_cache: np.ndarray, groups: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """Return views of an int8 cache: the codes [num_blocks, block_size, D] and the bits of the scales [num_blocks,
    block_size, groups]."""
    num_blocks, block_size, _ = kv_cache.shape
    flat, end = kv_cache.reshape(num_blocks, -1), block_size * groups[-1].stop
    codes, scales = flat[:, :end], flat[:, end:].view(np.uint16)
    by_group = scales.reshape(num_blocks, len(groups), block_size)
    return codes.reshape(num_blocks, block_size, -1), by_group.swapaxes(1, 2)


def to_latent_int8(rows: np.ndarray, groups: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """Quantize rows [..., D] to codes and the bits of the scales [..., groups]."""
    parts = [to_cached_int8(rows[..., group]) for group in groups]
    scales = [np.ascontiguousarray(part[..., -2:]).view(np.uint16) for part in parts]
    return np.concatenate([part[..., :-2] for part in parts], axis=-1), np.concatenate(scales, axis=-1)


def from_latent_int8(codes: np.ndarray, scales: np.ndarray, groups: list[slice]) -> np.ndarray:
    return codes * np.repeat(from_bf16(scales), [group.stop - group.start for group in groups], axis=-1)


RUN = 512  # positions whose sums are made apart


def _attend_to_latents(query: np.ndarray, blocks: np.ndarray, count: int) -> np.ndarray:
    """Attend with the query [H, D] of one token to the first `count` positions of the blocks [n, block_size, D]."""
    keys_and_values = np.stack([blocks, blocks], axis=1)[:, :, None]
    step = -(-RUN // blocks.shape[1])  # blocks of a run
    runs = [
        _softmax_sums(query, keys_and_values[first : first + step], (0, count - first * blocks.shape[1]), 0.0, None)
        for first in range(0, len(blocks), step)
    ]
    most = np.max([largest for largest, _, _ in runs], axis=0)
    total, out = (sum(np.exp(run[0] - most) * run[part] for run in runs) for part in (1, 2))
    return (out / total)[0]


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (x / (1 + np.exp(-2 * 0.79788456 * (x + 0.044715 * x**3)))).astype(np.float32)


def geglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=1)
    return (gelu(gate).astype(np.float64) * up).astype(np.float32)


def relu_squared(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x + y


def scale(x: np.ndarray, *, factor: float) -> np.ndarray:
    return x * np.float32(factor)


def softcap(x: np.ndarray, *, cap: float) -> np.ndarray:
    return (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)


def square_sums(qkv: np.ndarray, *, num_heads: int, num_kv_heads: int, head_dim: int) -> np.ndarray:
    squares = qkv.astype(np.float64) ** 2
    ends = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
    sums = [squares[:, : ends[0]].sum(axis=1), squares[:, ends[0] : ends[1]].sum(axis=1)]
    return np.stack(sums, axis=1).astype(np.float32)


def wide_norm(  # noqa: PLR0913 - the inputs of the catalogue, in its order
    qkv: np.ndarray,
    sums: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_size: int,
    k_size: int,
    epsilon: float,
) -> np.ndarray:
    y, start = qkv.astype(np.float64), 0
    for part, (weight, size) in enumerate(((q_weight, q_size), (k_weight, k_size))):
        end = start + len(weight)
        y[:, start:end] *= weight / np.sqrt(sums[:, part : part + 1].astype(np.float64) / size + epsilon)
        start = end
    return y.astype(np.float32)


def rotate_heads(
    qkv: np.ndarray, cos_sin: np.ndarray, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> np.ndarray:
    heads = qkv.reshape(len(qkv), -1, head_dim).copy()
    heads[:, : num_heads + num_kv_heads] = rotate(heads[:, : num_heads + num_kv_heads], cos_sin)
    return heads.reshape(qkv.shape)


def replace_rows(x: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    y, is_replaced = x.copy(), rows >= 0
    y[is_replaced] = values[rows[is_replaced], : x.shape[1]]
    return y


def gather_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return x[rows]
