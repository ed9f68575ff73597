"""The nouns of the engine: what is asked for, what runs in a step, what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from engine.core.cache_groups import CacheGroup
from engine.core.spans import PromptSpan
from engine.errors import RequestError
from engine.sampling_parameters import SamplingParameters

NO_TOKEN = -1  # the model's logits are no numbers, or bans and masks left nothing
MEAN = "mean"  # of Sampling.pooling
PENDING = -2  # in a row: the last token that the step before chooses for its slot, which is not known yet


@dataclass(frozen=True)
class Sampling(SamplingParameters):
    """How the tokens of one answer are chosen (docs/ops.md, section Sampling) and when it ends."""

    max_new_tokens: int  # 0: the prompt is only read
    min_new_tokens: int = 0  # stop ids cannot be chosen before
    seed: int = 0  # 64 bits, unsigned
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none, 0: the chosen token's, k: and the k likeliest
    num_beams: int = 0  # > 0: the likeliest answers are searched for, with so many begun ones
    length_penalty: float = 1.0  # by this power of its length the logprob of such an answer is divided
    # What is asked of the prompt itself
    num_prompt_logprobs: int = -1  # of its tokens but the first, as above
    pooling: str = ""  # its hidden states behind the last layer: `last`, or the `mean` of all; empty: not wanted
    form: tuple[str, ...] = ()  # that the answer must have: the field that says so, and the text of its grammar
    # What the weights gain, of prompt and answer: a name that other files never have, and the folder that they are in
    adapter: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Sampling:
        """Return what `dataclasses.astuple` was made of."""
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))

    @property
    def reads_answer(self) -> bool:
        """Whether the next token depends on those before by more than their number and the logits."""
        is_bound = bool(self.form) or self.num_beams > 0
        return self.has_penalty or is_bound or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True)
class Logprobs:
    """Of one token: log-probability by the model's own logits, and the likeliest ids in its place with theirs."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Grammar(Protocol):
    """What one answer of a given form may still become. What cannot be followed any more has an `error`; nothing else
    of it means anything then."""

    is_ready: bool  # False: what may follow is still being found out, so that no token can be chosen
    is_mask_missing: bool  # of the last step: there was no mask in time, so that what was chosen is no token

    @property
    def error(self) -> RequestError | None: ...

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    @property
    def takes_drafts(self) -> bool:
        """Whether there can be masks after draft tokens, too. One that has an error says anything."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer has gained these. Takes effect when something is asked of this, so that what the answers of a step
        have gained can be told together."""
        ...

    def forced(self) -> Sequence[int]:
        """What follows whatever the model says: in the place of each of these only it is allowed."""
        ...


class State(Enum):
    WAITING = "waiting"  # holds nothing; its tokens are known, nothing of them is computed
    RUNNING = "running"  # has a slot and blocks
    ENDED = "ended"  # finished or dropped; a step that was launched before may still compute it, for nobody


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its answer so far. Compared by identity: two equal prompts are two requests."""

    request_id: str
    token_ids: list[int]  # prompt, then everything generated so far
    prompt_len: int
    sampling: Sampling
    forks: list[Request] = field(default_factory=list)  # more answers to this prompt, until it is computed
    spans: Sequence[PromptSpan] = ()  # of the prompt; forks have the same
    salt: str = ""  # requests with another one never share cached blocks
    owner: str = ""  # waiting requests of each get equal shares
    priority: int = 0  # lower is earlier
    grammar: Grammar | None = None  # of `sampling.form`; the loop sets it, as soon as it is compiled
    in_lockstep: bool = False  # it and its forks advance together, without drafts: all have to be in the batch
    # The scheduler's
    state: State = State.WAITING
    slot: int = -1  # its place in the batch while it runs
    block_ids: list[list[int]] = field(default_factory=list)  # of each cache group: position // block_size -> block
    num_freed: list[int] = field(default_factory=list)  # of each: leading blocks that its window has passed
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as many as were needed so far
    # Leading tokens whose keys and values are in the blocks once all launched steps have run; with drafts, at least so
    # many, and at most `num_unverified` more.
    num_computed: int = 0
    num_unverified: int = 0  # draft tokens that launched steps may accept
    num_published: int = 0  # leading full blocks that the prefix cache has been told of
    num_placed: list[int] = field(default_factory=list)  # of each group: leading blocks that the executor knows
    has_new_blocks: bool = False  # it has blocks that the executor does not know
    branch_point: int = 0  # position up to which other prompts share its attention blocks, but no state was kept
    has_shared_tail: bool = False  # its last block may have other holders: to be copied before it is written
    room: int = 0  # positions below may be written
    num_cached: int = 0  # tokens that the prefix cache held at the last admission
    num_passed: int = 0  # requests that went before it although they came later
    prompt_outputs_sent: bool = False  # with its first update
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # see PromptOutputs, as the next two
    pooled: bytes = b""
    began_at: float = 0.0
    num_preemptions: int = 0
    # Its next token cannot be chosen before the last one is known, even by an executor that keeps that one.
    reads_answer: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reads_answer = self.sampling.reads_answer

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def max_len(self) -> int:
        """Positions this request may come to hold. The last token is never fed back, so it needs none."""
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
        """The finish reason: 'stop' after a stop id, 'length' at the limit, None while it runs."""
        self.token_ids.append(token_id)
        sampling, num_new_tokens = self.sampling, len(self.token_ids) - self.prompt_len
        if token_id in sampling.stop_token_ids and num_new_tokens > sampling.min_new_tokens:
            return "stop"
        return "length" if num_new_tokens >= sampling.max_new_tokens else None


class Arrival(NamedTuple):
    """A request takes a slot; whoever had it before is gone."""

    slot: int
    token_ids: Sequence[int]  # prompt, and what of the answer is known
    prompt_len: int
    sampling: Sampling
    spans: Sequence[PromptSpan] = ()  # without the embeddings of those that the prefix cache covers


class PromptOutputSpec(NamedTuple):
    """The outputs that a row of a prompt has to produce in addition to the next token."""

    scored_ids: Sequence[int] = ()  # tokens that follow the first ones of the row; their logprobs are wanted
    num_logprobs: int = 0  # most likely tokens in the place of each of these
    num_pooled: int = 0  # last tokens of the row whose hidden states are added up for the slot
    returns_pooled: bool = False  # the mean of all that were added for the slot


class Row(NamedTuple):
    """The tokens of one slot that a step computes, from position `start` on. Where the step before has drafts, too, its
    slot may come to be further than `start`, and the PENDING token with it."""

    slot: int
    start: int
    token_ids: Sequence[int]
    new_block_ids: Sequence[Sequence[int]] = ()  # for each cache group, appended to the slot's block table; or nothing
    num_sampled: int = 1  # of the last ones, each gives a token: 0 inside a prompt, 1 + k when the last k are drafts
    forks: Sequence[int] = ()  # slots that also choose a token after the last one
    prompt_spec: PromptOutputSpec | None = None
    max_drafts: int = 0  # draft tokens that the executor may add, each of which gives a token, too


class Copy(NamedTuple):
    """Before the step: `target` becomes a copy of the block `source`, and takes its place in a slot's table."""

    slot: int
    group: int  # index of the cache group
    place: int  # in its block table
    source: int
    target: int


class Swaps(NamedTuple):
    """Before the step, blocks move between the cache and the host, each a block and its place there: out first, then
    what has to be copied is, then back. Where several go to one place, the last one stays."""

    out: Sequence[tuple[int, int]]
    back: Sequence[tuple[int, int]]


class Batch(NamedTuple):
    """What one step computes. A value: it refers to slots, whose state every rank of the executor keeps for itself, so
    it can be sent anywhere; what was launched is not changed by what the scheduler does next."""

    rows: Sequence[Row]
    arrivals: Sequence[Arrival] = ()
    copies: Sequence[Copy] = ()
    has_mask: bool = False  # `Step.mask` will be called before a token can be chosen
    has_prompt_outputs: bool = False  # some row has a `prompt_spec`
    swaps: Swaps | None = None  # only where Config.num_host_blocks is not 0
    max_drafts: int = 0  # draft tokens that the executor may add to all rows together

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class PromptOutputs(NamedTuple):
    """Outputs of a prompt, or of the part of it that a step has computed."""

    prompt_logprobs: Sequence[Logprobs] = ()  # of each token but the first, if wanted
    pooled: bytes = b""  # f32 [H], if wanted
    num_cached: int = 0  # tokens that were found in the prefix cache
    began_at: float = 0.0  # when its first step was launched, seconds since the epoch


class StepOutput(NamedTuple):
    """Of every row that samples, then of each of its forks, in batch order: the tokens it has gained."""

    token_ids: Sequence[Sequence[int]]  # one, with drafts up to 1 + k; [NO_TOKEN] where none could be chosen
    logprobs: Sequence[Sequence[Logprobs] | None]  # of each token; None: not asked for
    prompt_outputs: Sequence[PromptOutputs] = ()  # of every row that has a `prompt_spec`
    num_drafts: int = 0  # draft tokens that the executor had added


class Step(Protocol):
    """A step that was launched."""

    def drafts(self) -> Mapping[int, Sequence[int]]:
        """Return the draft tokens that the executor has added to the row of each slot. Waits until they are known."""
        ...

    def mask(self, bits: Any) -> None:
        """u32 [S, ceil(V / 32)], a row for every token that is chosen; bit i of word w: token 32 w + i is allowed. So
        grammars can be advanced while the step runs."""
        ...

    def result(self) -> StepOutput:
        """Waits for the step. Whatever is raised leaves the cache undefined and ends the engine."""
        ...


class Executor(Protocol):
    """Runs the static graph on all its ranks and keeps the KV cache and what the sampling of each slot remembers. The
    only thing the engine asks of a device.

    Called by one thread. Raises SetupError at construction, when graph, settings and device do not go together.
    """

    block_size: int  # tokens of a block, decided at export
    block_bytes: int  # of a block of the KV cache, in all layers of its group
    cache_groups: tuple[CacheGroup, ...]  # of the graph
    runs_ahead: bool  # a step may be launched while the one before runs, with PENDING tokens
    max_prompt_logits: int  # tokens of a step with prompt outputs, whose logits are in memory at once; 0: unsupported
    takes_spans: bool  # requests may have prompt spans
    max_drafts: int  # draft tokens that it adds to a row; 0: it does not draft

    def free_bytes(self) -> int:
        """Memory for the KV cache, beside what the steps so far have needed; of the rank that has least."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache, in place of the one before. Its content is undefined."""
        ...

    def warm_up(self) -> None:
        """Compile and run once whatever a request can reach. Called after the first `allocate`; the content of the
        cache is lost."""
        ...

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        """From now on requests may have it (`Sampling.adapter`). Raises InvalidRequest."""
        ...

    def drop_adapter(self, adapter_id: str) -> None:
        """No request has it that is still to be launched. Harmless when it is not there."""
        ...

    def launch(self, batch: Batch) -> Step:
        """Begins a step that writes keys and values of every row's tokens into the blocks of its slot, and chooses
        tokens. May return before anything is computed; steps run in the order of their launch. `batch` has a row at
        least."""
        ...

    def close(self) -> None:
        """Frees graph and cache. The last call."""
        ...
