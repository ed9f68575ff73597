"""Attention of long prompts that begin in this step, by cuDNN, whose kernel is 1.3 times as fast as ours. It needs
contiguous keys and values, and their number on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The `query_starts` of a step, with what the host knows of it."""

    starts: Tensor
    fresh: Sequence[Fresh] = ()  # such prompts, which are the last ones of the step
    few: int = 0  # tokens that hardly any request exceeds, as in a step that verifies drafts; 0: unknown


def find(query_starts: np.ndarray, context_lens: np.ndarray) -> list[Fresh]:
    """Return the long prompts at the end of the step that have nothing in the cache yet."""
    fresh: list[Fresh] = []
    for request in reversed(range(len(context_lens))):
        begin, end = int(query_starts[request]), int(query_starts[request + 1])
        if context_lens[request] or end - begin < SHORTEST:
            break
        fresh.insert(0, Fresh(request, begin, end))
    return fresh


def are_taken(dtype: torch.dtype, kv_cache: Tensor) -> bool:
    """Return whether such prompts can be computed this way. On a CPU torch's own attention is used, for tests; cuDNN's
    fast kernel needs a GPU with a copy engine.
    """
    if kv_cache.dtype != dtype or kv_cache.shape[-1] > MAX_HEAD_DIM or kv_cache.shape[-1] % 8:
        return False
    if kv_cache.device.type != "cuda":
        return True
    return HAS_COPY_ENGINE and torch.backends.cudnn.is_available() and dtype != torch.float32


def attend(query: Tensor, pairs: Tensor, scale: float) -> Tensor:
    """Compute causal attention of queries [T, Hq D], the first tokens of a request, over `pairs` [2, Hkv, T, D], its
    keys and values. Return [T, Hq D].
    """
    num_tokens, fill = len(query), -len(query) % STEP
    if fill:  # behind the last token, which does not see it
        query, pairs = pad(query, (0, 0, 0, fill)), pad(pairs, (0, 0, 0, fill))
    queries = query.view(1, num_tokens + fill, -1, pairs.shape[-1]).transpose(1, 2)
    keys, values = pairs[:, None]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if query.device.type == "cuda" else nullcontext():
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(num_tokens + fill, -1)[:num_tokens]
