"""The compiled library and the C structures of its functions. Knows nothing of arrays."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import fields

from engine.ops import build
from engine.ops.catalogue import CPU_OPS
from engine.ops.sampling_rows import SampledRows, SamplingRows


def _function(*argtypes: type, returns: type | None = None) -> type:
    return ctypes.CFUNCTYPE(returns, *argtypes)


class Kernels(ctypes.Structure):
    """`LlmKernels` of kernels.h, in its order."""

    _fields_ = [
        ("isa", c_char_p),
        ("ops", c_void_p * len(CPU_OPS)),
        ("pack_weight", _function(c_void_p, c_void_p, c_int64, c_int64, returns=c_int64)),
        ("pack_rows", _function(c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        ("add_product", _function(c_void_p)),
        ("largest", _function(c_void_p, c_int64, returns=c_float)),
        ("find", _function(c_void_p, c_int64, c_float, returns=c_int64)),
        ("weigh", _function(c_void_p, c_void_p, c_int64, c_float, c_float)),
        ("add_up", _function(c_void_p, c_int64, returns=c_double)),
        ("at_least", _function(c_void_p, c_int64, c_float, c_void_p, returns=c_int64)),
        ("weight_at_least", _function(c_void_p, c_void_p, c_int64, c_float, c_void_p, returns=c_int64)),
    ]


class CArray(ctypes.Structure):
    """`LlmArray` of calls.h."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int32) for name in ("type", "rank", "is_packed")),
        ("shape", c_int64 * 5),
    ]


class CallHead(ctypes.Structure):
    """`LlmCall` of calls.h."""

    _fields_ = [("op", c_int32), ("of_logits", c_int32), ("num_bytes", c_int64)]


class CSampling(ctypes.Structure):
    """`LlmSampling` of kernels.h: the fields of SamplingRows, then those of SampledRows."""

    _fields_ = [
        *((field.name, c_void_p) for field in (*fields(SamplingRows), *fields(SampledRows))),
        ("max_logprobs", c_int64),
    ]


class CAdapterPair(ctypes.Structure):
    """`LlmPair` of program.h."""

    _fields_ = [
        *((name, c_int64) for name in ("call", "rank", "first", "num_out")),
        *((name, c_void_p) for name in ("a", "b")),
    ]


class CAdapterRows(ctypes.Structure):
    """`LlmGroup` of program.h."""

    _fields_ = [("pair", c_void_p), ("end", c_void_p), ("rows", c_void_p * 2), ("num_rows", c_int64 * 2)]


class Counts(ctypes.Structure):
    """`LlmCounts` of program.h."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "logits", "requests", "max_blocks")),
        ("groups", c_void_p),
        ("num_groups", c_int64),
    ]


@functools.cache
def c_library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build.library()))
    lib.llm_kernels.argtypes, lib.llm_kernels.restype = [c_char_p], POINTER(Kernels)
    lib.llm_isas.argtypes, lib.llm_isas.restype = [c_int, c_int], c_char_p
    lib.llm_num_threads.restype = c_int
    lib.llm_set_num_threads.argtypes, lib.llm_set_num_threads.restype = [c_int], None
    lib.llm_sample.argtypes = [POINTER(Kernels), c_void_p, c_int64, c_int64, POINTER(CSampling)]
    lib.llm_sample.restype = None
    lib.llm_run.argtypes, lib.llm_run.restype = [POINTER(Kernels), c_void_p, c_int64, POINTER(Counts)], c_char_p
    for function in (lib.llm_shapes, lib.llm_check):
        function.argtypes, function.restype = [c_int32, c_void_p, c_void_p], c_char_p
    lib.llm_call.argtypes, lib.llm_call.restype = [POINTER(Kernels), c_int32, c_void_p, c_void_p], c_char_p
    lib.llm_record.argtypes, lib.llm_record.restype = [POINTER(CallHead), c_void_p, c_void_p, c_void_p], c_char_p
    lib.llm_all_reduce.argtypes, lib.llm_all_reduce.restype = [c_void_p, c_void_p, c_int64], c_char_p
    lib.llm_join.argtypes, lib.llm_join.restype = [c_void_p], c_char_p
    lib.llm_leave.restype = None
    lib.llm_num_ranks.restype = c_int64
    lib.llm_shared_memory_bytes.argtypes, lib.llm_shared_memory_bytes.restype = [c_int64, c_int64], c_int64
    return lib
