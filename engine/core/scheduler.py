"""Scheduler: selects the requests and tokens of the next step. It uses no tensors, threads or clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from engine.core import prompt_outputs
from engine.core.block_pool import BlockPool
from engine.core.cache_groups import MAX_REJECTED
from engine.core.grammar import MaskRow
from engine.core.image_queue import ImageQueue
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.limits import Counters, Limits, PrefillLimits
from engine.core.running_queue import LOOK_AHEAD, RunningQueue
from engine.core.spans import check_spans
from engine.core.types import PENDING, Batch, Logprobs, PromptOutputs, Request, Row, State, StepOutput
from engine.core.updates import FAILED, Update, append, check_grammar
from engine.errors import InvalidRequest

SWAP_IN_SPEED = 8  # tokens that are swapped in from the host while one token is computed
RUNNING = State.RUNNING  # looked up once
Sampled = tuple[
    Sequence[int], Sequence[Logprobs] | None
]  # tokens of a row and, if wanted, the log-probabilities of each
Launched = tuple[Request, Row, Sequence[Request]]  # a row, its request and the forks that also sample from it


class Scheduler:
    """Scheduler of one engine. Each step has a budget of tokens. Running decodes come first, so that a long prompt
    cannot stop them; the rest of the budget goes to prompts that have begun, then to waiting requests that the
    `RunningQueue` admits. With `Limits.prefills` the prompts share it.

    `next_batch` and `apply` alternate; `add` and `drop` may be called in between, while the step runs. If
    `may_run_ahead` allows it, `next_batch` may be called once more before the previous step is applied: the tokens of
    that step are then PENDING. What a step computes for a request that has ended meanwhile is ignored.
    """

    def __init__(self, pool: BlockPool, limits: Limits, images: ImageQueue | None = None):
        """Schedule requests on `pool`. `images` encodes their images; without it, requests with pixels are refused."""
        assert limits.max_batched_tokens >= limits.max_batch
        self.pool = pool
        self.limits = limits
        self.counters = Counters()
        self.now = 0.0  # seconds since the epoch, set by the loop before each step
        self.max_drafts = limits.max_drafts  # draft tokens of a row; the loop may set it before each step
        self._cache = KVCacheManager(pool, limits)
        self._queue = RunningQueue(self._cache, limits, self.counters, images)
        self._images = images
        self.waiting, self.running = self._queue.waiting, self._queue.running
        self._launched: deque[list[Launched]] = deque()  # steps that were not applied yet
        self.num_applied = 0  # steps
        self._num_prompt_logits_left = limits.max_prompt_logits  # of the next batch

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to compute and no step runs."""
        return not self.waiting and not self.running and not self._launched

    @property
    def num_launched(self) -> int:
        """Return how many steps were launched, those included that were not applied yet."""
        return self.num_applied + len(self._launched)

    @property
    def has_copies(self) -> bool:
        """Return whether blocks wait to be copied by the next step. Their content must not change until then."""
        return bool(self._cache.copies)

    @property
    def num_running(self) -> int:
        """Return how many slots are taken, those of forks included."""
        return self._queue.num_running

    def add(self, request: Request, replay: bool = False) -> None:
        """Add a request to the waiting ones. Raises InvalidRequest if it could never run and Overloaded if too many
        wait, except for a `replay`, which was accepted before."""
        assert request.token_ids and not request.cache.block_ids
        if not self.limits.max_prompt_logits:
            prompt_outputs.refuse_if_wanted(request)
        if request.spans and not self.limits.takes_spans:
            raise InvalidRequest("the model takes text only: prompts cannot have images or other embeddings")
        check_spans(request.spans, request.prompt_len)
        if self._images:
            self._images.check(request.spans)
        elif any(span.pixels and not span.embeddings for span in request.spans):
            raise InvalidRequest("this device cannot compute the model's vision network: prompts cannot have images")
        self._queue.add(request, replay)

    def longest_prefix(self, request: Request) -> tuple[list[bytes], int]:
        """See `PrefixCache.longest`."""
        return self._cache.longest_prefix(request)

    def max_blocks(self, request: Request) -> int:
        """See `KVCacheManager.max_blocks`."""
        return self._cache.max_blocks(request)

    def num_promised_blocks(self) -> int:
        """Return how many blocks the running requests may still take."""
        return self._cache.num_promised(self.running.values())

    def drop(self, request_id: str) -> Request | None:
        """Drop a request and return it; its blocks are freed when no step writes them any more. Return None if it has
        ended or is unknown."""
        return self._queue.drop(request_id)

    def branch(self, request: Request, source: Request, token_id: int) -> None:
        """Let a running request give up its own tokens and continue those of `source`, with `token_id` in place of the
        last one. They share the blocks of `source` until one of them writes. `source` may be the request itself; no
        step may be running."""
        assert not self._launched and request.slot >= 0 and source.slot >= 0
        if source is not request:
            self._cache.fork(source, request)
            request.token_ids = list(source.token_ids)
        elif request.token_ids[-1] == token_id:
            return
        request.token_ids[-1] = token_id
        self._queue.reset_slot(request)

    def requeue(self, request: Request, forks: list[Request]) -> None:
        """Compute a request and `forks`, which run or wait, again from their common prompt, before all that wait."""
        self._queue.requeue(request, forks)

    def may_run_ahead(self) -> bool:
        """Return whether the next step can be scheduled while one runs: none of its tokens depends on an unknown one,
        and no request has to be preempted."""
        if len(self._launched) != 1:
            return False
        running = self.running.values()
        if any(request.needs_output_tokens for request in (*running, *self.waiting.first(LOOK_AHEAD))):
            return False
        num_full = sum([each.num_computed + each.num_unverified >= each.cache.num_writable for each in running])
        return num_full * len(self.limits.cache_groups) <= self.pool.num_available

    def next_batch(self) -> Batch | None:
        """Return the next step to launch, or None if there is nothing to compute."""
        assert not self._launched or self.may_run_ahead(), "the previous step has not been applied"
        launched: list[Launched] = []
        self._num_prompt_logits_left = self.limits.max_prompt_logits
        in_prompt = self._schedule_decodes(launched)
        budget = self.limits.max_batched_tokens - sum([len(row.token_ids) for _, row, _ in launched])
        # The other requests have been preempted or only wait for their forks to join.
        begun = [each for each in in_prompt if each.slot >= 0 and each.num_computed < len(each.token_ids)]
        if self.limits.prefills:
            self._launch_side_by_side(launched, begun, budget, self.limits.prefills)
        else:
            for request in begun:
                if budget > 0:
                    budget -= self._launch_prompt(launched, request, budget)
            while budget > self._tokens_during_swap_in() and (
                admitted := self._queue.admit(is_ahead=bool(self._launched))
            ):
                budget -= self._launch_prompt(launched, admitted, budget)
        if not launched:
            return None
        self._launched.append(launched)
        self._cache.begin_step()
        has_prompt_outputs = self._num_prompt_logits_left < self.limits.max_prompt_logits
        rows = [row for _, row, _ in launched]
        guided = [row for request, row, _ in launched if request.grammar and row.num_sampled]
        max_drafts = self.max_drafts
        if max_drafts:  # of all rows together: what is left of the budget
            max_drafts = self.limits.max_batched_tokens - sum(len(row.token_ids) for row in rows)
        slot_changes, swaps = self._queue.take_slot_changes(), self.pool.take_swaps()
        return Batch(rows, *slot_changes, bool(guided), has_prompt_outputs, swaps, max_drafts)

    def mask_rows(self, drafts: Mapping[int, Sequence[int]]) -> list[MaskRow]:
        """Return the choices of the step that was launched, in the order of its output. `drafts`: that the executor has
        added, by slot."""
        choices = []
        for request, row, forks in self._launched[-1]:
            if row.num_sampled:
                forced = row.token_ids[len(row.token_ids) - row.num_sampled + 1 :]
                choices.append(MaskRow(request, forced or drafts.get(row.slot, ())))
                choices += map(MaskRow, forks)
        return choices

    def apply(self, output: StepOutput) -> list[Update]:
        """Apply the output of the oldest launched step and return the updates of its requests. The blocks of finished
        requests are free on return."""
        launched = self._launched.popleft()
        self.num_applied += 1
        self._cache.end_step()
        updates: list[Update] = []
        guided: list[Update] = []
        sampled, of_prompts = zip(output.token_ids, output.logprobs, strict=True), iter(output.prompt_outputs)
        block_size, has_prompt_outputs = self.pool.block_size, bool(output.prompt_outputs)
        for request, row, forks in launched:
            num_sampled = row.num_sampled
            token_ids, logprobs = next(sampled) if num_sampled else ((), None)
            of_forks = [next(sampled) for _ in forks] if forks else ()
            outputs = next(of_prompts) if has_prompt_outputs and row.prompt_spec else None
            if request.slot < 0:  # it was dropped meanwhile
                continue
            if num_sampled and request.grammar and request.grammar.is_mask_missing and not request.grammar.error:
                assert request.prompt_outputs_sent  # a first token is sampled only with a mask
                request.grammar.is_mask_missing = False
                self._queue.preempt(request)  # the sampled token is invalid and is computed again
                continue
            if num_sampled > 1 or row.max_drafts:
                request.num_computed += len(token_ids) - 1
                request.num_unverified -= num_sampled - 1 + row.max_drafts
                self.counters.num_drafted_tokens += num_sampled - 1
                self.counters.num_accepted_tokens += len(token_ids) - 1
            update: Update | None
            if token_ids and request.prompt_outputs_sent:
                update = append(request, token_ids, logprobs)
            else:
                update = self._first_update(request, row, outputs, (token_ids, logprobs))
            if request.num_computed >= (request.cache.num_published + 1) * block_size:
                self._cache.publish(request)
            if of_forks:
                self._queue.join_forks(request)
            self._finish_row(request, update, updates, guided)
            for fork, fork_update in _append_to_forks(forks, of_forks) if forks else ():
                self._finish_row(fork, fork_update, updates, guided)
        for update in guided:  # Their grammars have been advanced together.
            assert update.request.grammar
            self._emit(update.request, check_grammar(update.request.grammar, update), updates)
        self.counters.num_drafted_tokens += output.num_drafts
        return updates

    def check(self) -> None:
        """Check that all bookkeeping is consistent. Called between two steps."""
        self._queue.check()

    # Rows of a batch

    def _schedule_decodes(self, launched: list[Launched]) -> list[Request]:
        """Add a row for each running request that decodes. Return the requests that still compute their prompts.
        Preempts if necessary, but only requests that are younger than all that have a row."""
        in_prompt, may_draft = [], self.max_drafts > 0
        spare = self.limits.max_batched_tokens - self.num_running  # for tokens that a grammar forces
        for request in self._computable():
            known, start, cache = request.token_ids, request.num_computed, request.cache
            num_left = len(known) - start
            if num_left > 1 or not request.prompt_outputs_sent:
                if num_left or request.forks:
                    has_room = start < cache.num_writable or not num_left
                    if has_room or (request.slot >= 0 and self._queue.allocate_or_preempt(request)):
                        in_prompt.append(request)
                    continue
            if num_left:
                token_ids = known[start:]
            elif request.num_new_tokens + 1 < request.sampling.max_new_tokens:
                token_ids = [PENDING]  # the previous step still samples its last token
            else:
                continue  # which is the last one
            last = start + request.num_unverified  # at most
            if last >= cache.num_writable and (request.slot < 0 or not self._queue.allocate_or_preempt(request)):
                continue  # it was preempted
            num_sampled, max_drafts = 1, 0
            if (may_draft or request.grammar) and not request.in_lockstep:
                forced, max_drafts = self._reserve_drafts(request, spare)
                token_ids += forced
                spare -= len(forced)
                num_sampled = len(token_ids)
                request.num_unverified += len(forced) + max_drafts
            request.num_computed, request.num_retractable = start + 1, 0
            new = self._cache.take_new_blocks(request) if cache.has_new_blocks else ()
            row = Row(request.slot, start, token_ids, new, num_sampled, (), None, max_drafts)
            launched.append((request, row, ()))
        return in_prompt

    def _computable(self) -> list[Request]:
        """Return the running requests except those whose grammars do not know yet which tokens may follow."""
        running = self.running.values()
        return [
            each for each in running if each.grammar is None or each.grammar.is_ready or not each.prompt_outputs_sent
        ]

    def _tokens_during_swap_in(self) -> int:
        """Return how many tokens can be computed while blocks are swapped in, without making the step longer."""
        return self.pool.num_coming_back * self.pool.block_size // SWAP_IN_SPEED

    def _launch_side_by_side(
        self, launched: list[Launched], prompts: list[Request], budget: int, limits: PrefillLimits
    ) -> None:
        """Divide the budget equally among as many prompts as `limits` allow. What the shortest prompts do not need goes
        to the others, so that a short prompt does not wait for a long one."""
        while len(prompts) < limits.max_prefills and budget > max(len(prompts), self._tokens_during_swap_in()):
            num_long = sum(len(request.token_ids) > limits.long_tokens for request in prompts)
            max_tokens = limits.long_tokens if num_long >= limits.max_long else None
            admitted = self._queue.admit(is_ahead=bool(self._launched), max_tokens=max_tokens)
            if admitted is None:
                break
            prompts.append(admitted)
        prompts.sort(key=lambda request: len(request.token_ids) - request.num_computed)
        for index, request in enumerate(prompts):
            if (share := budget // (len(prompts) - index)) > 0:
                budget -= self._launch_prompt(launched, request, share)

    def _launch_prompt(self, launched: list[Launched], request: Request, budget: int) -> int:
        """Add a row with the next chunk of a prompt and return its number of tokens, 0 if it has to wait for another
        step. The last chunk samples the first tokens of the request and of its forks."""
        start = request.num_computed
        request.began_at = request.began_at or self.now
        if request.wants_token_outputs and not request.prompt_outputs_sent:
            budget = min(budget, self._num_prompt_logits_left)
            if not budget:
                return 0
        budget = self._cache.chunk_len(request, min(budget, len(request.token_ids) - start))
        token_ids = request.token_ids[start : start + budget]
        if request.grammar and not request.grammar.is_ready and start + len(token_ids) == len(request.token_ids):
            token_ids.pop()  # the grammar does not know yet which tokens may follow
            if not token_ids:
                return 0
        request.num_computed = start + len(token_ids)
        request.num_retractable = min(len(token_ids) - 1, MAX_REJECTED)
        is_last = request.num_computed == len(request.token_ids)
        forks = tuple(request.forks) if is_last else ()
        slots = [fork.slot for fork in forks]
        num_sampled = int(is_last and request.sampling.max_new_tokens > 0)
        asked = None if request.prompt_outputs_sent else prompt_outputs.spec_of_chunk(request, start, is_last)
        if asked:
            self._num_prompt_logits_left -= len(asked.scored_ids) + asked.num_pooled
        row = Row(request.slot, start, token_ids, self._cache.take_new_blocks(request), num_sampled, slots, asked)
        launched.append((request, row, forks))
        return len(token_ids)

    def _reserve_drafts(self, request: Request, spare: int) -> tuple[Sequence[int], int]:
        """Return the tokens that its grammar forces now, at most `spare`, or else how many draft tokens the executor
        may add. There are blocks for them behind the next token, wherever that comes to be."""
        grammar = request.grammar
        forced = grammar.forced()[:spare] if grammar and spare > 0 else ()
        num_drafts = len(forced) or (self.max_drafts if grammar is None or grammar.takes_drafts else 0)
        num_drafts = min(num_drafts, request.max_len - 1 - request.num_computed)
        if num_drafts > 0:
            num_drafts = self._cache.allocate_drafts(request, num_drafts, len(self.running))
        num_drafts = max(num_drafts, 0)
        return (forced[:num_drafts], 0) if forced else ((), num_drafts)

    # Output of a step

    def _first_update(
        self, request: Request, row: Row, outputs: PromptOutputs | None, sampled: Sampled
    ) -> Update | None:
        """Return the update with the first token or the failure of a request, or None inside its prompt."""
        token_ids, logprobs = sampled
        if outputs and not prompt_outputs.collect(request, row, outputs):
            return Update(request, (), None, FAILED)
        if token_ids:
            return append(request, token_ids, logprobs)
        return Update(request, (), None, "length") if prompt_outputs.is_finished_by(request, row) else None

    def _finish_row(self, request: Request, update: Update | None, updates: list[Update], guided: list[Update]) -> None:
        """Emit the update. If the request has a grammar, advance it and append the update to `guided`: it is emitted
        after the grammars of all rows, so that these are advanced together."""
        if request.state is RUNNING:
            if update and request.grammar:
                if update.finish_reason is None:
                    request.grammar.advance(update.token_ids)
                guided.append(update)
            elif update and (update.finish_reason or not request.prompt_outputs_sent):
                self._emit(request, update, updates)
            elif update:
                updates.append(update)
        elif not request.forks:  # it was dropped, and its forks no longer need it
            self._queue.finish(request)

    def _emit(self, request: Request, update: Update, updates: list[Update]) -> None:
        """Append an update, the first one with the prompt outputs. Finish the request if it has ended."""
        if not request.prompt_outputs_sent:
            if update.finish_reason != FAILED:
                self._cache.keep_logprobs(request)
            update = replace(update, prompt_outputs=prompt_outputs.take(request))
        updates.append(update)
        if update.finish_reason:
            self._cache.keep_end(request)
            self._queue.finish(request)
            request.state = State.ENDED


def _append_to_forks(forks: Sequence[Request], sampled: Sequence[Sampled]) -> list[tuple[Request, Update]]:
    """Append the first tokens of forks that still run, and return their updates."""
    pairs = zip(forks, sampled, strict=True)
    return [(fork, append(fork, *tokens)) for fork, tokens in pairs if fork.state is RUNNING]
