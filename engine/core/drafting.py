"""Guesses what follows, so that a step can check several tokens at once. Knows token ids, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.core.types import Request

MIN_NGRAM = 2  # one token alone says too little of what follows
MAX_PAUSE = 64  # tokens without a draft after drafts that were wrong


class Drafter(Protocol):
    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow those of `request`; none when nothing is likely. Called for each
        step that may compute its last token, and again if the step has left the request out."""
        ...


class _Memory:
    """Of one request: where each n-gram was last seen, and how good the drafts were."""

    def __init__(self) -> None:
        self.end_of: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed
        self.num_read = 0
        self.size = 1  # of the next draft; grows while drafts are right
        self.pause = 1  # tokens to wait after the next wrong draft; grows while drafts are wrong
        self.resume_at = 0  # length of the request
        self.drafted: tuple[int, Sequence[int]] | None = None  # where the last draft began, and it


class NgramDrafter:
    """Prompt lookup (Saxena, 2023): the last tokens have occurred before, so what followed then may follow again.

    Where nothing repeats itself drafts are rare: each wrong one doubles the pause until the next.
    """

    def __init__(self, max_ngram: int, max_draft: int):
        self._sizes = range(max_ngram, min(MIN_NGRAM, max_ngram) - 1, -1)
        self._max_draft = max_draft
        self._memories: WeakKeyDictionary[Request, _Memory] = WeakKeyDictionary()

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        memory = self._memories.get(request)
        if memory is None:
            memory = self._memories[request] = _Memory()
        token_ids = request.token_ids
        self._judge(memory, token_ids)
        self._read(memory, token_ids)
        if len(token_ids) < memory.resume_at:
            return ()
        for size in self._sizes:
            if start := memory.end_of.get(tuple(token_ids[-size:])):
                draft = token_ids[start : start + min(limit, memory.size)]
                memory.drafted = len(token_ids), draft
                return draft
        return ()

    def _judge(self, memory: _Memory, token_ids: Sequence[int]) -> None:
        if memory.drafted is None:
            return
        begin, draft = memory.drafted
        memory.drafted = None
        if len(token_ids) == begin:
            return  # no step has tried it
        if token_ids[begin : begin + len(draft)] == draft:
            memory.size = min(2 * memory.size, self._max_draft)
            memory.pause = 1
        else:
            memory.size = max(memory.size // 2, 1)
            if token_ids[begin] != draft[0]:
                memory.resume_at = len(token_ids) + memory.pause
                memory.pause = min(2 * memory.pause, MAX_PAUSE)

    def _read(self, memory: _Memory, token_ids: Sequence[int]) -> None:
        """Enters what is new, but for the n-gram at the very end, which nothing has followed yet."""
        for end in range(max(memory.num_read, 1), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    memory.end_of[tuple(token_ids[end - size : end])] = end
        memory.num_read = len(token_ids)
