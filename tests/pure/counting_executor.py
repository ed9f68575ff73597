"""An executor that a reader can compute by hand, with a KV cache that notices every wrong block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.core.types import Batch, Chunk, Logprobs, Request, Sampling, StepOutput


def next_token(last: int, index: int, sampling: Sampling) -> int:
    """Greedy: [5, 6] continues 7, 8, 9. Sampled: any function of seed and position, the same in every process."""
    token_id = last + 1 if sampling.temperature == 0 else (31 * last + 17 * sampling.seed + 7 * index) % 1009
    while index < sampling.min_new_tokens and token_id in sampling.stop_token_ids:
        token_id += 1
    return token_id


def answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """All tokens that a request for `prompt` must bring, with the stop id."""
    token_ids: list[int] = []
    while len(token_ids) < sampling.max_new_tokens:
        token_ids.append(next_token((token_ids or prompt)[-1], len(token_ids), sampling))
        if token_ids[-1] in sampling.stop_token_ids and len(token_ids) > sampling.min_new_tokens:
            break
    return token_ids


def prefix_names(token_ids: Sequence[int]) -> Iterator[int]:
    """For each position a number that stands for all tokens up to it."""
    name = 0
    for token_id in token_ids:
        name = hash((name, token_id))
        yield name


class CountingExecutor:
    """Where a model keeps keys and values of a position, this keeps the name of the prefix that ends there; each step
    checks that the chunks find the right names in the blocks of their requests."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.batches: list[list[tuple[str, int]]] = []  # (request id, tokens) of each chunk
        self.cache: dict[tuple[int, int], int] = {}  # (block, offset) -> name
        self.is_closed = False

    def warm_up(self) -> None:
        pass

    def step(self, batch: Batch) -> StepOutput:
        self.batches.append([(chunk.request.request_id, chunk.num_tokens) for chunk in batch.chunks])
        holders = Counter(block for chunk in batch.chunks for block in chunk.request.block_ids)
        for chunk in batch.chunks:
            self._write(chunk, holders)
        for chunk in batch.chunks:
            self._attend(chunk)
        requests = [chunk.request for chunk in batch.chunks if chunk.samples]
        token_ids = [next_token(r.token_ids[-1], r.num_new_tokens, r.sampling) for r in requests]
        return StepOutput(token_ids, [logprobs_of(*pair) for pair in zip(token_ids, requests, strict=True)])

    def close(self) -> None:
        self.is_closed = True

    def _write(self, chunk: Chunk, holders: Counter[int]) -> None:
        assert chunk.num_tokens > 0
        names = list(prefix_names(chunk.request.token_ids))
        for position in range(chunk.start, chunk.end):
            slot = self._slot(chunk.request, position)
            assert 0 <= slot[0] < self.num_blocks
            assert holders[slot[0]] == 1, f"{chunk.request.request_id} writes into a block that others read"
            self.cache[slot] = names[position]

    def _attend(self, chunk: Chunk) -> None:
        for position, name in enumerate(prefix_names(chunk.request.token_ids[: chunk.end])):
            found = self.cache.get(self._slot(chunk.request, position))
            assert found == name, f"{chunk.request.request_id} finds another prefix at position {position}"

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size


def logprobs_of(token_id: int, request: Request) -> Logprobs | None:
    count = request.sampling.num_logprobs
    return None if count < 0 else Logprobs(-token_id / 8, tuple((token_id + i, -float(i)) for i in range(count)))
