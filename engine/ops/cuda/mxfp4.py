"""Packing of matrices of 4-bit floats (e2m1) with a power of two for each 32 columns (MXFP4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.dtypes import E8M0_VALUES, FP4_PAIRS
from engine.ops.cuda.fp8 import are_multiplied

GROUP = 32  # columns that share a scale
BLOCK = 256  # columns of a packed block
EXPONENT = 6  # an 8-bit float with the bits of a code is the code's number divided by 2^EXPONENT


def pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Pack u8 [N, K / 2], two codes a byte, and exponents u8 [N, K / 32] as i16 [N, blocks, 64], whose bytes hold two
    columns that are 32 apart, and i64 [blocks, N]: eight exponents, larger by EXPONENT. On a device without 8-bit
    floats, return bf16 instead.
    """
    num_rows = len(weight)
    if not are_multiplied():
        return widened(weight, scale), scale
    pairs = functional.pad(weight, (0, -weight.shape[1] % (BLOCK // 2)))
    codes = torch.stack((pairs & 15, pairs >> 4), 2).view(num_rows, -1, 2, GROUP)
    words = (codes[:, :, 0] | codes[:, :, 1] << 4).view(num_rows, -1, BLOCK // 2).view(torch.int16)
    exponents = (scale.int() + EXPONENT).clamp(max=255).to(torch.uint8)
    exponents = functional.pad(exponents, (0, -scale.shape[1] % (BLOCK // GROUP))).contiguous().view(torch.int64)
    return words, exponents.t().contiguous()


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    numbers = torch.from_numpy(FP4_PAIRS).to(weight.device)[weight.long()].view(*scale.shape, GROUP)
    powers = torch.from_numpy(E8M0_VALUES).to(weight.device)[scale.long()]
    return (numbers * powers[:, :, None]).flatten(1).to(torch.bfloat16)
