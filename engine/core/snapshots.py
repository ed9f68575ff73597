"""Positions in a prompt at which the state of a request is kept for the prefix cache. Knows tokens and positions; no
blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.cache_groups import MAX_REJECTED
from engine.core.types import Request


def snapshot_positions(request: Request, block_size: int) -> set[int]:
    """Return the positions in the prompt of `request`, which begins to compute at `num_computed`, at which its state is
    kept.

    These are the places up to which later prompts are likely to be equal, rounded down to whole blocks: the end of the
    first message of a chat, which is the system prompt if it has one, of the last message and of the last image. A
    prompt that found nothing of the messages between, such as examples, also keeps the end of the last but one. At the
    branch point it is known that another prompt was equal. The end of the prompt is not rounded, so that no step has to
    stop before it; its state also serves prompts that differ in the last MAX_REJECTED tokens.
    """
    last = (request.prompt_len - 1) // block_size * block_size
    ends = _message_ends(request.token_ids, request.prompt_len, request.sampling.stop_token_ids)
    wanted = [*ends[:1], *ends[-1:], *(span.end for span in request.spans[-1:])]
    if ends and request.num_computed <= ends[0]:
        wanted += ends[-2:-1]
    blocks = {end // block_size * block_size for end in wanted if end < max(last, request.prompt_len - MAX_REJECTED)}
    positions = {request.cache.branch_point, *blocks}
    if last > max(request.num_computed // block_size * block_size, *blocks, 0):
        # Of a block with one token, an equal prompt could not find anything.
        positions.add(last if last == request.prompt_len - 1 else request.prompt_len)
    return positions


def _message_ends(token_ids: Sequence[int], prompt_len: int, stop_token_ids: Collection[int]) -> list[int]:
    """Return the positions behind the messages of a prompt, in ascending order. Chat templates end each message with a
    token that also ends an answer."""
    ends = []
    for stop_id in stop_token_ids:
        start = 0
        while True:
            try:
                start = token_ids.index(stop_id, start, prompt_len) + 1
            except ValueError:
                break
            ends.append(start)
    return sorted(ends)
