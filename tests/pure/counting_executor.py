"""An executor that a reader can compute by hand, with a KV cache that notices every wrong block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.core.cache_groups import FREED, FULL_ATTENTION, MAX_REJECTED, STATE, CacheGroup
from engine.core.spans import PromptSpan
from engine.core.types import PENDING, Batch, Logprobs, PromptOutputs, Row, Sampling, StepOutput


def next_token(last: int, index: int, sampling: Sampling) -> int:
    """Return the token behind `last`: the next number if it is greedy, else a function of seed and position."""
    token_id = last + 1 if sampling.temperature == 0 else (31 * last + 17 * sampling.seed + 7 * index) % 1009
    while index < sampling.min_new_tokens and token_id in sampling.stop_token_ids:
        token_id += 1
    return token_id


def answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Return all tokens that a request for `prompt` must produce, with the stop id."""
    token_ids: list[int] = []
    while len(token_ids) < sampling.max_new_tokens:
        token_ids.append(next_token((token_ids or prompt)[-1], len(token_ids), sampling))
        if token_ids[-1] in sampling.stop_token_ids and len(token_ids) > sampling.min_new_tokens:
            break
    return token_ids


def prefix_names(token_ids: Sequence[int], spans: Sequence[PromptSpan] = ()) -> Iterator[int]:
    """Yield, for each position, a number that stands for all tokens and embeddings up to it."""
    name = 0
    covered = {span.start + i: (span.content_hash, i) for span in spans for i in range(span.length)}
    for position, token_id in enumerate(token_ids):
        name = hash((name, token_id, covered.get(position)))
        yield name


@dataclass
class Slot:
    """State of a slot: the request in it and its blocks."""

    token_ids: list[int]
    prompt_len: int
    sampling: Sampling
    spans: Sequence[PromptSpan] = ()
    block_ids: list[list[int]] = field(default_factory=list)  # of each cache group

    def choose(self) -> int:
        last, index = self.token_ids[-1], len(self.token_ids) - self.prompt_len
        self.token_ids.append(next_token(last, index, self.sampling))
        return self.token_ids[-1]


class CountingStep:
    def __init__(self, executor: CountingExecutor, output: StepOutput):
        self._executor, self._output = executor, output

    def drafts(self) -> dict[int, list[int]]:
        return {}

    def mask(self, bits: object) -> None:
        raise AssertionError("no request has a grammar here")

    def result(self) -> StepOutput:
        self._executor.finish()
        return self._output


class CountingExecutor:
    """Fake executor with a fake KV cache. Where a model keeps keys and values of a position, it keeps the name of the
    prefix that ends there. Each step checks that the rows find the right names in the blocks of their slots."""

    block_bytes = 1
    runs_ahead = False
    max_prompt_logits = 6
    takes_spans = True
    vision = expert_usage = draft_counts = None
    max_drafts = 0
    thread = None

    def __init__(self, num_blocks: int = 16, block_size: int = 4, groups: Sequence[CacheGroup] = FULL_ATTENTION):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache_groups = tuple(groups)
        self.batches: list[list[tuple[str, int]]] = []  # (first token of the prompt, tokens) of each row
        self.cache: dict[tuple[int, int], Any] = {}  # (block, offset) -> name
        self.on_host: dict[int, list[int]] = {}  # place -> names
        self.slots: dict[int, Slot] = {}
        self.sums: dict[int, list[int]] = {}  # of slots: tokens whose "hidden states" were added up
        self.num_running = 0  # steps that were launched and not asked for
        self.is_closed = False

    def free_bytes(self) -> int:
        return self.num_blocks

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def warm_up(self) -> None: ...

    def launch(self, batch: Batch) -> CountingStep:
        self.num_running += 1
        for arrival in batch.arrivals:
            self.sums.pop(arrival.slot, None)
            self.slots[arrival.slot] = Slot(
                list(arrival.token_ids),
                arrival.prompt_len,
                arrival.sampling,
                arrival.spans,
                [[] for _ in self.cache_groups],
            )
        for block, place in batch.swaps.outs if batch.swaps else ():
            self.on_host[place] = self._names(block)
        for copy in batch.copies:
            self._put(copy.target, self._names(copy.source))
        for block, place in batch.swaps.ins if batch.swaps else ():
            self._put(block, self.on_host[place])
        for row in batch.rows:
            for block_ids, new in zip(self.slots[row.slot].block_ids, row.new_block_ids, strict=False):
                block_ids += new
        for copy in batch.copies:
            block_ids = self.slots[copy.slot].block_ids[copy.group]
            assert block_ids[copy.place] in (copy.source, copy.target)
            block_ids[copy.place] = copy.target
        self.batches.append([(str(self.slots[row.slot].token_ids[0]), len(row.token_ids)) for row in batch.rows])
        holders = Counter(block for row in batch.rows for block in self._held(row))
        rows = [replace(row, token_ids=self._known(row)) for row in batch.rows]
        names = [self._write(row, holders) for row in rows]
        for row, names_of_row in zip(rows, names, strict=True):
            self._attend(row, names_of_row)
        return CountingStep(self, self._choose(batch))

    def _held(self, row: Row) -> Iterator[int]:
        """Yield the blocks of the slot of `row` that this row or a later one reads or writes."""
        for group, block_ids in zip(self.cache_groups, self.slots[row.slot].block_ids, strict=True):
            yield from block_ids[group.first_block(row.start, self.block_size) :]

    def _names(self, block: int) -> list[int]:
        return [self.cache.get((block, offset), 0) for offset in range(self.block_size)]

    def _put(self, block: int, names: Sequence[int]) -> None:
        for offset, name in enumerate(names):
            self.cache[block, offset] = name

    def finish(self) -> None:
        self.num_running -= 1

    def close(self) -> None:
        self.is_closed = True

    def _choose(self, batch: Batch) -> StepOutput:
        token_ids, slots = [], []
        for row in batch.rows:
            if row.num_sampled:
                drafts = list(row.token_ids)[len(row.token_ids) - row.num_sampled + 1 :]
                chosen = [self.slots[row.slot].choose()]
                while drafts and drafts.pop(0) == chosen[-1]:
                    chosen.append(self.slots[row.slot].choose())
                token_ids += [chosen, *([self.slots[fork].choose()] for fork in row.forks)]
                slots += [row.slot, *row.forks]
        counts = [self.slots[slot].sampling.num_logprobs for slot in slots]
        logprobs = [
            None if count < 0 else [logprobs_of(each, count) for each in ids]
            for ids, count in zip(token_ids, counts, strict=True)
        ]
        return StepOutput(token_ids, logprobs, [self._read(row) for row in batch.rows if row.prompt_spec])

    def _read(self, row: Row) -> PromptOutputs:
        """Return the prompt outputs of a row. The hidden state of a token is its id."""
        slot, spec = self.slots[row.slot], row.prompt_spec
        assert list(spec.scored_ids) == slot.token_ids[row.start + 1 : row.start + 1 + len(spec.scored_ids)]
        sums = self.sums.setdefault(row.slot, [])
        sums += row.token_ids[len(row.token_ids) - spec.num_pooled :]
        hidden = np.float32([sum(sums) / len(sums)]).tobytes() if spec.returns_pooled else b""
        return PromptOutputs([logprobs_of(each, spec.num_logprobs) for each in spec.scored_ids], hidden)

    def _known(self, row: Row) -> Sequence[int]:
        """Return the tokens of a row. The previous step has sampled a PENDING token at its launch."""
        return self.slots[row.slot].token_ids[-1:] if list(row.token_ids) == [PENDING] else row.token_ids

    def _write(self, row: Row, holders: Counter[int]) -> list[int]:
        """Write what the row computes into its blocks. Return the names of all its prefixes."""
        assert row.token_ids
        slot = self.slots[row.slot]
        num_drafts = max(row.num_sampled - 1, 0)
        known = row.token_ids[: len(row.token_ids) - num_drafts]
        assert slot.token_ids[row.start : row.start + len(known)] == known
        names = list(prefix_names([*slot.token_ids[: row.start], *row.token_ids], slot.spans))
        for index, group in enumerate(self.cache_groups):
            if group.kind == STATE:
                assert len(slot.block_ids[index]) == group.num_parts
                self._update_state(row, slot.block_ids[index], names, holders)
                continue
            for position in range(row.start, row.start + len(row.token_ids)):
                place = self._place(slot, index, position)
                assert 0 <= place[0] < self.num_blocks
                assert holders[place[0]] == 1, f"slot {row.slot} writes into a block that others read"
                self.cache[place] = names[position]
        return names

    def _update_state(self, row: Row, block_ids: Sequence[int], names: Sequence[int], holders: Counter[int]) -> None:
        """Check and write a state: the last positions with the names of the prefixes that end there, in the first place
        of each of its blocks. What lies further back cannot be taken back, nor can the first position of the row."""
        for block in block_ids:
            assert holders[block] == 1, f"slot {row.slot} changes a state that others read"
            if row.start:
                found = dict(self.cache.get((block, 0), ())).get(row.start - 1)
                assert found == names[row.start - 1], f"slot {row.slot} continues another state at position {row.start}"
            self.cache[block, 0] = tuple(enumerate(names))[-1 - min(MAX_REJECTED, len(row.token_ids) - 1) :]

    def _attend(self, row: Row, names: Sequence[int]) -> None:
        """Check that each query of the row finds its window, or everything before it."""
        slot = self.slots[row.slot]
        for index, group in enumerate(self.cache_groups):
            if group.kind == STATE:
                continue
            first = max(0, row.start - group.window + 1) if group.window else 0
            for position in range(first, len(names)):
                found = self.cache.get(self._place(slot, index, position))
                assert found == names[position], f"slot {row.slot} finds another prefix at position {position}"

    def _place(self, slot: Slot, group: int, position: int) -> tuple[int, int]:
        block = slot.block_ids[group][position // self.block_size]
        assert block != FREED, f"position {position} was freed, but is read"
        return block, position % self.block_size


def logprobs_of(token_id: int, count: int) -> Logprobs:
    return Logprobs(-token_id / 8, tuple((token_id + i, -float(i)) for i in range(count)))
