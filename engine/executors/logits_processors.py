"""Adjustments of a slot's logits before sampling: token counts for the penalties, logit biases and banned tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.core.types import Sampling
from engine.ops.sampling_rows import SamplingRows

Entries = tuple[np.ndarray, np.ndarray]  # token ids i32, and a number for each of them
NO_ENTRIES: Entries = (np.zeros(0, np.int32), np.zeros(0, np.float32))


class TokenCounts:
    """Token counts of the slots that have penalties: the tokens of prompt and answer, and how often the answer has
    each.

    Each slot owns a region of two arrays, which the sampler reads in place: a step copies nothing. `most_tokens` is the
    largest number of distinct tokens of a slot.
    """

    def __init__(self, num_slots: int, most_tokens: int):
        self.places: dict[int, dict[int, int]] = {}  # by slot with penalties: token -> array index
        self._size = most_tokens
        self._ids = np.empty(num_slots * most_tokens, np.int32)  # memory that is never written is never allocated
        self._counts = np.empty(num_slots * most_tokens, np.int32)
        self._ends = np.arange(num_slots, dtype=np.int32) * most_tokens  # the end of each slot's region

    def begin(self, slot: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Start counting for the request that takes `slot`, from the tokens of its prompt and of its answer so far."""
        start = slot * self._size
        unique = list(dict.fromkeys(prompt))
        self.places[slot] = dict(zip(unique, range(start, start + len(unique)), strict=True))
        self._ends[slot] = start + len(unique)
        self._ids[start : start + len(unique)] = unique
        self._counts[start : start + len(unique)] = 0
        if answer:
            self.add([slot], [answer], len(answer))

    def end(self, slot: int) -> None:
        """Discard the counts of `slot`."""
        self._ends[slot] = slot * self._size
        self.places.pop(slot, None)

    def add(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], most: int) -> None:
        """Add the tokens that the answers of `slots` have received; `most` is the largest number of tokens of one
        slot."""
        counted: list[int] = []
        of_slot = self.places
        for slot, each in zip(slots, token_ids, strict=True):
            if slot in of_slot:
                places = of_slot[slot]
                for token_id in each:
                    counted.append(places[token_id] if token_id in places else self._enter(slot, places, token_id))
        if most == 1:
            self._counts[np.array(counted, np.int64)] += 1
        else:  # a draft may hold the same token twice
            np.add.at(self._counts, counted, 1)

    def _enter(self, slot: int, places: dict[int, int], token_id: int) -> int:
        place = places[token_id] = slot * self._size + len(places)
        self._ids[place], self._counts[place] = token_id, 0
        self._ends[slot] = place + 1
        return place

    def fill(self, rows: SamplingRows, slots: np.ndarray, tails: Sequence[Sequence[int]]) -> None:
        """Set the token counts of `rows`. Row i belongs to `slots[i]` and counts the draft tokens `tails[i]`, too."""
        rows.seen_starts, rows.seen_ends = slots * self._size, self._ends[slots]
        rows.seen_ids, rows.seen_counts = self._ids, self._counts
        if any(tails):  # Each row then needs counts of its own.
            entries = [self._with_tail(slot, tail) for slot, tail in zip(slots.tolist(), tails, strict=True)]
            starts, rows.seen_ids, rows.seen_counts = concatenated(entries, np.int32)
            rows.seen_starts, rows.seen_ends = starts[:-1], starts[1:]

    def _with_tail(self, slot: int, tail: Sequence[int]) -> Entries:
        if slot not in self.places:
            return NO_ENTRIES
        part = slice(slot * self._size, self._ends[slot])
        counts = dict(zip(self._ids[part].tolist(), self._counts[part].tolist(), strict=True))
        for token_id in tail:
            counts[token_id] = counts.get(token_id, 0) + 1
        return np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32)


class LogitBias:
    """Additive adjustments of one slot's logits: its logit biases, and minus infinity for the tokens that are banned
    now."""

    def __init__(self, sampling: Sampling, answer: Sequence[int]):
        self.answer = list(answer)
        self._sampling = sampling
        self._long_words = [word for word in sampling.bad_words if len(word) > 1]
        banned = [(word[0], -np.inf) for word in sampling.bad_words if len(word) == 1]
        self._fixed = as_entries([*sampling.logit_bias, *banned])

    def entries(self, num_new_tokens: int, tail: Sequence[int]) -> Entries:
        """Return the biases for the next token, after `num_new_tokens` tokens of the answer that end with the drafts
        `tail`."""
        if not self._long_words and num_new_tokens >= self._sampling.min_new_tokens:
            return self._fixed
        banned = as_entries([(token_id, -np.inf) for token_id in self._banned(num_new_tokens, tail)])
        return np.concatenate([self._fixed[0], banned[0]]), np.concatenate([self._fixed[1], banned[1]])

    def _banned(self, num_new_tokens: int, tail: Sequence[int]) -> Iterator[int]:
        if num_new_tokens < self._sampling.min_new_tokens:
            yield from self._sampling.stop_token_ids
        for *head, last in self._long_words:
            # The last token of a word is banned once the answer ends with the tokens before it.
            end = [*self.answer[-len(head) :], *tail][-len(head) :]
            if end == head:
                yield last


def as_entries(pairs: Sequence[tuple[int, float]]) -> Entries:
    return np.array([token_id for token_id, _ in pairs], np.int32), np.array([each for _, each in pairs], np.float32)


def concatenated(entries: Sequence[Entries], dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate the entries. Return the start of each of them (and the total length), the ids and the numbers."""
    starts = np.zeros(len(entries) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in entries], out=starts[1:])
    return starts, np.concatenate([ids for ids, _ in entries]), np.concatenate([n for _, n in entries]).astype(dtype)
