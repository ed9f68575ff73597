"""Elementwise parts of a step: rows of the embedding table, rotary angles, the gate of the MLP."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.ops.cuda.launch import PDL, begin_next, cdiv, kernel, next_power_of_2, wait_for_inputs

BLOCK = 1024  # elements a program


def embedding(token_ids: Tensor, table: Tensor, *, first_id: int) -> Tensor:
    """Return rows `token_ids[t] - first_id` of the table [V, H], with zeros for ids that it does not hold: [T, H]."""
    out = table.new_empty(len(token_ids), table.shape[1])
    if len(token_ids):
        grid = len(token_ids), cdiv(table.shape[1], BLOCK)
        _embedding[grid](token_ids, table, out, first_id, *table.shape, BLOCK, **PDL)
    return out


def rotary_angles(positions: Tensor, inv_freq: Tensor, *, attention_scaling: float) -> Tensor:
    """Return the cosines of the R/2 angles of each position, then their sines: f32 [T, R]."""
    half = len(inv_freq)
    out = inv_freq.new_empty(len(positions), 2 * half)
    if len(positions):
        block = next_power_of_2(half)
        _rotary_angles[(len(positions),)](positions, inv_freq, out, half, attention_scaling, block, num_warps=1, **PDL)
    return out


def mrope_angles(positions: Tensor, inv_freq: Tensor, axes: Tensor, *, attention_scaling: float) -> Tensor:
    """Return f32 [T, R]: of each token the cosines of its R/2 angles, then their sines. Angle i is made by the position
    axes[i] of the three that a token has, i32 [3, T]."""
    half, num_tokens = len(inv_freq), positions.shape[1]
    out = inv_freq.new_empty(num_tokens, 2 * half)
    if num_tokens:
        block = next_power_of_2(half)
        arrays = (positions, inv_freq, axes, out)
        _mrope_angles[(num_tokens,)](*arrays, num_tokens, half, attention_scaling, block, num_warps=1, **PDL)
    return out


def replace_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Return `x` [T, H] with the beginning of row rows[t] of `values` [E, W] in the place of row t, unless rows[t]
    is -1. The values are rounded to the type of `x`."""
    return _with_rows(x, rows, values, 0, adds=False)


def add_gathered_rows(x: Tensor, rows: Tensor, values: Tensor, *, column: int) -> Tensor:
    """Return `x` [T, H] with the part from `column` on of row rows[t] of `values` [E, W] added to row t, unless rows[t]
    is -1."""
    return _with_rows(x, rows, values, column, adds=True)


def _with_rows(x: Tensor, rows: Tensor, values: Tensor, column: int, adds: bool) -> Tensor:
    out = torch.empty_like(x)
    if len(x):
        grid = len(x), cdiv(x.shape[1], BLOCK)
        _insert_rows[grid](x, rows, values, out, x.shape[1], values.shape[1], column, adds, BLOCK, **PDL)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up, with the gate in the first half of each row: [T, 2 F] -> [T, F]."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows:
        _swiglu[(num_rows, cdiv(width, BLOCK))](gate_up, out, width, BLOCK, **PDL)
    return out


def geglu(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) * up, with the gate in the first half of each row: [T, 2 F] -> [T, F]."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if num_rows:
        _gelu[(num_rows, cdiv(width, BLOCK))](gate_up, out, width, True, BLOCK, **PDL)
    return out


def gelu(x: Tensor) -> Tensor:
    """Compute the tanh approximation of GELU, element by element."""
    out = torch.empty_like(x)
    if len(x):
        _gelu[(len(x), cdiv(x.shape[1], BLOCK))](x, out, x.shape[1], False, BLOCK, **PDL)
    return out


def relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum in the type of `x`; learned positions of images are float32."""
    return x + y.to(x.dtype)


def scale(x: Tensor, *, factor: float) -> Tensor:
    return x * factor


def softcap(x: Tensor, *, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def last_tokens_in(token_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Return `token_ids` with every id below -1 replaced by the token at place -2 - id of `last_tokens`, such as the
    last one that was sampled for a slot."""
    out = torch.empty_like(token_ids)
    block = min(next_power_of_2(len(token_ids)), BLOCK)
    grid = (cdiv(len(token_ids), block),)
    _last_tokens_in[grid](token_ids, last_tokens, out, len(token_ids), block, num_warps=1, **PDL)
    return out


@kernel
def _embedding(token_ids, table, out, first_id, num_ids, width, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + row).to(tl.int64) - first_id
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    num_here = tl.where((token_id >= 0) & (token_id < num_ids), width, 0)
    values = tl.load(table + token_id * width + columns, mask=columns < num_here, other=0)
    tl.store(out + row * width + columns, values, mask=is_in)


@kernel
def _rotary_angles(positions, inv_freq, out, half, attention_scaling, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_in = columns < half
    angles = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + columns, mask=is_in, other=0)
    at = out + row * 2 * half + columns
    tl.store(at, tl.cos(angles) * attention_scaling, mask=is_in)
    tl.store(at + half, tl.sin(angles) * attention_scaling, mask=is_in)


@kernel
def _mrope_angles(positions, inv_freq, axes, out, num_tokens, half, attention_scaling, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_in = columns < half
    axis = tl.load(axes + columns, mask=is_in, other=0)
    position = tl.load(positions + axis * num_tokens + row, mask=is_in, other=0)
    angles = position.to(tl.float32) * tl.load(inv_freq + columns, mask=is_in, other=0)
    at = out + row * 2 * half + columns
    tl.store(at, tl.cos(angles) * attention_scaling, mask=is_in)
    tl.store(at + half, tl.sin(angles) * attention_scaling, mask=is_in)


@kernel
def _insert_rows(x, rows, embeddings, out, width, stride, column, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_values = tl.where(source < 0, 0, width)
    num_kept = width if ADDS else width - num_values
    kept = tl.load(x + row * width + columns, mask=columns < num_kept, other=0)
    values = tl.load(embeddings + source * stride + column + columns, mask=columns < num_values, other=0)
    if ADDS:
        made = (kept.to(tl.float32) + values.to(tl.float32)).to(kept.dtype)
    else:
        made = tl.where(source < 0, kept, values.to(kept.dtype))
    tl.store(out + row * width + columns, made, mask=columns < width)


@kernel
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=is_in, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=is_in, other=0).to(tl.float32)
    tl.store(out + row * width + columns, gate / (1 + tl.exp(-gate)) * up, mask=is_in)


@kernel
def _gelu(x, out, width, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    rows = x + row * (2 * width if HAS_GATE else width)
    value = tl.load(rows + columns, mask=is_in, other=0).to(tl.float32)
    y = value / (1 + tl.exp(-2 * 0.79788456 * (value + 0.044715 * value * value * value)))
    if HAS_GATE:
        y *= tl.load(rows + width + columns, mask=is_in, other=0).to(tl.float32)
    tl.store(out + row * width + columns, y, mask=is_in)


@kernel
def _last_tokens_in(token_ids, last_tokens, out, count, BLOCK: tl.constexpr):
    begin_next()
    wait_for_inputs()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + at, mask=at < count, other=0)
    chosen = tl.load(last_tokens - 2 - ids, mask=(at < count) & (ids < -1), other=0)
    tl.store(out + at, tl.where(ids < -1, chosen, ids), mask=at < count)
