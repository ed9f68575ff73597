"""Shapes of the steps that CUDA graphs are captured for, and the padding of a step's inputs to such a shape. All of it
is computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executors.cuda.sampling import CAPTURED
from engine.ops.sampling_rows import SamplingRows
from engine.sampling_parameters import PARAMETERS
from engine.settings.config import Config

TOKENS = (64, 128, 256, 512)  # of steps with prompts; in larger steps the GPU takes longer than the host
MAX_VERIFYING = 1024  # tokens of steps that verify drafts, whose launch would delay the drafts behind it
# Fields that sampling reads for each row. Those of 8 bytes come first, for their alignment.
CHOICE = ("seed", "counter", "slots", *CAPTURED)
KEPT_ROWS = "kept_rows"  # i64 [T]: rows of a memory that keeps the hidden states of all tokens
DTYPES = {"seed": torch.int64, "counter": torch.int64, "slots": torch.int64, KEPT_ROWS: torch.int64}
DTYPES |= {each.name: torch.float32 for each in PARAMETERS if each.type is float}  # the others are int32
Arrays = dict[str, np.ndarray]


class Shape(NamedTuple):
    """Numbers of tokens, requests and logits of a captured step."""

    num_tokens: int
    num_requests: int
    num_logits: int
    usual_tokens: int = 0  # of a step that verifies drafts: tokens that hardly any request exceeds

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests

    @property
    def samples_all(self) -> bool:
        """Return whether each token gives logits, in order, from which a token is sampled."""
        return self.is_decode or self.usual_tokens > 0


def padding_step(shape: Shape, padding_slot: int) -> Arrays:
    """Build a step of padding tokens with the shape of a captured step: one token for each request in a decode step,
    otherwise all of them in the last request. In a step with prompts no attention is computed for them."""
    num_tokens, num_requests, num_logits, usual_tokens = shape
    starts = np.arange(num_requests + 1) if shape.is_decode else np.zeros(num_requests + 1)
    if usual_tokens:
        starts[-1] = num_tokens
    arrays: Arrays = {}
    if shape.samples_all:
        rows = SamplingRows.greedy(num_logits)
        slots = np.full(num_logits, padding_slot)
        arrays = {name: slots if name == "slots" else getattr(rows, name) for name in CHOICE}
    sizes = {"token_ids": num_tokens, "positions": num_tokens, "context_lens": num_requests}
    arrays |= {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return arrays | {"query_starts": starts.astype(np.int32), "logit_rows": np.arange(num_logits, dtype=np.int32)}


def uncaptured_inputs(inputs: Arrays, empty: Arrays) -> Arrays:
    """Return the `inputs` that a captured step cannot take: those that it lacks, or whose last axis is too long for
    it."""
    return {
        name: array for name, array in inputs.items() if name not in empty or array.shape[-1] > empty[name].shape[-1]
    }


def padded_inputs(inputs: Arrays, empty: Arrays) -> list[np.ndarray]:
    """Return all static inputs of a captured step as flat i32 arrays, in the order of `empty`.

    The values are those of `inputs`, padded at the end of the last axis with those of `empty`. An input that is missing
    or too long takes the value of `empty`.
    """
    parts = []
    for name, whole in empty.items():
        array = inputs.get(name, whole)
        count, size = array.shape[-1], whole.shape[-1]
        if count > size:
            array = whole
        elif count < size:
            rest = whole[..., count:]
            if name == "query_starts":
                rest = np.maximum(rest, array[-1])
            array = np.concatenate([array, rest], axis=-1)
        parts.append(np.ascontiguousarray(array, whole.dtype).reshape(-1).view(np.int32))
    return parts


def num_packed(step: Arrays) -> int:
    """Return the length of the arrays of `padded_inputs` together."""
    return sum([array.nbytes // 4 for array in step.values()])


def pad_table(table: np.ndarray, shape: tuple[int, int], value: int) -> np.ndarray:
    """Return the table with rows and columns of `value` behind its own, i32 of this shape. It takes a tenth of the time
    of np.pad."""
    if table.shape == shape:
        return table
    whole = np.full(shape, value, np.int32)
    whole[: len(table), : table.shape[1]] = table
    return whole


def unpack_inputs(numbers: Tensor, step: Arrays) -> dict[str, Tensor]:
    """Return views of the packed `numbers` as the arrays of the step, by name."""
    parts = numbers.split([array.nbytes // 4 for array in step.values()])
    return {
        name: part.view(DTYPES.get(name, torch.int32)).view(array.shape)
        for (name, array), part in zip(step.items(), parts, strict=True)
    }


def decode_shapes(sizes: str, batch_size: int) -> list[Shape]:
    """Return the shapes of the listed sizes, each limited to `batch_size`."""
    wanted = {min(int(size), batch_size) for size in sizes.split(",")}
    return [Shape(size, size, size) for size in sorted(wanted)]


def verifying_shapes(config: Config, decodes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of steps that verify drafts: as many tokens as captured decode steps have requests, times one
    more than the drafts of a request. They have a request more than such a step can have, for padding, and never as
    many as tokens."""
    usual_tokens, most = config.speculate_max_draft_token_num + 1, min(MAX_VERIFYING, config.max_step_tokens)
    shapes = []
    for num_tokens in sorted({2, *(usual_tokens * shape.num_tokens for shape in decodes)}):
        num_requests = min(num_tokens, config.batch_size) + 1
        if num_tokens <= most:
            shapes.append(Shape(num_tokens, num_requests + (num_requests == num_tokens), num_tokens, usual_tokens))
    return shapes


def prompt_shapes(batch_size: int, max_tokens: int) -> list[Shape]:
    """Return the shapes of steps with prompts, with at most `max_tokens` tokens.

    Each has one more request than a batch can have, for padding. The number of requests never equals that of tokens,
    which marks a decode step.
    """
    shapes = []
    for num_tokens in TOKENS:
        num_requests = batch_size + 1 + (batch_size + 1 == num_tokens)
        if num_tokens <= max_tokens:
            shapes.append(Shape(num_tokens, num_requests, min(num_tokens, num_requests)))
    return shapes
