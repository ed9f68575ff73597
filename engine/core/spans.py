"""Prompt spans: parts of a prompt whose embeddings come from somewhere other than the embedding table, such as images.

Knows tokens, positions and hashes; no tensors, no blocks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class PromptSpan:
    """Consecutive tokens of a prompt with embeddings of their own. Their token ids are placeholders.

    The spans of a prompt do not overlap and are in the order of their positions.
    """

    start: int  # index of its first token in the prompt
    length: int  # tokens
    content_hash: bytes  # of the content and everything else that the embeddings are computed from
    embeddings: bytes = b""  # f32 [length, hidden size], or wider with DeepStack: a row of SPAN_EMBEDDINGS a token
    # Patches after merging as (frames, rows, columns), whose product is `length`: the 3-D positions of a model with
    # M-RoPE. Without a grid the positions are those of text.
    grid: tuple[int, int, int] | tuple[()] = ()
    # u8 [height, width, 3] of an image whose embeddings are not computed yet. The size follows from the grid and the
    # pixels that a token stands for.
    pixels: bytes = b""

    def without_content(self) -> PromptSpan:
        """Return the span without its embeddings and pixels, for a prompt whose cached prefix covers it."""
        return replace(self, embeddings=b"", pixels=b"")

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def position_delta(self) -> int:
        """Return by how much the 3-D positions behind the span differ from those behind as much text."""
        return max(self.grid) - self.length if self.grid else 0


class CoveredPart(NamedTuple):
    """The tokens that a span and a range of positions have in common."""

    span: PromptSpan
    place: int  # index of the first of them in the range
    offset: int  # index of the first of them in the span
    length: int


def parts_between(spans: Sequence[PromptSpan], start: int, end: int) -> Iterator[CoveredPart]:
    """Yield the part of each span that lies in the positions from `start` to below `end`."""
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            yield CoveredPart(span, first - start, first - span.start, last - first)


def hash_with_spans(block_hash: bytes, spans: Sequence[PromptSpan], start: int, end: int) -> bytes:
    """Return the hash of a block with the positions from `start` to below `end`. `block_hash`: that of its token ids
    and of everything before them. A block that no span covers keeps it."""
    for span, *part in parts_between(spans, start, end):
        text = struct.pack(f"<{len(part) + len(span.grid)}q", *part, *span.grid) + span.content_hash
        block_hash = hashlib.blake2b(block_hash + text, digest_size=16, person=b"span").digest()
    return block_hash


def check_spans(spans: Sequence[PromptSpan], prompt_len: int) -> None:
    """Assert that the spans lie in the prompt, in order and without overlap. A violation is an error of the caller."""
    end = 0
    for span in spans:
        assert span.length > 0 and end <= span.start, f"{span.start}: prompt spans overlap or are empty"
        assert not span.grid or span.grid[0] * span.grid[1] * span.grid[2] == span.length, f"{span.grid} is no grid"
        end = span.end
    assert end <= prompt_len, "a prompt span is longer than the prompt"
