"""Attention of long prompts that begin in this step, by cuDNN, whose kernel is 1.3 times as fast as ours, and twice as
fast with heads of 256 elements. It needs contiguous keys and values, and their number on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import dropwhile, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.ops.cuda.launch import HAS_COPY_ENGINE

SHORTEST = 4096  # tokens: for fewer it gains next to nothing
SHORTEST_CHUNK = 512  # tokens of a long prompt or chunk
STEP = 1024  # prompts are filled up to a multiple, as each other length costs the host 60 ms, once
MAX_HEAD_DIM = 256  # of cuDNN on compute capability 9.0


class PromptChunk(NamedTuple):
    """A prompt, or a chunk of one."""

    request: int  # its number among those of the step
    begin: int
    end: int  # rows
    context: int = 0  # tokens that were in the cache before this step


class KnownStarts(NamedTuple):
    """The `query_starts` of a step, with what the host knows of it."""

    starts: Tensor
    chunks: Sequence[PromptChunk] = ()  # the last requests of the step, of which the first one is long
    usual_tokens: int = 0  # tokens that hardly any request exceeds, as in a step that verifies drafts; 0: unknown

    @property
    def fresh(self) -> list[PromptChunk]:
        """Return the last prompts that cuDNN may compute: nothing of them is in the cache yet."""
        last = takewhile(lambda each: not each.context and each.end - each.begin >= SHORTEST, reversed(self.chunks))
        return [*last][::-1]


def find(query_starts: np.ndarray, context_lens: np.ndarray) -> list[PromptChunk]:
    """Return the prompts at the end of the step from the first long one on. Requests that decode have one token."""
    chunks: list[PromptChunk] = []
    for request in reversed(range(len(context_lens))):
        begin, end = int(query_starts[request]), int(query_starts[request + 1])
        if end - begin < 2:
            break
        chunks.insert(0, PromptChunk(request, begin, end, int(context_lens[request])))
    return [*dropwhile(lambda each: each.end - each.begin < SHORTEST_CHUNK, chunks)]


def are_taken(dtype: torch.dtype, kv_cache: Tensor) -> bool:
    """Return whether such prompts can be computed this way. On a CPU torch's own attention is used, for tests; cuDNN's
    fast kernel needs a GPU with a copy engine.
    """
    if kv_cache.dtype != dtype or kv_cache.shape[-1] > MAX_HEAD_DIM or kv_cache.shape[-1] % 8:
        return False
    if kv_cache.device.type != "cuda":
        return True
    is_known = kv_cache.shape[-1] <= 128 or torch.cuda.get_device_capability() == (9, 0)
    return is_known and HAS_COPY_ENGINE and torch.backends.cudnn.is_available() and dtype != torch.float32


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
