"""Columns of the sampler's rows. Needs no numpy: the CPU ops are compiled while the packages are being installed."""

from __future__ import annotations

import ctypes

from engine.sampling_parameters import PARAMETERS


class SamplingRow(ctypes.Structure):
    """The values of one row, from which numpy's type and LlmSamplingRow of the C library follow."""

    _fields_ = [
        ("num_logprobs", ctypes.c_int32),  # -1 none, 0 the chosen token's alone
        ("seed", ctypes.c_uint64),
        ("counter", ctypes.c_int64),  # index of the token in the answer
        ("seen_starts", ctypes.c_int32),
        ("seen_ends", ctypes.c_int32),
        *((each.name, ctypes.c_int32 if each.type is int else ctypes.c_float) for each in PARAMETERS),
    ]
