"""The nouns of the engine: what is asked for, what runs in a step, what comes out of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

NO_TOKEN = -1  # the model's logits are no numbers, or bans and masks left nothing


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen (docs/ops.md, section Sampling) and when it ends."""

    max_new_tokens: int
    min_new_tokens: int = 0  # stop ids cannot be chosen before
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none, 0: the chosen token's, k: and the k likeliest


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer. Compared by identity: two equal prompts are two requests."""

    request_id: str
    token_ids: list[int]  # prompt, then everything generated so far
    prompt_len: int
    sampling: Sampling
    block_ids: list[int] = field(default_factory=list)  # position // block_size -> block
    num_computed: int = 0  # leading tokens whose keys and values are in the blocks
    num_cached: int = 0  # of these, how many the prefix cache held at the last admission
    num_preemptions: int = 0
    seen: Counter[int] = field(default_factory=Counter)  # occurrences in the answer of each token the penalties read

    def __post_init__(self) -> None:
        if self.sampling.repetition_penalty != 1:  # this one reads the prompt, too
            self.seen.update(dict.fromkeys(self.token_ids[: self.prompt_len], 0))
        self.seen.update(self.token_ids[self.prompt_len :])

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Positions this request may come to hold. The last token is never fed back, so it needs none."""
        return self.prompt_len + self.sampling.max_new_tokens - 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.seen[token_id] += 1

    @property
    def finish_reason(self) -> str | None:
        """'stop' after a stop id, 'length' at the limit, None while it runs."""
        if self.num_new_tokens == 0:
            return None
        if self.num_new_tokens > self.sampling.min_new_tokens and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_new_tokens >= self.sampling.max_new_tokens else None


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request that a step computes: positions [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True when the chunk reaches the last known token, so that its logits give the next one."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True)
class Batch:
    """What one step computes: decodes (one token) and prefill chunks side by side, in this order."""

    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True)
class Logprobs:
    """Of one chosen token: log-probability by the model's own logits, and the likeliest ids with theirs."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """Of every sampling chunk of the batch, in batch order."""

    token_ids: list[int]  # NO_TOKEN where none could be chosen
    logprobs: list[Logprobs | None]


class Executor(Protocol):
    """Runs the static graph of one rank and keeps its KV cache. The only thing the engine asks of a device.

    Called by one thread. Raises SetupError at construction, when graph, settings and device do not go together.
    """

    num_blocks: int  # of the KV cache: the ids in block tables are below
    block_size: int  # tokens of a block, decided at export

    def warm_up(self) -> None:
        """Runs the longest step once, so that no request pays for what only the first step does. Writes into blocks:
        to be called before the first request."""
        ...

    def step(self, batch: Batch) -> StepOutput:
        """Writes keys and values of every chunk's tokens into its request's blocks, which cover `chunk.end` tokens,
        and chooses one token for each chunk that samples, none for the others. Changes no request.

        `batch` has a chunk at least. A request that no token can be chosen for gets NO_TOKEN; whatever is raised
        leaves the cache undefined and ends the engine.
        """
        ...

    def close(self) -> None:
        """Frees graph and cache. The last call."""
        ...
