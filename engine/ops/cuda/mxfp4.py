"""Packing of matrices of 4-bit floats (e2m1) with a power of two for each 32 columns (MXFP4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.dtypes import E8M0_VALUES, FP4_PAIRS

GROUP = 32  # columns that share a scale
PARTS = 4  # groups of a packed block
ROWS = 16  # rows whose words of a block are contiguous, because programs of experts_kernels.py read them at a time
EXPONENT = 126  # a bf16 that has the bits of a code is the code's number divided by 2^EXPONENT
LARGEST = 254 - EXPONENT  # biased exponent for which the power of two, times 2^EXPONENT, is a bf16
PACKED = 1 << 24  # bytes that are packed at a time


def pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Pack u8 [N, K / 2], two codes a byte, and exponents u8 [N, K / 32] as i16 [N, blocks, 32], whose words hold a
    column of each group of a block, and i32 [blocks, N]: four exponents, larger by EXPONENT. In memory, the words of
    ROWS rows have the order [blocks, ROWS, 32]. Matrices with powers of more than 2, which released models do not have,
    become bf16 instead.
    """
    if int(scale.max()) > LARGEST:
        return widened(weight, scale), scale
    assert len(weight) % ROWS == 0  # it is a multiple of GROUP, like the columns of the expert's other matrix
    rows = max(1, PACKED // weight[:ROWS].numel()) * ROWS
    words = torch.cat([_words(part) for part in weight.split(rows)])
    exponents = functional.pad(scale + EXPONENT, (0, -scale.shape[1] % PARTS)).contiguous().view(torch.int32)
    return words, exponents.t().contiguous()


def _words(weight: Tensor) -> Tensor:
    pairs = functional.pad(weight, (0, -weight.shape[1] % (PARTS * GROUP // 2)))
    codes = torch.stack((pairs & 15, pairs >> 4), 2).view(len(weight), -1, PARTS, GROUP).int()
    sign, size = (codes >> 3).unbind(2), (codes & 7).unbind(2)
    others = size[1].unflatten(2, (-1, 2)).flip(3).flatten(2)  # of the neighbour, as two words are turned as one
    words = sign[0] << 15 | size[0] << 6 | sign[1] << 5 | others << 12 | sign[2] << 9 | size[2]
    words = words | sign[3] << 11 | (size[3] & 6) << 2 | (size[3] & 1) << 10
    return words.to(torch.int16).unflatten(0, (-1, ROWS)).transpose(1, 2).reshape(words.shape)


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    numbers = torch.from_numpy(FP4_PAIRS).to(weight.device)[weight.long()].view(*scale.shape, GROUP)
    powers = torch.from_numpy(E8M0_VALUES).to(weight.device)[scale.long()]
    return (numbers * powers[:, :, None]).flatten(1).to(torch.bfloat16)
