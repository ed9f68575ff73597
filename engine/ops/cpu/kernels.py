"""The C functions behind numpy arguments. Checks shapes and dtypes once; knows nothing of building or choosing."""

from __future__ import annotations

import ctypes
from dataclasses import fields

import numpy as np

from engine.dtypes import CODES_ALIGNED, CODES_PER_SCALE, FP8_BLOCK, from_fp8, scale_bytes, to_bf16
from engine.ops.cpu.library import Attention, Call, Counts, Embedding, QuantizedLinear, Sampling
from engine.ops.sampling_rows import ROW, SampledRows, SamplingRows

F32, BF16, I32, U32 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int32), np.dtype(np.uint32)
I8, U8 = np.dtype(np.int8), np.dtype(np.uint8)
PANEL = 32  # rows of a weight that are packed side by side
NO_END = 2**31  # of ids whose rows other ranks may hold


class ArgumentError(ValueError):
    """An op was called with an array of the wrong shape or dtype."""


def need(op: str, name: str, array: np.ndarray, shape: tuple[int | None, ...], *dtypes: np.dtype) -> int:
    """The array's address, once it is known to be what the kernel reads."""
    if array.shape != shape and (
        array.ndim != len(shape)
        or any(wanted is not None and wanted != size for wanted, size in zip(shape, array.shape, strict=True))
    ):
        needed = str(shape).replace("None", "any")
        raise ArgumentError(f"{op}: {name} has shape {array.shape}, needs {needed}")
    if array.dtype not in dtypes:
        raise ArgumentError(f"{op}: {name} is {array.dtype}, needs {' or '.join(map(str, dtypes))}")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{op}: {name} must be dense and row-major")
    return array.ctypes.data


class GroupError(RuntimeError):
    """The ranks can no longer speak with one another: a process, a connection or the whole group has ended."""


def must_succeed(op: str, trouble: bytes | None) -> None:
    if trouble:
        raise GroupError(f"{op}: {trouble.decode()}")


def need_ids(op: str, name: str, ids: np.ndarray, end: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < end:
        raise ArgumentError(f"{op}: {name} has values in {ids.min()} .. {ids.max()}, needs 0 .. {end - 1}")


class CpuOps:
    """The ops of one instruction set. Signatures and results are those of `engine.ops.reference`."""

    def __init__(self, lib: ctypes.CDLL, table):
        self._lib, self._table, self.kernels = lib, table, table.contents
        self.isa: str = self.kernels.isa.decode()

    def run(self, calls: ctypes.Array[Call], counts: Counts) -> None:
        """One after the other, without Python's lock. Raises GroupError."""
        if trouble := self._lib.llm_run(self._table, calls, len(calls), counts):
            raise GroupError(trouble.decode())

    def packed_bytes(self, op: str, shape: tuple[int, ...], itemsize: int) -> int:
        """Of what `op` multiplies with, in the order in which that is read fastest; 0 where it is read as it is."""
        if op == "linear":  # bf16
            return itemsize * self.kernels.pack_weight(None, None, *shape)
        return -(-shape[0] // PANEL) * PANEL * -(-shape[1] * itemsize // 4) * 4

    def pack(self, op: str, rows: np.ndarray, packed: np.ndarray) -> None:
        """Puts it into that order, where `packed` begins."""
        if op == "linear":
            self.kernels.pack_weight(rows.ctypes.data, packed.ctypes.data, *rows.shape)
        else:
            unit = 2 if rows.dtype == BF16 else 4
            self.kernels.pack_rows(
                rows.ctypes.data, len(rows), rows.nbytes // max(1, len(rows)), unit, packed.ctypes.data
            )

    def embedding(self, token_ids, table, *, first_id):
        token_ids_at = need("embedding", "token_ids", token_ids, (None,), I32)
        table_at = need("embedding", "table", table, (None, None), F32, BF16)
        need_ids("embedding", "token_ids", token_ids, NO_END)
        y = np.empty((len(token_ids), table.shape[1]), F32)
        args = Embedding(token_ids_at, table_at, y.ctypes.data, *y.shape, len(table), first_id, table.dtype == BF16)
        self.kernels.embedding(ctypes.addressof(args))
        return y

    def all_reduce(self, x):
        x_at = need("all_reduce", "x", x, (None, None), F32)
        y = np.empty_like(x)
        must_succeed("all_reduce", self._lib.llm_all_reduce(x_at, y.ctypes.data, x.size))
        return y

    def all_gather(self, x, *, num_ranks, width):
        x_at = need("all_gather", "x", x, (None, None), F32)
        if num_ranks != self._lib.llm_num_ranks():
            raise ArgumentError(
                f"all_gather: num_ranks is {num_ranks}, this process is one of {self._lib.llm_num_ranks()}"
            )
        if not 0 <= width <= num_ranks * x.shape[1]:
            raise ArgumentError(f"all_gather: width is {width}, needs 0 .. {num_ranks * x.shape[1]}")
        y = np.empty((len(x), width), F32)
        must_succeed("all_gather", self._lib.llm_all_gather(x_at, y.ctypes.data, *x.shape, width))
        return y

    def gather_rows(self, x, rows):
        x_at = need("gather_rows", "x", x, (None, None), F32)
        rows_at = need("gather_rows", "rows", rows, (None,), I32)
        need_ids("gather_rows", "rows", rows, len(x))
        y = np.empty((len(rows), x.shape[1]), F32)
        self.kernels.gather_rows(x_at, rows_at, y.ctypes.data, *y.shape)
        return y

    def rms_norm(self, x, weight, *, epsilon):
        x_at = need("rms_norm", "x", x, (None, None), F32)
        weight_at = need("rms_norm", "weight", weight, (x.shape[1],), F32)
        y = np.empty_like(x)
        self.kernels.rms_norm(x_at, weight_at, y.ctypes.data, *x.shape, epsilon)
        return y

    def add_rms_norm(self, x, residual, weight, *, epsilon):
        x_at = need("add_rms_norm", "x", x, (None, None), F32)
        residual_at = need("add_rms_norm", "residual", residual, x.shape, F32)
        weight_at = need("add_rms_norm", "weight", weight, (x.shape[1],), F32)
        y = np.empty_like(x)
        self.kernels.add_rms_norm(x_at, residual_at, weight_at, y.ctypes.data, *x.shape, epsilon)
        return y, residual

    def head_norm(self, qkv, q_weight, k_weight, *, num_heads, num_kv_heads, epsilon):  # noqa: PLR0913
        head_dim = q_weight.size
        qkv_at = need("head_norm", "qkv", qkv, (None, (num_heads + 2 * num_kv_heads) * head_dim), F32)
        q_weight_at = need("head_norm", "q_weight", q_weight, (head_dim,), F32)
        k_weight_at = need("head_norm", "k_weight", k_weight, (head_dim,), F32)
        y = np.empty_like(qkv)
        sizes = (len(qkv), num_heads, num_kv_heads, head_dim)
        self.kernels.head_norm(qkv_at, q_weight_at, k_weight_at, y.ctypes.data, *sizes, epsilon)
        return y

    def linear(self, x, weight, bias=None):
        x_at = need("linear", "x", x, (None, None), F32)
        weight_at = need("linear", "weight", weight, (None, x.shape[1]), F32, BF16)
        bias_at = None if bias is None else need("linear", "bias", bias, (len(weight),), F32)
        y = np.empty((len(x), len(weight)), F32)
        is_bf16 = weight.dtype == BF16
        self.kernels.linear(x_at, weight_at, is_bf16, bias_at, y.ctypes.data, *x.shape, len(weight))
        return y

    def linear_int8(self, x, weight, scale, bias=None):
        return self._linear_of_bytes("linear_int8", (x, weight, scale, bias))

    def linear_a8w8(self, x, weight, scale, bias=None):
        return self._linear_of_bytes("linear_a8w8", (x, weight, scale, bias))

    def _linear_of_bytes(self, op, inputs):
        x, weight, scale, bias = inputs
        x_at = need(op, "x", x, (None, None), F32)
        weight_at = need(op, "weight", weight, (None, x.shape[1]), I8)
        scale_at = need(op, "scale", scale, (len(weight),), F32)
        bias_at = None if bias is None else need(op, "bias", bias, (len(weight),), F32)
        y = np.empty((len(x), len(weight)), F32)
        args = QuantizedLinear(x_at, weight_at, scale_at, None, bias_at, y.ctypes.data, *x.shape, len(weight))
        getattr(self.kernels, op)(ctypes.addressof(args))
        return y

    def linear_int4(self, x, weight, scale, zero=None, bias=None):  # noqa: PLR0913 - the inputs of the catalogue
        op, width = "linear_int4", -(-x.shape[1] // CODES_ALIGNED) * CODES_ALIGNED
        x_at = need(op, "x", x, (None, None), F32)
        weight_at = need(op, "weight", weight, (None, width // 2), U8)
        scale_at = need(op, "scale", scale, (len(weight), width // CODES_PER_SCALE), BF16)
        zero_at = None if zero is None else need(op, "zero", zero, scale.shape, BF16)
        bias_at = None if bias is None else need(op, "bias", bias, (len(weight),), F32)
        y = np.empty((len(x), len(weight)), F32)
        args = QuantizedLinear(x_at, weight_at, scale_at, zero_at, bias_at, y.ctypes.data, *x.shape, len(weight))
        self.kernels.linear_int4(ctypes.addressof(args))
        return y

    def linear_fp8(self, x, weight, scale, bias=None):
        op = "linear_fp8"
        need(op, "weight", weight, (None, x.shape[1]), U8)
        groups = 1 if scale.shape[1:] == (1,) else -(-x.shape[1] // FP8_BLOCK)
        need(op, "scale", scale, (len(weight), groups), F32)
        return self.linear(x, to_bf16(from_fp8(weight, scale)), bias)

    def rotary_angles(self, positions, inv_freq, *, attention_scaling):
        positions_at = need("rotary_angles", "positions", positions, (None,), I32)
        inv_freq_at = need("rotary_angles", "inv_freq", inv_freq, (None,), F32)
        y = np.empty((len(positions), 2 * len(inv_freq)), F32)
        sizes = (len(positions), len(inv_freq))
        self.kernels.rotary_angles(positions_at, inv_freq_at, y.ctypes.data, *sizes, attention_scaling)
        return y

    def paged_attention(  # noqa: PLR0913 - the inputs of the catalogue, in its order
        self, qkv, cos_sin, kv_cache, query_starts, context_lens, block_tables, *, num_heads, num_kv_heads, scale
    ):
        op = "paged_attention"
        kv_cache_at = need(op, "kv_cache", kv_cache, (None, 2, num_kv_heads, None, None), F32, BF16, I8)
        block_size, head_dim = kv_cache.shape[3], kv_cache.shape[4] - scale_bytes(kv_cache.dtype)
        qkv_at = need(op, "qkv", qkv, (None, (num_heads + 2 * num_kv_heads) * head_dim), F32)
        cos_sin_at = need(op, "cos_sin", cos_sin, (len(qkv), None), F32)
        context_lens_at = need(op, "context_lens", context_lens, (None,), I32)
        query_starts_at = need(op, "query_starts", query_starts, (len(context_lens) + 1,), I32)
        block_tables_at = need(op, "block_tables", block_tables, (len(context_lens), None), I32)
        if num_heads % num_kv_heads or cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2 or head_dim % 2:
            raise ArgumentError(
                f"{op}: {num_heads} heads, {num_kv_heads} key/value heads of {head_dim}, "
                f"{cos_sin.shape[1]} of them rotated: must divide, must be even and fit"
            )
        _check_batch(op, query_starts, context_lens, block_tables, (len(qkv), len(kv_cache), block_size))
        out = np.empty((len(qkv), num_heads * head_dim), F32)
        addresses = (qkv_at, cos_sin_at, kv_cache_at, query_starts_at, context_lens_at, block_tables_at)
        sizes = (len(context_lens), num_heads, num_kv_heads, head_dim, cos_sin.shape[1], block_size)
        num_bits = 8 * kv_cache.itemsize
        args = Attention(*addresses, out.ctypes.data, *sizes, block_tables.shape[1], scale, num_bits)
        self.kernels.paged_attention(ctypes.addressof(args))
        return out, kv_cache

    def swiglu(self, gate_up):
        gate_up_at = need("swiglu", "gate_up", gate_up, (None, None), F32)
        rows, width = gate_up.shape
        if width % 2:
            raise ArgumentError(f"swiglu: gate_up has shape {gate_up.shape}, needs an even width")
        y = np.empty((rows, width // 2), F32)
        self.kernels.swiglu(gate_up_at, y.ctypes.data, *y.shape)
        return y

    def sample(self, logits: np.ndarray, rows: SamplingRows) -> SampledRows:
        num_rows, vocab = logits.shape
        logits_at = need("sample", "logits", logits, (None, None), F32)
        results = SampledRows.empty(num_rows, rows.max_logprobs)
        wanted = {
            "values": ((num_rows,), ROW),
            "seen_ids": ((None,), I32),
            "seen_counts": ((None,), I32),
            "bias_starts": ((num_rows + 1,), I32),
            "bias_ids": ((None,), I32),
            "bias": ((None,), F32),
            "mask": ((num_rows, -(-vocab // 32)), U32),
            "given": ((num_rows,), I32),
        }
        addresses = {
            name: need("sample", name, array, shape, dtype)
            for name, (shape, dtype) in wanted.items()
            if (array := getattr(rows, name)) is not None
        }
        need_ids("sample", "bias_ids", rows.bias_ids, vocab)
        if rows.given is not None:
            need_ids("sample", "given", rows.given, vocab)
        addresses |= {field.name: getattr(results, field.name).ctypes.data for field in fields(SampledRows)}
        args = Sampling(**addresses, max_logprobs=rows.max_logprobs)
        self._lib.llm_sample(self._table, logits_at, num_rows, vocab, ctypes.byref(args))
        return results


def _check_batch(op: str, query_starts, context_lens, block_tables, sizes: tuple[int, int, int]) -> None:
    """A wrong number here would write into another request's cache, or outside of it."""
    num_tokens, num_blocks, block_size = sizes
    counts = np.diff(query_starts)
    if query_starts[0] != 0 or query_starts[-1] != num_tokens or (counts < 0).any():
        raise ArgumentError(f"{op}: query_starts {query_starts} does not cut 0 .. {num_tokens} into requests")
    used = -(-(context_lens + counts) // block_size)
    if (context_lens < 0).any() or (used > block_tables.shape[1]).any():
        raise ArgumentError(f"{op}: block_tables has {block_tables.shape[1]} blocks a request, needs {used.max()}")
    for row, count in zip(block_tables, used, strict=True):
        need_ids(op, "block_tables", row[:count], num_blocks)
