"""State of an executor's slots, and the arrays of a step: graph inputs, sampling rows and accepted tokens. Shared by
all executors that keep this state on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from engine.core.cache_groups import FULL_ATTENTION, STATE, CacheGroup, table_name
from engine.core.types import Arrival, Batch, Logprobs, StepOutput
from engine.executors.logits_processors import NO_ENTRIES, LogitBias, TokenCounts, concatenated
from engine.executors.prompt_outputs import PooledStates, prompt_output_rows
from engine.executors.spans import SlotSpans
from engine.ops.sampling_rows import SampledRows, SamplingRows
from engine.sampling_parameters import PARAMETERS

Sample = Callable[[np.ndarray, SamplingRows], SampledRows]


class Choices(NamedTuple):
    """Token choices of a step, in the order of its output: for each row one after every draft, assuming that the drafts
    before it are correct, then one for each fork."""

    slots: list[int]
    tails: list[Sequence[int]]  # the draft tokens before each choice
    logit_rows: list[int] | None  # the row of the logits that each choice reads; None if they are in order

    @classmethod
    def of(cls, batch: Batch) -> Choices:
        special = [row for row in batch.rows if row.num_sampled != 1 or row.forks]
        if not special:  # the common case
            return cls([row.slot for row in batch.rows], [()] * len(batch.rows), None)
        rows = [row for row in batch.rows if row.num_sampled]
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
    """Slots of an executor: their block tables, sampling parameters, penalties, biases, adapters and prompt spans.

    `max_blocks` is the number of blocks of the longest request in the block table of one cache group. `spans` are the
    prompt spans of the slots, or None for a graph that takes none.
    """

    def __init__(  # noqa: PLR0913 - the sizes and inputs of one model
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        groups: Sequence[CacheGroup] = FULL_ATTENTION,
        spans: SlotSpans | None = None,
    ):
        self.num_slots, self._block_size, self._groups = num_slots, block_size, groups
        width = max(max_blocks, *(group.num_parts for group in groups))
        self._block_tables = np.zeros((len(groups), num_slots, width), np.int32)
        self._num_blocks = np.zeros((len(groups), num_slots), np.int64)
        self._rows = SamplingRows.greedy(num_slots)  # its `counter` is the number of tokens of the answer
        # NO_TOKEN is counted like one more token.
        self._token_counts = TokenCounts(num_slots, min(max_blocks * block_size, vocab_size + 1))
        self._biases: dict[int, LogitBias] = {}  # only of slots that have one
        self.pooled_states = PooledStates()
        self.adapters: dict[int, str] = {}  # adapter ids, only of slots that have one
        self._spans = spans

    def place(self, batch: Batch) -> None:
        """Update the slots with the batch's new requests and blocks. Must be called first in each step."""
        for arrival in batch.arrivals:
            self._arrive(arrival)
        for row in batch.rows:
            if row.new_block_ids:
                for group, block_ids in enumerate(row.new_block_ids):
                    if self._groups[group].window:  # blocks outside the window (-1) are never read
                        block_ids = [max(block, 0) for block in block_ids]
                    start = self._num_blocks[group, row.slot]
                    end = self._num_blocks[group, row.slot] = start + len(block_ids)
                    self._block_tables[group, row.slot, start:end] = block_ids
        for copy in batch.copies:
            self._block_tables[copy.group, copy.slot, copy.place] = copy.target

    def graph_inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the inputs of docs/ops.md except the caches, by name. Embeddings are f32, all others i32."""
        token_ids = [row.token_ids for row in batch.rows]
        slots = np.array([row.slot for row in batch.rows])
        lengths = np.fromiter(map(len, token_ids), np.int32, len(slots))
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = np.array([row.start for row in batch.rows], np.int32)
        counts = np.array([row.num_sampled for row in batch.rows], np.int32)
        width = int((context_lens + lengths - 1).max()) // self._block_size + 1
        logit_rows = _runs(query_starts[1:] - counts, counts)
        if batch.has_prompt_outputs:
            logit_rows = np.concatenate([logit_rows, prompt_output_rows(batch, query_starts)])
        tables = {
            table_name(index): self._block_tables[index, slots, : group.num_parts if group.kind == STATE else width]
            for index, group in enumerate(self._groups)
        }
        positions = _runs(context_lens, lengths)
        return {
            "token_ids": np.fromiter(chain.from_iterable(token_ids), np.int32, query_starts[-1]),
            "positions": positions,
            "query_starts": query_starts,
            "context_lens": context_lens,
            **tables,
            "logit_rows": logit_rows,
            **(self._spans.inputs(batch, positions) if self._spans else {}),
        }

    def sample(self, batch: Batch, logits: np.ndarray, mask: np.ndarray | None, sample: Sample) -> StepOutput:
        """Sample the tokens of a step and update the slots. `logits` is [num_logits, V], with one row for each row that
        a choice reads; further rows are ignored."""
        choices = Choices.of(batch)
        if not choices.slots:
            return StepOutput([], [])
        logits = logits[: len(choices.slots)] if choices.logit_rows is None else logits[choices.logit_rows]
        rows = self.sampling_rows(choices, mask)
        self.count_expected_tokens(choices)
        return self.accept(batch, choices, rows, sample(logits, rows))

    def sampling_rows(self, choices: Choices, mask: np.ndarray | None = None) -> SamplingRows:
        """Return the sampling parameters, penalties and biases of all choices, one row each."""
        slots = np.array(choices.slots)
        rows = SamplingRows(self._rows.values.take(slots), mask=mask)
        if any(choices.tails):
            rows.counter += [len(tail) for tail in choices.tails]
        if self._token_counts.places:
            self._token_counts.fill(rows, slots, choices.tails)
        if self._biases:
            bias = [
                self._biases[slot].entries(int(count), tail) if slot in self._biases else NO_ENTRIES
                for slot, tail, count in zip(choices.slots, choices.tails, rows.counter, strict=True)
            ]
            rows.bias_starts, rows.bias_ids, rows.bias = concatenated(bias, np.float32)
        return rows

    def count_expected_tokens(self, choices: Choices) -> None:
        """Count one token for each choice's slot in advance: the next step may be launched before the token is known,
        and by then the slot may belong to another request."""
        self._rows.counter[np.array(choices.slots)] += 1

    def accept(self, batch: Batch, choices: Choices, rows: SamplingRows, sampled: SampledRows) -> StepOutput:
        """Return, for each row, the accepted tokens: drafts up to the first mismatch, then the sampled token. Update
        the slots with them."""
        if choices.logit_rows is None and not any(choices.tails):  # neither forks nor drafts
            slots = choices.slots
            token_ids: Sequence[Sequence[int]] = [[token_id] for token_id in sampled.token_ids.tolist()]
        else:
            slots, token_ids = _accepted(batch, sampled.token_ids.tolist())
        self._add_accepted(slots, token_ids)
        return StepOutput(token_ids, _logprobs_of(batch, token_ids, rows, sampled))

    def _arrive(self, arrival: Arrival) -> None:
        """Reset the slot for a new request."""
        slot, token_ids, prompt_len, sampling, *_ = arrival
        self._num_blocks[:, slot] = 0
        rows = self._rows
        for parameter in PARAMETERS:
            rows.values[parameter.name][slot] = getattr(sampling, parameter.name)
        rows.seed[slot], rows.counter[slot] = sampling.seed, len(token_ids) - prompt_len
        rows.num_logprobs[slot] = sampling.num_logprobs
        self._biases.pop(slot, None)
        self.adapters.pop(slot, None)
        if sampling.adapter:
            self.adapters[slot] = sampling.adapter[0]
        self.pooled_states.begin(slot)
        if self._spans:
            self._spans.begin(arrival)
        if sampling.has_penalty:
            prompt = token_ids[:prompt_len] if sampling.repetition_penalty != 1 else ()  # only that one counts it
            self._token_counts.begin(slot, prompt, token_ids[prompt_len:])
        else:
            self._token_counts.end(slot)
        if sampling.logit_bias or sampling.bad_words or sampling.min_new_tokens:
            self._biases[slot] = LogitBias(sampling, token_ids[prompt_len:])

    def _add_accepted(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Add the accepted tokens to the state of their slots."""
        most = max(map(len, token_ids))
        if most > 1:
            self._rows.counter[np.array(slots)] += [len(each) - 1 for each in token_ids]  # a slot occurs at most once
        if self._token_counts.places:
            self._token_counts.add(slots, token_ids, most)
        if self._biases:
            for slot, each in zip(slots, token_ids, strict=True):
                if slot in self._biases:
                    self._biases[slot].answer += each


def _accepted(batch: Batch, chosen: Sequence[int]) -> tuple[list[int], list[Sequence[int]]]:
    """Return the slots that have sampled and the accepted tokens of each. `chosen`: the token of each choice."""
    slots: list[int] = []
    token_ids: list[Sequence[int]] = []
    at = 0
    for row in batch.rows:
        if row.num_sampled:
            count = 1
            while count < row.num_sampled and chosen[at + count - 1] == row.token_ids[count - row.num_sampled]:
                count += 1
            slots.append(row.slot)
            token_ids.append(chosen[at : at + count])
        at += row.num_sampled
        for fork in row.forks:
            slots.append(fork)
            token_ids.append(chosen[at : at + 1])
            at += 1
    return slots, token_ids


def _logprobs_of(
    batch: Batch, token_ids: Sequence[Sequence[int]], rows: SamplingRows, sampled: SampledRows
) -> list[list[Logprobs] | None]:
    """Return the log-probabilities of the accepted tokens, by row; None for a row that did not ask for any."""
    if rows.num_logprobs.max() < 0:
        return [None] * len(token_ids)
    widths = [width for row in batch.rows if row.num_sampled for width in (row.num_sampled, *[1] * len(row.forks))]
    starts = [0, *accumulate(widths)]
    wanted = rows.num_logprobs.tolist()
    return [
        None if wanted[start] < 0 else _logprobs(sampled, range(start, start + len(ids)), wanted[start])
        for start, ids in zip(starts, token_ids, strict=False)
    ]


def _logprobs(sampled: SampledRows, places: Sequence[int], count: int) -> list[Logprobs]:
    """Return the log-probabilities of the tokens in these rows of `sampled`, each with the `count` most likely
    tokens."""
    logprobs = []
    for place in places:
        ids, values = sampled.top_ids[place, :count].tolist(), sampled.top_logprobs[place, :count].tolist()
        top = tuple(pair for pair in zip(ids, values, strict=True) if pair[0] >= 0)
        logprobs.append(Logprobs(float(sampled.logprobs[place]), top))
    return logprobs


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of the ranges that begin at `starts[i]` and have `lengths[i]` numbers."""
    if len(lengths) and lengths.min() == lengths.max() == 1:
        return starts
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum(), dtype=np.int32) - np.repeat((before - starts).astype(np.int32), lengths)
