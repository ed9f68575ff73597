"""Prompt lookup: drafts tokens from those of the request itself. Knows token ids, no model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.settings.config import Config

MIN_NGRAM = 2  # one token alone says too little of what follows
MAX_PAUSE = 64  # tokens without a draft after drafts that were wrong


class NgramDrafter:
    """Prompt lookup (Saxena, 2023) for one slot: the last tokens have occurred before, so what followed then may follow
    again.

    Where nothing repeats itself drafts are rare: each wrong one doubles the pause until the next.
    """

    def __init__(self, config: Config):
        largest = config.speculate_max_ngram_size
        self._sizes = range(largest, min(MIN_NGRAM, largest) - 1, -1)
        self._max_drafts = config.speculate_max_draft_token_num
        self._end_of: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed
        self._num_read = 0  # tokens whose n-grams are entered
        self._num_drafts = 1  # of the next proposal; grows while drafts are right
        self._pause = 1  # tokens to wait after the next wrong draft; grows while drafts are wrong
        self._resume_at = 0  # number of tokens from which on drafts are proposed again
        self._proposed: tuple[int, Sequence[int]] | None = None  # the last drafts, and where they begin

    def propose(self, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """See `engine.executors.drafting.Drafter`."""
        self._judge(token_ids)
        self._read(token_ids)
        if len(token_ids) < self._resume_at:
            return ()
        for size in self._sizes:
            if start := self._end_of.get(tuple(token_ids[-size:])):
                drafts = token_ids[start : start + min(max_drafts, self._num_drafts)]
                self._proposed = len(token_ids), drafts
                return drafts
        return ()

    def _judge(self, token_ids: Sequence[int]) -> None:
        """Compare the last drafts with the tokens that have come in their places."""
        if self._proposed is None:
            return
        start, drafts = self._proposed
        self._proposed = None
        if len(token_ids) == start:
            return  # no step has verified them
        if token_ids[start : start + len(drafts)] == drafts:
            self._num_drafts = min(2 * self._num_drafts, self._max_drafts)
            self._pause = 1
        else:
            self._num_drafts = max(self._num_drafts // 2, 1)
            if token_ids[start] != drafts[0]:
                self._resume_at = len(token_ids) + self._pause
                self._pause = min(2 * self._pause, MAX_PAUSE)

    def _read(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that are new, except for the one at the very end, which nothing has followed yet."""
        for end in range(max(self._num_read, 1), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._end_of[tuple(token_ids[end - size : end])] = end
        self._num_read = len(token_ids)
