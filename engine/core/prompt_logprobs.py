"""Cache of prompt log-probabilities, keyed by block hash, so that a repeated prompt skips its logits."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.prefix_lru import PrefixLRU
from engine.core.types import Logprobs

MAX_NUMBERS = 1 << 18  # log-probabilities that are kept, of some 100 bytes each


class PromptLogprobCache:
    """Holds the log-probabilities of the tokens in each block: of the prompt's token and of the likeliest ones."""

    def __init__(self, block_size: int, max_numbers: int = MAX_NUMBERS):
        self._block_size, self._room = block_size, max_numbers
        self._of_block: PrefixLRU[bytes, tuple[int, list[Logprobs]]] = PrefixLRU()  # with how many of the likeliest

    def keep(self, keys: Sequence[bytes], scores: Sequence[Logprobs], num_top: int) -> None:
        """Keep `scores` of a prompt that begins with the blocks of `keys`, from its second token on."""
        for index, key in enumerate(keys):
            known, _ = self._of_block.get(key, (-1, ()))
            if known < num_top:
                start, end = index * self._block_size - 1, (index + 1) * self._block_size - 1
                self._of_block[key] = num_top, list(scores[max(0, start) : end])
                self._room -= self._block_size * (num_top - known)
        self._of_block.use(keys)
        while self._room < 0:
            _, (num_kept, _) = self._of_block.evict()
            self._room += self._block_size * (1 + num_kept)

    def find(self, keys: Sequence[bytes], num_top: int) -> list[Logprobs]:
        """Return the scores of the longest known prefix of the blocks `keys`."""
        found: list[Logprobs] = []
        count = 0
        for key in keys:
            known, scores = self._of_block.get(key, (-1, []))
            if known < num_top:
                break
            found += [Logprobs(each.chosen, each.top[:num_top]) for each in scores]
            count += 1
        self._of_block.use(keys[:count])
        return found
