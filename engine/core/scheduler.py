"""Decides which tokens of which requests a step computes. Pure bookkeeping: no tensors, no threads, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from engine.core import beams, reading
from engine.core.block_pool import BlockPool, OutOfBlocks
from engine.core.drafting import Drafter
from engine.core.grammar import Choice
from engine.core.holdings import Holdings
from engine.core.types import (
    NO_TOKEN,
    PENDING,
    Arrival,
    Batch,
    Copy,
    Grammar,
    Logprobs,
    OfPrompt,
    Request,
    Row,
    State,
    StepOutput,
)
from engine.core.waiting import Waiting
from engine.errors import InvalidRequest, RequestError, queue_full, tokens_full

FAILED = "failed"
RUNNING = State.RUNNING  # looked up once
make = tuple.__new__  # of a NamedTuple: a third of the time that its own constructor takes, once a row
LOOK_AHEAD = 4  # waiting requests that are looked at for one that fits
MAX_PASSED = 8  # requests that may go before one that came earlier and does not fit yet


@dataclass(frozen=True)
class Limits:
    max_batch: int  # requests in a step
    max_batched_tokens: int  # tokens in a step; at least max_batch, so that decodes leave prompts something
    block_ratio: float = 0.75  # share of the blocks that prompts may fill at admission; >= 1 reserves the worst case
    max_waiting: int = 128  # beyond what can start at once
    max_waiting_tokens: int = 1 << 20  # of the prompts of all that wait; one alone may have more
    most_read: int = 1 << 10  # tokens in the readings of a step, see Executor


@dataclass
class Counters:
    """Since the start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests when they are first admitted
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the drafted ones


class Update(NamedTuple):
    """What a step brought one request: tokens, and why the last was the last if it was; or none, and it FAILED."""

    request: Request
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] | None
    finish_reason: str | None
    error: RequestError | None = None  # of one that FAILED
    of_prompt: OfPrompt | None = None  # with the first one


Gained = tuple[Sequence[int], Sequence[Logprobs] | None]  # tokens, and of each its logprobs
Launched = tuple[Request, Row, Sequence[Request]]  # whose row it is, and the forks that choose a token with it


class Scheduler:
    """A budget of tokens a step. Who begins next is `Waiting`'s to say: first come, first served, among equals.

    Running decodes go first, so that a long prompt only slows them down; what is left of the budget goes to prompts
    that have begun, then to waiting requests. A request is admitted with all blocks of its prompt, while prompts leave
    `1 - block_ratio` of the pool for running requests to grow. One that does not fit yet lets a few that came later go
    first. When a running request needs a block and none is available, the youngest gives up all of its own, waits at
    the head of the queue and is computed again from its tokens; with `block_ratio >= 1` this never happens.

    A request with forks computes the prompt for all of them: with its first token they join, holding the same blocks.

    `next_batch` and `apply` take turns; `add` and `drop` may come in between, while the step runs. Where
    `may_run_ahead` allows it, `next_batch` may come once more before the `apply` of the step before: the tokens of that
    one are then PENDING. What it computes for a request that turns out to have ended is for nobody.
    """

    def __init__(self, pool: BlockPool, limits: Limits, drafter: Drafter | None = None):
        assert limits.max_batched_tokens >= limits.max_batch
        self.pool = pool
        self.limits = limits
        self.waiting = Waiting()  # a request with forks stands for them all
        self.running: dict[str, Request] = {}  # oldest first
        self.counters = Counters()
        self._drafter = drafter
        self._holdings = Holdings(pool, limits.block_ratio)
        self._leader_of: dict[str, Request] = {}  # forks whose prompt is not computed yet
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._launched: deque[list[Launched]] = deque()  # steps that were not applied yet
        self._arrivals: list[Arrival] = []  # for the next batch, as are the copies
        self._copies: list[Copy] = []
        self._found: list[Request] = []  # of searches that the step has ended
        self._num_readable = limits.most_read  # tokens that the readings of the next batch may still have

    @property
    def is_idle(self) -> bool:
        """Nothing to compute and nothing being computed."""
        return not self.waiting and not self.running and not self._launched

    @property
    def num_running(self) -> int:
        return self.limits.max_batch - len(self._free_slots)

    def add(self, request: Request, replay: bool = False) -> None:
        """Raises InvalidRequest for what could never run and Overloaded when too many wait; a replay was admitted once
        and is never refused for the latter."""
        assert request.token_ids and not request.block_ids
        if not self.limits.most_read:
            reading.refuse(request)
        if request.sampling.num_beams:
            beams.prepare(request, self.limits.max_batch)
        apart = []  # forks that cannot run beside it: they wait like requests, and find its prompt in the cache
        while request.forks and not request.search and not self._could_run(request):
            apart.append(request.forks.pop())
        if not self._could_run(request):
            need = self._holdings.most_blocks(request)
            text = f"prompt ({request.prompt_len} tokens) and answer (up to {{value}}) need {need} KV blocks of "
            text += f"{self.pool.block_size} tokens, the server has {self.pool.num_blocks}"
            fits_alone = self.pool.blocks_for(request.prompt_len) <= self.pool.num_blocks
            field = "max_dec_len" if fits_alone else None
            raise InvalidRequest(text, field=field, value=request.sampling.max_new_tokens)
        num_queued = len(self.waiting) - len(self._free_slots)
        if num_queued >= self.limits.max_waiting and not replay:
            raise queue_full(num_queued, self.limits.max_waiting)
        num_tokens = self.waiting.num_tokens
        if num_tokens and num_tokens + request.prompt_len > self.limits.max_waiting_tokens and not replay:
            raise tokens_full(num_tokens, self.limits.max_waiting_tokens)
        self.waiting.add(request)
        for fork in request.forks:
            self._leader_of[fork.request_id] = request
        for fork in reversed(apart):
            self.waiting.add(fork)

    def _could_run(self, request: Request) -> bool:
        """Alone, with its forks."""
        return (
            len(request.forks) < self.limits.max_batch and self._holdings.most_blocks(request) <= self.pool.num_blocks
        )

    def drop(self, request_id: str) -> Request | None:
        """Forgets a request; its blocks come back when no step writes them any more. None if it is not here (any
        more)."""
        request: Request | None
        leader = self._leader_of.pop(request_id, None)
        if leader and not leader.search:
            request = next(fork for fork in leader.forks if fork.request_id == request_id)
            leader.forks.remove(request)
            self._give_up_slot(request)
            if leader.state is State.ENDED and not leader.forks:
                self._leave(leader)
        else:
            if leader:  # an answer of a search is wanted with all others or not at all
                request_id = leader.request_id
            request = self.running.get(request_id) or self.waiting.get(request_id)
            if request is None or request.state is State.ENDED:
                return None
            if request.search:
                self._forget_forks(request)
            if not request.forks or request.search:  # else it stays until their prompt is computed
                self._leave(request)
        request.state = State.ENDED
        return request

    def may_run_ahead(self) -> bool:
        """Whether the next step can be picked while one runs: no token of it depends on one that is not known, and
        nobody has to be preempted."""
        if self._drafter or len(self._launched) != 1:
            return False
        running = self.running.values()
        if any(request.reads_answer for request in (*running, *self.waiting.first(LOOK_AHEAD))):
            return False
        return sum([request.num_computed >= request.room for request in running]) <= self.pool.num_available

    def next_batch(self) -> Batch | None:
        """None when there is nothing to compute."""
        assert not self._launched or self.may_run_ahead(), "the step before has not been applied"
        launched: list[Launched] = []
        self._num_readable = self.limits.most_read
        in_prompt = self._schedule_decodes(launched)
        budget = self.limits.max_batched_tokens - sum(len(row.token_ids) for _, row, _ in launched)
        for request in in_prompt:
            # Else it has been preempted, or has only to be joined by its forks.
            if budget > 0 and request.slot >= 0 and request.num_computed < len(request.token_ids):
                budget -= self._launch_prompt(launched, request, budget)
        while budget > 0 and (admitted := self._admit()):
            budget -= self._launch_prompt(launched, admitted, budget)
        if not launched:
            return None
        self._launched.append(launched)
        has_mask = any(request.grammar and row.num_sampled for request, row, _ in launched)
        is_read = self._num_readable < self.limits.most_read
        batch = Batch([row for _, row, _ in launched], self._arrivals, self._copies, has_mask, is_read)
        self._arrivals, self._copies = [], []
        return batch

    def choices(self) -> list[Choice]:
        """Of the step that was launched, in the order of its output."""
        choices = []
        for request, row, forks in self._launched[-1]:
            if row.num_sampled:
                choices.append(Choice(request, row.token_ids[len(row.token_ids) - row.num_sampled + 1 :]))
                choices += map(Choice, forks)
        return choices

    def apply(self, output: StepOutput) -> list[Update]:
        """Enters what the step brought. Finished requests have given their blocks back on return."""
        launched = self._launched.popleft()
        self._holdings.settle()
        updates: list[Update] = []
        sampled, readings = zip(output.token_ids, output.logprobs, strict=True), iter(output.readings)
        block_size, is_read = self.pool.block_size, bool(output.readings)
        for request, row, forks in launched:
            num_sampled = row.num_sampled
            token_ids, logprobs = next(sampled) if num_sampled else ((), None)
            of_forks = [next(sampled) for _ in forks] if forks else ()
            told = next(readings) if is_read and row.reading else None
            if request.slot < 0:  # dropped meanwhile
                continue
            if num_sampled > 1:
                request.num_computed -= num_sampled - len(token_ids)  # drafts that were wrong
                self.counters.num_drafted_tokens += num_sampled - 1
                self.counters.num_accepted_tokens += len(token_ids) - 1
            update: Update | None
            if token_ids and request.is_told:
                update = self._append(request, token_ids, logprobs)
            else:
                update = self._read(request, row, told, (token_ids, logprobs))
            if request.num_computed >= (request.num_published + 1) * block_size:
                self._holdings.publish(request)
            if of_forks:
                self._join_forks(request)
            self._tell(request, update, updates)
            if of_forks:
                self._tell_forks(forks, of_forks, updates)
        self._end_searches(updates)
        self.counters.num_generated_tokens += sum([len(update.token_ids) for update in updates])
        return updates

    def check(self) -> None:
        """All books agree. Between two steps."""
        self._holdings.check(self.running.values())
        assert not any(request.block_ids for request in self.waiting)
        holders = [each for request in self.running.values() for each in (request, *request.forks)]
        slots = [each.slot for each in holders] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_batch))

    # Rows of a batch

    def _schedule_decodes(self, launched: list[Launched]) -> list[Request]:
        """A row for each running request that only misses its last token. Returns those that are still in their
        prompt. Preempts if it must: only requests younger than all that have a row."""
        in_prompt = []
        spare = self.limits.max_batched_tokens - self.num_running  # for drafts
        for request in list(self.running.values()):
            start, token_ids = request.num_computed, request.token_ids[-1:]
            num_left = len(request.token_ids) - start
            if num_left > 1 or not request.is_told:
                if request.search and request.search.has_begun:
                    self._schedule_beams(request, launched)
                    continue
                if num_left or request.forks:
                    in_prompt.append(request)
                    continue
            if start == len(request.token_ids):  # the token before is still being chosen
                if request.num_new_tokens + 1 >= request.sampling.max_new_tokens:
                    continue  # and is the last
                token_ids = [PENDING]
            if start >= request.room and (request.slot < 0 or not self._has_room(request)):
                continue  # preempted, in this very loop
            if spare > 0 and (self._drafter or request.grammar):
                token_ids += self._drafts(request, spare)
                spare -= len(token_ids) - 1
            request.num_computed = start + len(token_ids)
            new = self._new_blocks(request) if len(request.block_ids) > request.num_placed else ()
            row = make(Row, (request.slot, start, token_ids, new, len(token_ids), (), None))
            launched.append((request, row, ()))
        return in_prompt

    def _schedule_beams(self, leader: Request, launched: list[Launched]) -> None:
        """A row for each, if all have room: they move on together."""
        assert leader.search
        running = [leader, *leader.forks][: len(leader.search.running)]
        for beam in running:
            if beam.num_computed >= beam.room and (beam.slot < 0 or not self._has_room(beam)):
                return
        for beam in running:
            row = Row(beam.slot, beam.num_computed, beam.token_ids[-1:], self._new_blocks(beam))
            beam.num_computed += 1
            launched.append((beam, row, ()))

    def _launch_prompt(self, launched: list[Launched], request: Request, budget: int) -> int:
        """A chunk of its prompt; the last one gives the first token, its own and those of its forks. Returns its
        size, 0 where the readings of others leave it nothing."""
        start = request.num_computed
        if request.is_read and not request.is_told:
            budget = min(budget, self._num_readable)
            if not budget:
                return 0
        token_ids = request.token_ids[start : start + budget]
        request.num_computed = start + len(token_ids)
        is_last = request.num_computed == len(request.token_ids)
        forks = tuple(request.forks) if is_last and not request.search else ()
        slots = [fork.slot for fork in forks]
        num_sampled = int(is_last and request.sampling.max_new_tokens > 0)
        asked = None if request.is_told else reading.of_chunk(request, start, is_last)
        if asked:
            self._num_readable -= len(asked.scored) + asked.num_pooled
        row = Row(request.slot, start, token_ids, self._new_blocks(request), num_sampled, slots, asked)
        launched.append((request, row, forks))
        return len(token_ids)

    def _new_blocks(self, request: Request) -> Sequence[int]:
        """Those that the executor has not been told of."""
        placed, request.num_placed = request.num_placed, len(request.block_ids)
        return request.block_ids[placed:]

    def _drafts(self, request: Request, spare: int) -> Sequence[int]:
        """What its form forces it to say, or what the drafter guesses and its form allows."""
        limit = min(spare, request.sampling.max_new_tokens - request.num_new_tokens - 1)
        if limit <= 0:
            return ()
        drafts = request.grammar.forced()[:limit] if request.grammar else ()
        if not drafts and self._drafter:
            drafts = self._drafter.propose(request, limit)
            if request.grammar:
                drafts = drafts[: request.grammar.num_allowed(drafts)]
        return drafts[: self._holdings.stretch(request, len(drafts), len(self.running))] if drafts else ()

    # Who runs

    def _admit(self) -> Request | None:
        """Moves a waiting request to the running ones, with its blocks: the first, or one soon after it that fits."""
        passed: list[Request] = []
        for request in self.waiting.first(LOOK_AHEAD):
            if self._launched and request.reads_answer:  # its slot may be that of one which a step still computes
                return None
            if len(request.forks) < len(self._free_slots) and self._holdings.take_prompt(
                request, self.running.values()
            ):
                for each in passed:
                    each.num_passed += 1
                self._begin(request)
                return request
            if request.num_passed >= MAX_PASSED:
                return None
            passed.append(request)
        return None

    def _begin(self, request: Request) -> None:
        self.waiting.begin(request)
        self.running[request.request_id] = request
        if request.state is State.WAITING:  # or dropped, and only its forks want it
            request.state = RUNNING
        token_ids = list(request.token_ids)  # what was launched stays as it is
        for each in (request, *request.forks):
            each.slot = self._free_slots.pop()
            self._arrivals.append(Arrival(each.slot, token_ids, each.prompt_len, each.sampling))
        if request.num_preemptions == 0:  # one that comes back finds its own blocks: no merit of the cache
            self.counters.num_prompt_tokens += len(request.token_ids)
            self.counters.num_cached_tokens += request.num_cached

    def _has_room(self, request: Request) -> bool:
        """A block for the next position of `request`; False when it had to be preempted itself."""
        while True:
            try:
                if copy := self._holdings.make_room(request):
                    self._copies.append(copy)
                return True
            except OutOfBlocks:
                youngest = next(reversed(self.running.values()))
                self._preempt(youngest)
                if request.slot < 0:
                    return False

    def _preempt(self, request: Request) -> None:
        if request.search:
            self._call_off_search(request)
        self._leave(request)
        if request.state is RUNNING:
            request.state = State.WAITING
        request.num_preemptions += 1
        request.num_passed = MAX_PASSED
        self.counters.num_preemptions += 1
        self.waiting.put_back(request)

    def _join_forks(self, leader: Request) -> None:
        self._holdings.share(leader)
        for fork in leader.forks:
            del self._leader_of[fork.request_id]
            fork.state, fork.scores = RUNNING, leader.scores
            self.running[fork.request_id] = fork
        leader.forks = []

    # Beams

    def _grow(self, beam: Request, logprobs: Logprobs) -> None:
        """With the last of the beams of a search all go on, in whatever slot: what each wrote is held by those that it
        has become."""
        search = beam.search
        assert search
        if not search.has_begun:
            self._holdings.publish(beam)
        is_number = logprobs.chosen == logprobs.chosen
        if is_number and not search.hear(logprobs):
            return
        leader = self._leader_of.get(beam.request_id, beam)
        if search.is_over or not is_number:
            self._found.append(leader)
            return
        members = [leader, *leader.forks]
        self._holdings.branch(members, search.parents)
        for each, found in zip(members, search.running, strict=False):
            each.state = RUNNING
            each.token_ids[each.prompt_len :] = found.token_ids
            self._arrivals.append(Arrival(each.slot, list(each.token_ids), each.prompt_len, each.sampling))

    def _end_searches(self, updates: list[Update]) -> None:
        for leader in self._found:
            self._end_search(leader, updates)
        self._found.clear()

    def _end_search(self, leader: Request, updates: list[Update]) -> None:
        search = leader.search
        assert search
        told = reading.whole(leader)
        for answer, beam in zip_longest(
            (leader, *leader.forks)[: search.num_answers], search.ended[: search.num_answers]
        ):
            if beam and search.is_over:
                reason = search.reason_of(beam)
                updates.append(Update(answer, beam.token_ids, beam.logprobs or None, reason, None, told))
            else:
                updates.append(Update(answer, (), None, FAILED))
        for each in (leader, *leader.forks):
            each.state = State.ENDED
        self._leave(leader)
        self._forget_forks(leader)

    def _call_off_search(self, leader: Request) -> None:
        """It begins anew when it comes back."""
        assert leader.search
        leader.search.restart()
        slots = {each.slot for each in (leader, *leader.forks)}
        self._copies = [copy for copy in self._copies if copy.slot not in slots]
        for each in (leader, *leader.forks):
            del each.token_ids[each.prompt_len :]

    # What a step has brought

    def _append(self, request: Request, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Update:
        update = self._enter(request, token_ids, logprobs)
        return update if request.grammar is None else self._guided(request, request.grammar, update)

    def _read(self, request: Request, row: Row, told: OfPrompt | None, gained: Gained) -> Update | None:
        """What a row brings before its client was told anything: a chunk of a prompt, a beam. But for forks."""
        token_ids, logprobs = gained
        if told and not reading.keep(request, row, told):
            return Update(request, (), None, FAILED)
        if logprobs and request.search:
            self._grow(request, logprobs[0])
            return None
        if token_ids:
            return self._append(request, token_ids, logprobs)
        return Update(request, (), None, "length") if reading.ends_with(request, row) else None

    def _enter(self, request: Request, token_ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Update:
        if token_ids[0] == NO_TOKEN:
            return Update(request, (), None, FAILED)
        if len(token_ids) == 1:
            return make(Update, (request, token_ids, logprobs, request.append(token_ids[0]), None, None))
        for count, token_id in enumerate(token_ids, 1):
            if finish_reason := request.append(token_id):
                if count < len(token_ids):  # what follows was drafted well, but is beyond the end
                    token_ids, logprobs = token_ids[:count], logprobs and logprobs[:count]
                return Update(request, token_ids, logprobs, finish_reason)
        return Update(request, token_ids, logprobs, None)

    def _guided(self, request: Request, grammar: Grammar, update: Update) -> Update:
        """Its grammar follows. Where nothing may come any more the answer ends, without a step for the stop id."""
        _, token_ids, logprobs, finish_reason, *_ = update
        if finish_reason is None:
            grammar.advance(token_ids)
        if grammar.error:
            return Update(request, (), None, FAILED, grammar.error)
        if finish_reason or not grammar.is_complete:
            return update
        stop_id = request.sampling.stop_token_ids[0]
        finish_reason = request.append(stop_id)
        return Update(request, [*token_ids, stop_id], logprobs and [*logprobs, Logprobs(0.0)], finish_reason)

    def _tell_forks(self, forks: Sequence[Request], gained: Sequence[Gained], updates: list[Update]) -> None:
        for fork, tokens in zip(forks, gained, strict=True):
            if fork.state is RUNNING:
                self._tell(fork, self._append(fork, *tokens), updates)

    def _tell(self, request: Request, update: Update | None, updates: list[Update]) -> None:
        if request.state is RUNNING:
            if update is not None:
                if not request.is_told:
                    update = update._replace(of_prompt=reading.whole(request))
                updates.append(update)
                if update.finish_reason:
                    self._leave(request)
                    request.state = State.ENDED
        elif not request.forks:  # dropped, and none of its forks needs it any more
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if not self.waiting.drop(request.request_id):
            del self.running[request.request_id]
            for each in (request, *request.forks):
                self._holdings.release(each, is_in_flight=bool(self._launched))
                self._give_up_slot(each)

    def _forget_forks(self, leader: Request) -> None:
        for fork in leader.forks:
            self._leader_of.pop(fork.request_id, None)

    def _give_up_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1
