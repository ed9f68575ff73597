"""The C functions behind numpy arguments. Checks shapes and dtypes once; knows nothing of building or choosing."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from engine.ops.cpu.calls import NUMBER, ArgumentError, call_of
from engine.ops.cpu.library import Counts, CSampling
from engine.ops.sampling_rows import ROW, SampledRows, SamplingRows

F32, BF16, I32, U32 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int32), np.dtype(np.uint32)
BF16_OPS = ("linear", "expert_gate_up", "expert_down")  # ops that have a weight of floats
PACKED_AT_ONCE, WHOLE_PANELS = 1 << 24, 64  # bytes, and rows, a multiple of every panel's
PANEL = 32  # rows of a weight that are packed side by side


def need(op: str, name: str, array: np.ndarray, shape: tuple[int | None, ...], *dtypes: np.dtype) -> int:
    """Check that the array has the shape and one of the types that the kernel reads. Return its address. Raises
    ArgumentError.
    """
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

    def __init__(self, lib: ctypes.CDLL, table: Any):
        self._lib, self._table, self.kernels = lib, table, table.contents
        self.isa: str = self.kernels.isa.decode()

    def run(self, records: int, num_bytes: int, counts: Counts) -> None:
        """Run the records of calls at this address one after the other, without Python's lock. Raises GroupError."""
        if trouble := self._lib.llm_run(self._table, records, num_bytes, counts):
            raise GroupError(trouble.decode())

    def packed_bytes(self, op: str, shape: tuple[int, ...], itemsize: int, num_matrices: int = 1) -> int:
        """Return the bytes of a packed weight of `op`, or 0 if `op` reads the weight as it is stored.

        The rows are those of `num_matrices` matrices, each of which is packed by itself."""
        rows, width = shape[0] // num_matrices, shape[1]
        if op in BF16_OPS:
            return num_matrices * itemsize * self.kernels.pack_weight(None, None, rows, width)
        return num_matrices * -(-rows // PANEL) * PANEL * -(-width * itemsize // 4) * 4

    def pack(
        self,
        op: str,
        rows: np.ndarray,
        packed: np.ndarray,
        num_matrices: int = 1,
        done: Callable[[np.ndarray], None] = lambda piece: None,
    ) -> None:
        """Write `rows` to `packed` in that order, in pieces. `done` is called with each piece of `rows` that is not
        needed any more."""
        address, unit = packed.ctypes.data, 2 if rows.dtype == BF16 else 4
        row_bytes = rows.nbytes // max(1, len(rows))
        num_rows = max(1, PACKED_AT_ONCE // max(1, row_bytes) // WHOLE_PANELS) * WHOLE_PANELS
        for matrix in np.split(rows, num_matrices):
            for start in range(0, len(matrix), num_rows):
                piece = matrix[start : start + num_rows]
                if op in BF16_OPS:
                    self.kernels.pack_weight(piece.ctypes.data, address, *piece.shape)
                else:
                    self.kernels.pack_rows(piece.ctypes.data, len(piece), row_bytes, unit, address)
                address += self.packed_bytes(op, piece.shape, piece.itemsize)
                done(piece)

    def __getattr__(self, name: str) -> Callable:
        """Return an op of the catalogue as a function with the signature of `engine.ops.reference`."""
        if name not in NUMBER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._call, name)

    def prepared(
        self, op: str, inputs: Sequence[np.ndarray | None], y: np.ndarray, attributes: Mapping[str, float]
    ) -> Callable[[], None]:
        """Return a function that computes an op of one output into `y`, which has its shape."""
        call, [output, *_] = call_of(op, inputs, attributes)
        assert output.shape == y.shape and output.dtype == y.dtype
        call.set_output(0, y.ctypes.data)
        kept = (*inputs, y)  # live as long as the function
        return lambda: must_succeed(op, call.run(self._table) if kept else None)

    def _call(self, op: str, *inputs: np.ndarray | None, **attributes: float) -> Any:
        call, outputs = call_of(op, inputs, attributes)
        must_succeed(op, call.run(self._table))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

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
        args = CSampling(**addresses, max_logprobs=rows.max_logprobs)
        self._lib.llm_sample(self._table, logits_at, num_rows, vocab, ctypes.byref(args))
        return results
