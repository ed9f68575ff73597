"""Cache of prompt log-probabilities, keyed by block hash, so that a repeated prompt skips its logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.types import Logprobs

MAX_NUMBERS = 1 << 18  # log-probabilities that are kept, of some 100 bytes each


class PromptLogprobCache:
    """Holds the log-probabilities of the tokens in each block. The least recently used block is evicted first."""

    def __init__(self, block_size: int, max_numbers: int = MAX_NUMBERS):
        self._block_size, self._room = block_size, max_numbers
        self._of_block: OrderedDict[bytes, tuple[int, list[Logprobs]]] = OrderedDict()  # with how many of the likeliest

    def keep(self, keys: Sequence[bytes], scores: Sequence[Logprobs], num_likeliest: int) -> None:
        """Keep `scores` of a prompt that begins with the blocks of `keys`, from its second token on."""
        for index in reversed(range(len(keys))):  # the end of a prefix goes before its beginning
            known, _ = self._of_block.get(keys[index], (-1, ()))
            if known < num_likeliest:
                self._forget(keys[index])
                start, end = index * self._block_size - 1, (index + 1) * self._block_size - 1
                self._of_block[keys[index]] = num_likeliest, list(scores[max(0, start) : end])
                self._room -= self._block_size * (1 + num_likeliest)
            self._of_block.move_to_end(keys[index])
        while self._room < 0:
            self._forget(next(iter(self._of_block)))

    def find(self, keys: Sequence[bytes], num_likeliest: int) -> list[Logprobs]:
        """Return the scores of the longest known prefix of the blocks `keys`."""
        found: list[Logprobs] = []
        count = 0
        for key in keys:
            known, scores = self._of_block.get(key, (-1, []))
            if known < num_likeliest:
                break
            found += [Logprobs(each.chosen, each.top[:num_likeliest]) for each in scores]
            count += 1
        for key in reversed(keys[:count]):
            self._of_block.move_to_end(key)
        return found

    def _forget(self, key: bytes) -> None:
        if key in self._of_block:
            num_likeliest, _ = self._of_block.pop(key)
            self._room += self._block_size * (1 + num_likeliest)
