"""What an executor remembers of each slot, and the arrays of a step: the graph's inputs, the sampler's rows, the tokens
that are accepted. The same for every executor that samples on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from engine.core.types import Arrival, Batch, Logprobs, Sampling, StepOutput
from engine.ops.sampling_rows import SampledRows, SamplingRows

PER_SLOT = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "counter", "num_logprobs"),
)
Entries = tuple[np.ndarray, np.ndarray]  # token ids i32, and a number for each
Sample = Callable[[np.ndarray, SamplingRows], SampledRows]


class Choices(NamedTuple):
    """The tokens that a step chooses, in the order of its output: of each row one after every draft, as if those before
    were right, then its forks'."""

    slots: list[int]
    tails: list[Sequence[int]]  # the drafts before
    logit_rows: list[int] | None  # which row of the logits each reads; None: one after another

    @classmethod
    def of(cls, batch: Batch) -> Choices:
        rows = [row for row in batch.rows if row.num_sampled]
        if sum([row.num_sampled + len(row.forks) for row in rows]) == len(rows):  # the usual case: one token a row
            return cls([row.slot for row in rows], [()] * len(rows), None)
        slots: list[int] = []
        tails: list[Sequence[int]] = []
        logit_rows: list[int] = []
        num_logits = 0
        for row in rows:
            drafts = row.token_ids[len(row.token_ids) - row.num_sampled + 1 :]
            slots += [row.slot] * row.num_sampled + list(row.forks)
            tails += [drafts[:index] for index in range(row.num_sampled)] + [()] * len(row.forks)
            num_logits += row.num_sampled
            logit_rows += [*range(num_logits - row.num_sampled, num_logits), *[num_logits - 1] * len(row.forks)]
        return cls(slots, tails, logit_rows if num_logits < len(slots) else None)


class Slots:
    """`max_blocks`: of the longest request, in a block table."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int):
        self._block_size = block_size
        self._block_tables = np.zeros((num_slots, max_blocks), np.int32)
        self._num_blocks = [0] * num_slots
        self._rows = SamplingRows.greedy(num_slots)  # its `counter` is the number of tokens that the answer has
        self._seen = _Seen(num_slots, max_blocks * block_size)
        self._biases: dict[int, _Bias] = {}  # of slots that have one

    def place(self, batch: Batch) -> None:
        """Takes in who has arrived and which blocks were given out. The first thing of a step."""
        for arrival in batch.arrivals:
            self._arrive(arrival)
        for row in batch.rows:
            if row.new_block_ids:
                start = self._num_blocks[row.slot]
                end = self._num_blocks[row.slot] = start + len(row.new_block_ids)
                self._block_tables[row.slot, start:end] = row.new_block_ids
        for copy in batch.copies:
            self._block_tables[copy.slot, copy.place] = copy.target

    def graph_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """The inputs of docs/ops.md but for the caches: i32, by name."""
        slots, starts, token_ids, _, num_sampled, _ = zip(*batch.rows, strict=True)
        lengths = np.array([len(ids) for ids in token_ids], np.int32)
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = np.array(starts, np.int32)
        counts = np.array(num_sampled, np.int32)
        width = int((context_lens + lengths - 1).max()) // self._block_size + 1
        return {
            "token_ids": np.fromiter(chain.from_iterable(token_ids), np.int32, query_starts[-1]),
            "positions": _runs(context_lens, lengths),
            "query_starts": query_starts,
            "context_lens": context_lens,
            "block_tables": self._block_tables[np.array(slots), :width],
            "logit_rows": _runs(query_starts[1:] - counts, counts),
        }

    def sample(self, batch: Batch, logits: np.ndarray, mask: np.ndarray | None, sample: Sample) -> StepOutput:
        """Chooses the tokens of a step by its logits [number of rows wanted, V], and remembers them."""
        choices = Choices.of(batch)
        if not choices.slots:
            return StepOutput([], [])
        if choices.logit_rows is not None:
            logits = logits[choices.logit_rows]
        return self.accept(batch, sample(logits, self.sampling_rows(choices, mask)))

    def sampling_rows(self, choices: Choices, mask: np.ndarray | None = None) -> SamplingRows:
        rows = SamplingRows.greedy(len(choices.slots))
        slots = np.array(choices.slots)
        for name in PER_SLOT:
            setattr(rows, name, getattr(self._rows, name)[slots])
        rows.counter += [len(tail) for tail in choices.tails]
        rows.mask = mask
        if self._seen.places:
            self._seen.fill(rows, slots, choices.tails)
        if self._biases:
            bias = [
                self._biases[slot].entries(int(count), tail) if slot in self._biases else NONE
                for slot, tail, count in zip(choices.slots, choices.tails, rows.counter, strict=True)
            ]
            rows.bias_starts, rows.bias_ids, rows.bias = _joined(bias, np.float32)
        return rows

    def accept(self, batch: Batch, sampled: SampledRows) -> StepOutput:
        """Of every row the tokens up to the first that its draft had otherwise."""
        chosen = sampled.token_ids.tolist()
        slots: list[int] = []
        token_ids: list[list[int]] = []
        at = 0
        for row in batch.rows:
            if row.num_sampled == 1:
                slots.append(row.slot)
                token_ids.append([chosen[at]])
            elif row.num_sampled:
                count = 1
                while count < row.num_sampled and chosen[at + count - 1] == row.token_ids[count - row.num_sampled]:
                    count += 1
                slots.append(row.slot)
                token_ids.append(chosen[at : at + count])
            at += row.num_sampled
            for fork in row.forks:
                slots.append(fork)
                token_ids.append([chosen[at]])
                at += 1
        self._remember(slots, token_ids)
        return StepOutput(token_ids, self._logprobs(batch, slots, token_ids, sampled))

    def _arrive(self, arrival: Arrival) -> None:
        slot, token_ids, prompt_len, sampling = arrival
        self._num_blocks[slot] = 0
        rows = self._rows
        rows.temperature[slot] = sampling.temperature
        rows.top_p[slot], rows.top_k[slot], rows.min_p[slot] = sampling.top_p, sampling.top_k, sampling.min_p
        rows.repetition_penalty[slot] = sampling.repetition_penalty
        rows.frequency_penalty[slot] = sampling.frequency_penalty
        rows.presence_penalty[slot] = sampling.presence_penalty
        rows.seed[slot], rows.counter[slot] = sampling.seed, len(token_ids) - prompt_len
        rows.num_logprobs[slot] = sampling.num_logprobs
        self._biases.pop(slot, None)
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            prompt = token_ids[:prompt_len] if sampling.repetition_penalty != 1 else ()  # that one reads it, too
            self._seen.begin(slot, prompt, token_ids[prompt_len:])
        else:
            self._seen.end(slot)
        if sampling.logit_bias or sampling.bad_words or sampling.min_new_tokens:
            self._biases[slot] = _Bias(sampling, token_ids[prompt_len:])

    def _remember(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._rows.counter[np.array(slots)] += [len(each) for each in token_ids]  # every slot is there once
        if self._seen.places:
            self._seen.add(slots, token_ids)
        if self._biases:
            for slot, each in zip(slots, token_ids, strict=True):
                if slot in self._biases:
                    self._biases[slot].answer += each

    def _logprobs(
        self, batch: Batch, slots: Sequence[int], token_ids: Sequence[Sequence[int]], sampled: SampledRows
    ) -> list[list[Logprobs] | None]:
        """Of every token that was accepted."""
        wanted = self._rows.num_logprobs[np.array(slots)].tolist()
        if max(wanted) < 0:
            return [None] * len(slots)
        widths = [width for row in batch.rows if row.num_sampled for width in (row.num_sampled, *[1] * len(row.forks))]
        starts = [0, *accumulate(widths)]
        return [
            None if count < 0 else _logprobs(sampled, range(start, start + len(ids)), count)
            for start, ids, count in zip(starts, token_ids, wanted, strict=False)
        ]


class _Seen:
    """Which tokens prompt and answer of a slot hold, and how often each is in the answer. Each slot has a region of two
    arrays, which the sampler reads where it is: nothing is copied for a step."""

    def __init__(self, num_slots: int, most_tokens: int):
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
        self.add([slot], [answer])

    def end(self, slot: int) -> None:
        self._ends[slot] = slot * self._size
        self.places.pop(slot, None)

    def add(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Tokens that the answers of these slots have gained."""
        counted: list[int] = []
        for slot, each in zip(slots, token_ids, strict=True):
            if (places := self.places.get(slot)) is not None:
                for token_id in each:
                    place = places.get(token_id)
                    counted.append(self._enter(slot, places, token_id) if place is None else place)
        if len(counted) > len(set(counted)):  # a draft with the same token twice
            np.add.at(self._counts, counted, 1)
        else:
            self._counts[np.array(counted, np.int64)] += 1

    def _enter(self, slot: int, places: dict[int, int], token_id: int) -> int:
        place = places[token_id] = slot * self._size + len(places)
        self._ids[place], self._counts[place] = token_id, 0
        self._ends[slot] = place + 1
        return place

    def fill(self, rows: SamplingRows, slots: np.ndarray, tails: Sequence[Sequence[int]]) -> None:
        rows.seen_starts, rows.seen_ends = slots.astype(np.int32) * np.int32(self._size), self._ends[slots]
        rows.seen_ids, rows.seen_counts = self._ids, self._counts
        if any(tails):  # then each row has its own
            entries = [self._with_tail(slot, tail) for slot, tail in zip(slots.tolist(), tails, strict=True)]
            starts, rows.seen_ids, rows.seen_counts = _joined(entries, np.int32)
            rows.seen_starts, rows.seen_ends = starts[:-1].copy(), starts[1:].copy()

    def _with_tail(self, slot: int, tail: Sequence[int]) -> Entries:
        if slot not in self.places:
            return NONE
        part = slice(slot * self._size, self._ends[slot])
        counts = dict(zip(self._ids[part].tolist(), self._counts[part].tolist(), strict=True))
        for token_id in tail:
            counts[token_id] = counts.get(token_id, 0) + 1
        return np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32)


class _Bias:
    """What is added to the logits of one slot: its own biases, and minus infinity for what is banned now."""

    def __init__(self, sampling: Sampling, answer: Sequence[int]):
        self.answer = list(answer)
        self._sampling = sampling
        self._long_words = [word for word in sampling.bad_words if len(word) > 1]
        banned = [(word[0], -np.inf) for word in sampling.bad_words if len(word) == 1]
        self._fixed = _entries([*sampling.logit_bias, *banned])

    def entries(self, num_new_tokens: int, tail: Sequence[int]) -> Entries:
        if not self._long_words and num_new_tokens >= self._sampling.min_new_tokens:
            return self._fixed
        banned = _entries([(token_id, -np.inf) for token_id in self._banned(num_new_tokens, tail)])
        return np.concatenate([self._fixed[0], banned[0]]), np.concatenate([self._fixed[1], banned[1]])

    def _banned(self, num_new_tokens: int, tail: Sequence[int]) -> Iterator[int]:
        if num_new_tokens < self._sampling.min_new_tokens:
            yield from self._sampling.stop_token_ids
        for *head, last in self._long_words:
            # Banned at its last token, once the answer ends with the tokens before it.
            end = [*self.answer[-len(head) :], *tail][-len(head) :]
            if end == head:
                yield last


NONE: Entries = (np.zeros(0, np.int32), np.zeros(0, np.float32))


def _logprobs(sampled: SampledRows, places: Sequence[int], count: int) -> list[Logprobs]:
    logprobs = []
    for place in places:
        ids, values = sampled.top_ids[place, :count].tolist(), sampled.top_logprobs[place, :count].tolist()
        top = tuple(pair for pair in zip(ids, values, strict=True) if pair[0] >= 0)
        logprobs.append(Logprobs(float(sampled.logprobs[place]), top))
    return logprobs


def _entries(pairs: Sequence[tuple[int, float]]) -> Entries:
    return np.array([token_id for token_id, _ in pairs], np.int32), np.array([each for _, each in pairs], np.float32)


def _joined(entries: Sequence[Entries], dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One after another: where each starts, the ids, the numbers."""
    starts = np.zeros(len(entries) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in entries], out=starts[1:])
    return starts, np.concatenate([ids for ids, _ in entries]), np.concatenate([n for _, n in entries]).astype(dtype)


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... of lengths[0] numbers, then those of the next."""
    if len(lengths) and lengths.min() == lengths.max() == 1:
        return starts
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum(), dtype=np.int32) - np.repeat((before - starts).astype(np.int32), lengths)
