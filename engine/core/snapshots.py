"""Positions in a prompt at which the state of a request is kept for the prefix cache. Knows tokens and positions; no
blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.core.types import Request


def snapshot_positions(request: Request, block_size: int) -> set[int]:
    """Return the positions in the prompt of `request`, which begins to compute at `num_computed`, at which its state is
    kept, rounded down to whole blocks.

    These are the places up to which later prompts are likely to be equal: the end of the first message of a chat, which
    is the system prompt if it has one, of the last message and of the last image, and the last full block. A prompt
    that found nothing of the messages between, such as examples, also keeps the end of the last but one. At the branch
    point it is known that another prompt was equal.
    """
    last = request.prompt_len - 1
    ends = _message_ends(request.token_ids, request.prompt_len, request.sampling.stop_token_ids)
    positions = [last, *ends[:1], *ends[-1:], *(span.end for span in request.spans[-1:])]
    if ends and request.num_computed <= ends[0]:
        positions += ends[-2:-1]
    return {request.branch_point, *(min(position, last) // block_size * block_size for position in positions)}


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
