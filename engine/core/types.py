"""Data types of the engine: requests, and the batch and output of a step. The interface of executors, which compute
steps, is in `engine.core.executor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.core.cache_state import CacheState
from engine.core.spans import PromptSpan
from engine.errors import RequestError
from engine.sampling_parameters import SamplingParameters

NO_TOKEN = -1  # there is none: the logits are not numbers, or bans and masks leave no token
MEAN = "mean"  # a value of Sampling.pooling
PENDING = -2  # in a row: the last token that the previous step samples for the slot, which is not known yet


@dataclass(frozen=True)
class Sampling(SamplingParameters):
    """Sampling parameters of an answer (docs/ops.md, section Sampling), its limits and the outputs that are wanted."""

    max_new_tokens: int  # 0: only the prompt is computed
    min_new_tokens: int = 0  # stop ids are banned until then
    seed: int = 0  # 64 bits, unsigned
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none, 0: the sampled token's, k: also those of the k most likely tokens
    num_beams: int = 0  # > 0: width of a beam search
    length_penalty: float = 1.0  # a beam search divides the score by length ** length_penalty
    # Outputs of the prompt
    num_prompt_logprobs: int = -1  # of all tokens but the first, as num_logprobs
    pooling: str = ""  # hidden states of the last layer: `last` or the `mean` of all; empty: not wanted
    structured_output: tuple[str, ...] = ()  # the request field and the text of its grammar
    # LoRA adapter: an id that is unique to its files, and their folder
    adapter: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Sampling:
        """Return the Sampling that `dataclasses.astuple` was called with."""
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))

    @property
    def needs_output_tokens(self) -> bool:
        """Return whether sampling a token needs the output tokens before it, in addition to their number."""
        is_bound = bool(self.structured_output) or self.num_beams > 0
        return self.has_penalty or is_bound or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities in the place of one token, computed from the model's logits: its own, and the most likely ids
    with theirs."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Grammar(Protocol):
    """Grammar of one structured output and its position in the answer. If `error` is set, all else is undefined."""

    is_ready: bool  # False: the allowed tokens are still being computed, so no token can be sampled
    is_mask_missing: bool  # the mask of the last step came too late, so its sampled token is invalid

    @property
    def error(self) -> RequestError | None:
        """Return why the grammar cannot be followed any further, or None."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether no token may follow."""
        ...

    @property
    def takes_drafts(self) -> bool:
        """Return whether masks can be computed for draft tokens."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer. This takes effect when another member is used: so the grammars of a step can
        be advanced together."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow: in each of these places only one token is allowed."""
        ...


class State(Enum):
    """State of a request in the scheduler."""

    WAITING = "waiting"  # has no slot and no blocks
    RUNNING = "running"  # has a slot and blocks
    ENDED = "ended"  # finished or dropped; a launched step may still compute it, which has no effect


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its answer so far. Compared by identity: two equal prompts are two requests."""

    request_id: str
    token_ids: list[int]  # prompt, then everything generated so far
    prompt_len: int
    sampling: Sampling
    forks: list[Request] = field(default_factory=list)  # more answers to this prompt, until the prompt is computed
    spans: Sequence[PromptSpan] = ()  # of the prompt; forks have the same
    salt: str = ""  # requests with different salts never share cached blocks
    owner: str = ""  # API key or client; waiting requests of each owner get equal shares
    priority: int = 0  # lower values start earlier
    grammar: Grammar | None = None  # of `sampling.structured_output`, set when it is compiled
    keeps_tail: bool = False  # its last block is kept in the prefix cache when it ends, although it is not full
    finds_tail: bool = False  # it looks for such a block, so that all tokens but the last one may be found
    in_lockstep: bool = False  # it and its forks need slots at the same time and get no draft tokens
    # State of the scheduler
    state: State = State.WAITING
    slot: int = -1  # in the batch while it runs
    # Leading tokens whose keys and values are in the blocks once all launched steps have run; with drafts, at least so
    # many, and at most `num_unverified` more.
    num_computed: int = 0
    num_unverified: int = 0  # draft tokens that launched steps may accept
    num_retractable: int = 0  # of its last positions, which its state can take back
    cache: CacheState = field(default_factory=CacheState)
    num_cached: int = 0  # tokens found in the prefix cache at the last admission
    cached_at: str = ""  # host:port of another replica that has cached a part of its tokens
    awaits_blocks: bool = False  # from another instance; it is not admitted meanwhile
    num_pulled: int = 0  # tokens whose blocks a prefill instance has computed for it
    num_passed: int = 0  # later requests that were admitted before it
    images_from: int = -1  # position from which on the embeddings of images are missing; -1: it waits for none
    prompt_outputs_sent: bool = False  # with its first update
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # see PromptOutputs, as the next two
    pooled: bytes = b""
    began_at: float = 0.0
    num_preemptions: int = 0
    # Its next token cannot be chosen before the last one is known, even by an executor that keeps that one.
    needs_output_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        self.needs_output_tokens = self.sampling.needs_output_tokens

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens the answer has."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Return the largest number of positions that need blocks. The last token of the answer needs none."""
        return self.prompt_len + max(self.sampling.max_new_tokens - 1, 0)

    @property
    def max_cached_tokens(self) -> int:
        """Return how many leading tokens may come from the prefix cache, which has no logits and no hidden states.
        The last token must always be computed."""
        if self.prompt_outputs_sent or not self.wants_token_outputs:
            return len(self.token_ids) - 1
        return len(self.prompt_logprobs)

    @property
    def wants_token_outputs(self) -> bool:
        """Return whether each token of the prompt has an output."""
        return self.sampling.num_prompt_logprobs >= 0 or self.sampling.pooling == MEAN

    def append(self, token_id: int) -> str | None:
        """Append a token and return the finish reason: 'stop' after a stop id, 'length' at the limit, or None."""
        self.token_ids.append(token_id)
        sampling, num_new_tokens = self.sampling, len(self.token_ids) - self.prompt_len
        if token_id in sampling.stop_token_ids and num_new_tokens > sampling.min_new_tokens:
            return "stop"
        return "length" if num_new_tokens >= sampling.max_new_tokens else None


class Arrival(NamedTuple):
    """A request that takes a slot. The executor forgets the request that had the slot before."""

    slot: int
    token_ids: Sequence[int]  # prompt and the known part of the answer
    prompt_len: int
    sampling: Sampling
    spans: Sequence[PromptSpan] = ()  # without the embeddings of those that the prefix cache covers
    scope: tuple[str, ...] = ()  # owner and salt: requests with different scopes must not learn from each other


class PromptOutputSpec(NamedTuple):
    """The outputs that a row of a prompt has to produce in addition to the next token."""

    scored_ids: Sequence[int] = ()  # tokens that follow the first ones of the row; their logprobs are wanted
    num_logprobs: int = 0  # most likely tokens in the place of each of these
    num_pooled: int = 0  # last tokens of the row whose hidden states are added up for the slot
    returns_pooled: bool = False  # the mean of all that were added for the slot


class Row(msgspec.Struct, frozen=True, gc=False):  # gc=False: no cycle of references can go through a row
    """The tokens of one slot that a step computes, from position `start` on. If the previous step has draft tokens, the
    slot and its PENDING token may be further than `start` when it ends."""

    slot: int
    start: int
    token_ids: Sequence[int]
    new_block_ids: Sequence[Sequence[int]] = ()  # for each cache group, appended to the slot's block table; or empty
    num_sampled: int = 1  # last tokens after which one is sampled: 0 inside a prompt, 1 + k if k are drafts
    forks: Sequence[int] = ()  # slots that also sample a token after the last one
    prompt_spec: PromptOutputSpec | None = None
    max_drafts: int = 0  # draft tokens that the executor may add


class Copy(NamedTuple):
    """A copy before the step: block `target` gets the content of `source` and replaces it in a slot's block table."""

    slot: int
    group: int  # index of the cache group
    place: int  # in its block table
    source: int
    target: int


class Swaps(NamedTuple):
    """Swaps before the step: pairs of a block and its place on the host. First all of `outs` are swapped out, then the
    copies are made, then all of `ins` are swapped in. If several blocks go to one place, the last one stays."""

    outs: Sequence[tuple[int, int]]
    ins: Sequence[tuple[int, int]]


class Batch(NamedTuple):
    """The input of one step. It is a value that can be sent to other processes: it refers to slots, whose state each
    rank of the executor keeps, and the scheduler does not change it after the launch."""

    rows: Sequence[Row]
    arrivals: Sequence[Arrival] = ()
    copies: Sequence[Copy] = ()
    has_mask: bool = False  # `Step.mask` must be called before tokens can be sampled
    has_prompt_outputs: bool = False  # some row has a `prompt_spec`
    swaps: Swaps | None = None  # only if Config.num_host_blocks is not 0
    max_drafts: int = 0  # draft tokens that the executor may add to all rows together

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the step computes, without draft tokens of the executor."""
        return sum([len(row.token_ids) for row in self.rows])


class PromptOutputs(NamedTuple):
    """Outputs of a prompt, or of the part of it that a step has computed."""

    prompt_logprobs: Sequence[Logprobs] = ()  # of each token but the first, if wanted
    pooled: bytes = b""  # f32 [H], if wanted
    num_cached: int = 0  # tokens that were found in the prefix cache
    began_at: float = 0.0  # when its first step was launched, seconds since the epoch


class StepOutput(NamedTuple):
    """Sampled tokens of each row that samples, followed by those of its forks, in the order of the batch."""

    token_ids: Sequence[Sequence[int]]  # one, with k drafts up to 1 + k; the last is NO_TOKEN if none could be sampled
    logprobs: Sequence[Sequence[Logprobs] | None]  # of each token; None: not wanted
    prompt_outputs: Sequence[PromptOutputs] = ()  # of each row that has a `prompt_spec`
    num_drafts: int = 0  # draft tokens that the executor has added
