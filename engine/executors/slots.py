"""What an executor remembers of each slot, and the arrays of a step: the graph's inputs, the sampler's rows, the tokens
that are accepted. The same for every executor that samples on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from engine.core.types import NO_TOKEN, Arrival, Batch, Logprobs, Sampling, StepOutput
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
        slots: list[int] = []
        tails: list[Sequence[int]] = []
        logit_rows: list[int] = []
        num_logits = 0
        for row in batch.rows:
            for index in range(row.num_sampled):
                slots.append(row.slot)
                tails.append(row.token_ids[len(row.token_ids) - row.num_sampled + 1 :][:index] if index else ())
                logit_rows.append(num_logits)
                num_logits += 1
            for fork in row.forks:
                slots.append(fork)
                tails.append(())
                logit_rows.append(num_logits - 1)
        return cls(slots, tails, logit_rows if num_logits < len(slots) else None)


class Slots:
    """`max_blocks`: of the longest request, in a block table."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int):
        self._block_size = block_size
        self._block_tables = np.zeros((num_slots, max_blocks), np.int32)
        self._num_blocks = [0] * num_slots
        self._rows = SamplingRows.greedy(num_slots)  # its `counter` is the number of tokens that the answer has
        self._seen: dict[int, _Seen] = {}  # of slots whose penalties read it
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
            self._block_tables[copy.slot, copy.index] = copy.target

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
        if self._seen:
            seen = [
                self._seen[slot].entries(tail) if slot in self._seen else NONE
                for slot, tail in zip(choices.slots, choices.tails, strict=True)
            ]
            rows.seen_starts, rows.seen_ids, rows.seen_counts = _joined(seen, np.int32)
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
        self._seen.pop(slot, None)
        self._biases.pop(slot, None)
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            prompt = token_ids[:prompt_len] if sampling.repetition_penalty != 1 else ()  # that one reads it, too
            self._seen[slot] = _Seen(prompt, token_ids[prompt_len:])
        if sampling.logit_bias or sampling.bad_words or sampling.min_new_tokens:
            self._biases[slot] = _Bias(sampling, token_ids[prompt_len:])

    def _remember(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._rows.counter[np.array(slots)] += [len(each) for each in token_ids]  # every slot is there once
        if not self._seen and not self._biases:
            return
        for slot, each in zip(slots, token_ids, strict=True):
            if each[0] == NO_TOKEN:
                continue
            if slot in self._seen:
                self._seen[slot].add(each)
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
    """Which tokens prompt and answer hold, and how often each is in the answer, in arrays that grow."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]):
        unique = list(dict.fromkeys(prompt))
        self._place_of = {token_id: place for place, token_id in enumerate(unique)}
        self._ids = np.array(unique, np.int32)
        self._counts = np.zeros(len(unique), np.int32)
        self.add(answer)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._place_of.setdefault(token_id, len(self._place_of))
            if place == len(self._ids):  # full: twice the room
                self._ids = np.concatenate([self._ids, np.zeros(place + 16, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.int32)])
            self._ids[place] = token_id
            self._counts[place] += 1

    def entries(self, tail: Sequence[int]) -> Entries:
        size = len(self._place_of)
        if not tail:
            return self._ids[:size], self._counts[:size]
        counts = dict(zip(self._ids[:size].tolist(), self._counts[:size].tolist(), strict=True))
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
