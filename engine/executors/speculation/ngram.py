"""Prompt lookup: drafts tokens from earlier tokens of the same request. It handles token ids and needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.settings.config import Config

MIN_NGRAM = 2  # a single token predicts too little
MAX_PAUSE = 64  # largest number of tokens without drafts after wrong drafts


class NgramDrafter:
    """Drafter by prompt lookup (Saxena, 2023) for one slot. If the last tokens have occurred before, it proposes the
    tokens that followed them then.

    Drafts are rare in text without repetition: each wrong draft doubles the number of tokens until the next.
    """

    def __init__(self, config: Config):
        largest = config.speculate_max_ngram_size
        self._sizes = range(largest, min(MIN_NGRAM, largest) - 1, -1)
        self._max_drafts = config.speculate_max_draft_token_num
        self._end_of: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed
        self._num_read = 0  # tokens whose n-grams have been entered
        self._num_drafts = 1  # length of the next proposal; grows while drafts are correct
        self._pause = 1  # tokens to wait after the next wrong draft; grows while drafts are wrong
        self._resume_at = 0  # number of tokens at which drafting resumes
        self._proposed: tuple[int, Sequence[int]] | None = None  # start and tokens of the last drafts

    @property
    def level(self) -> int:
        return min(self._num_drafts.bit_length() - 1, 3)

    def propose(self, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return the tokens that followed the last n-gram before, see `Drafter`."""
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

    def end(self, token_ids: Sequence[int]) -> None:
        """Do nothing: later requests do not use these tokens."""

    def _judge(self, token_ids: Sequence[int]) -> None:
        """Compare the last drafts with the tokens that were sampled at their positions."""
        if self._proposed is None:
            return
        start, drafts = self._proposed
        self._proposed = None
        if len(token_ids) == start:
            return  # No step has verified them.
        drafts = drafts[: len(token_ids) - start]  # The others have not been verified.
        if token_ids[start : start + len(drafts)] == drafts:
            self._num_drafts = min(2 * self._num_drafts, self._max_drafts)
            self._pause = 1
        else:
            self._num_drafts = max(self._num_drafts // 2, 1)
            if token_ids[start] != drafts[0]:
                self._resume_at = len(token_ids) + self._pause
                self._pause = min(2 * self._pause, MAX_PAUSE)

    def _read(self, token_ids: Sequence[int]) -> None:
        """Enter the new n-grams, except the one at the very end, which has no following token yet."""
        for end in range(max(self._num_read, 1), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._end_of[tuple(token_ids[end - size : end])] = end
        self._num_read = len(token_ids)
