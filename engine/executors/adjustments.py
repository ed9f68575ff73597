"""What changes the logits of a slot before a token is chosen: what its penalties have seen, its biases and its bans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.core.types import Sampling
from engine.ops.sampling_rows import SamplingRows

Entries = tuple[np.ndarray, np.ndarray]  # token ids i32, and a number for each
NONE: Entries = (np.zeros(0, np.int32), np.zeros(0, np.float32))


class Seen:
    """Which tokens prompt and answer of a slot hold, and how often each is in the answer. Each slot has a region of two
    arrays, which the sampler reads where it is: nothing is copied for a step."""

    def __init__(self, num_slots: int, most_tokens: int):  # that differ, of a slot
        self.places: dict[int, dict[int, int]] = {}  # of slots whose penalties read it: token -> where it is
        self._size = most_tokens
        self._ids = np.empty(num_slots * most_tokens, np.int32)  # memory that is not written costs nothing
        self._counts = np.empty(num_slots * most_tokens, np.int32)
        self._ends = np.arange(num_slots, dtype=np.int32) * most_tokens  # of each slot's region

    def begin(self, slot: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        start = slot * self._size
        unique = list(dict.fromkeys(prompt))
        self.places[slot] = dict(zip(unique, range(start, start + len(unique)), strict=True))
        self._ends[slot] = start + len(unique)
        self._ids[start : start + len(unique)] = unique
        self._counts[start : start + len(unique)] = 0
        if answer:
            self.add([slot], [answer], len(answer))

    def end(self, slot: int) -> None:
        self._ends[slot] = slot * self._size
        self.places.pop(slot, None)

    def add(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], most: int) -> None:
        """Tokens that the answers of these slots have gained, `most` in one of them."""
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
        rows.seen_starts, rows.seen_ends = slots * self._size, self._ends[slots]
        rows.seen_ids, rows.seen_counts = self._ids, self._counts
        if any(tails):  # then each row has its own
            entries = [self._with_tail(slot, tail) for slot, tail in zip(slots.tolist(), tails, strict=True)]
            starts, rows.seen_ids, rows.seen_counts = joined(entries, np.int32)
            rows.seen_starts, rows.seen_ends = starts[:-1], starts[1:]

    def _with_tail(self, slot: int, tail: Sequence[int]) -> Entries:
        if slot not in self.places:
            return NONE
        part = slice(slot * self._size, self._ends[slot])
        counts = dict(zip(self._ids[part].tolist(), self._counts[part].tolist(), strict=True))
        for token_id in tail:
            counts[token_id] = counts.get(token_id, 0) + 1
        return np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32)


class Bias:
    """What is added to the logits of one slot: its own biases, and minus infinity for what is banned now."""

    def __init__(self, sampling: Sampling, answer: Sequence[int]):
        self.answer = list(answer)
        self._sampling = sampling
        self._long_words = [word for word in sampling.bad_words if len(word) > 1]
        banned = [(word[0], -np.inf) for word in sampling.bad_words if len(word) == 1]
        self._fixed = as_entries([*sampling.logit_bias, *banned])

    def entries(self, num_new_tokens: int, tail: Sequence[int]) -> Entries:
        if not self._long_words and num_new_tokens >= self._sampling.min_new_tokens:
            return self._fixed
        banned = as_entries([(token_id, -np.inf) for token_id in self._banned(num_new_tokens, tail)])
        return np.concatenate([self._fixed[0], banned[0]]), np.concatenate([self._fixed[1], banned[1]])

    def _banned(self, num_new_tokens: int, tail: Sequence[int]) -> Iterator[int]:
        if num_new_tokens < self._sampling.min_new_tokens:
            yield from self._sampling.stop_token_ids
        for *head, last in self._long_words:
            # Banned at its last token, once the answer ends with the tokens before it.
            end = [*self.answer[-len(head) :], *tail][-len(head) :]
            if end == head:
                yield last


def as_entries(pairs: Sequence[tuple[int, float]]) -> Entries:
    return np.array([token_id for token_id, _ in pairs], np.int32), np.array([each for _, each in pairs], np.float32)


def joined(entries: Sequence[Entries], dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One after another: where each starts, the ids, the numbers."""
    starts = np.zeros(len(entries) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in entries], out=starts[1:])
    return starts, np.concatenate([ids for ids, _ in entries]), np.concatenate([n for _, n in entries]).astype(dtype)
