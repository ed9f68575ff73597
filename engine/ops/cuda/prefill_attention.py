"""Attention of long prompts that begin in this step, by cuDNN, whose kernel has 1.3 times the speed of ours. It wants
keys and values side by side, and to know their number on the host.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.ops.cuda.launch import HAS_COPY_ENGINE

SHORTEST = 4096  # tokens: for fewer it gains next to nothing
STEP = 1024  # prompts are filled up to a multiple, as each other length costs the host 60 ms, once
MAX_HEAD_DIM = 128


class Fresh(NamedTuple):
    """A prompt of which nothing was in the cache before this step."""

    request: int  # its number among those of the step
    begin: int
    end: int  # rows


class KnownStarts(NamedTuple):
    """What is given as `query_starts` for a step with such prompts, which are its last ones."""

    starts: Tensor
    fresh: list[Fresh]


def find(query_starts: np.ndarray, context_lens: np.ndarray) -> list[Fresh]:
    """The long ones behind which there are no others."""
    fresh: list[Fresh] = []
    for request in reversed(range(len(context_lens))):
        begin, end = int(query_starts[request]), int(query_starts[request + 1])
        if context_lens[request] or end - begin < SHORTEST:
            break
        fresh.insert(0, Fresh(request, begin, end))
    return fresh


def are_taken(dtype: torch.dtype, kv_cache: Tensor) -> bool:
    """On a CPU, for tests, by what torch has there; cuDNN's fast kernel is for GPUs with a copy engine."""
    if kv_cache.dtype != dtype or kv_cache.shape[-1] > MAX_HEAD_DIM or kv_cache.shape[-1] % 8:
        return False
    if kv_cache.device.type != "cuda":
        return True
    return HAS_COPY_ENGINE and torch.backends.cudnn.is_available() and dtype != torch.float32


def attend(query: Tensor, pairs: Tensor, scale: float) -> Tensor:
    """Queries [T, Hq D] of the first tokens of a request, whose keys and values are `pairs` [2, Hkv, T, D]:
    [T, Hq D]."""
    num_tokens, fill = len(query), -len(query) % STEP
    if fill:  # behind the last token, which does not see it
        query, pairs = pad(query, (0, 0, 0, fill)), pad(pairs, (0, 0, 0, fill))
    queries = query.view(1, num_tokens + fill, -1, pairs.shape[-1]).transpose(1, 2)
    keys, values = pairs[:, None]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if query.device.type == "cuda" else nullcontext():
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(num_tokens + fill, -1)[:num_tokens]
