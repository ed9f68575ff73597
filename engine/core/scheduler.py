"""Scheduler: selects the requests and tokens of the next step. It uses no tensors, threads or clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from engine.core import prompt_outputs
from engine.core.batch_builder import BatchBuilder, Launched
from engine.core.block_pool import BlockPool
from engine.core.grammar import MaskRow
from engine.core.image_queue import ImageQueue
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.limits import Counters, Limits, PrefillLimits
from engine.core.output_processor import OutputProcessor
from engine.core.running_queue import LOOK_AHEAD, RunningQueue
from engine.core.spans import check_spans
from engine.core.types import Batch, Request, StepOutput
from engine.core.updates import Update
from engine.errors import InvalidRequest

SWAP_IN_SPEED = 8  # tokens that are swapped in from the host while one token is computed


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
        self._cache = KVCacheManager(pool, limits)
        self._queue = RunningQueue(self._cache, limits, self.counters, images)
        self._images = images
        self.waiting, self.running = self._queue.waiting, self._queue.running
        self._launched: deque[list[Launched]] = deque()  # steps that were not applied yet
        self.num_applied = 0  # steps
        self._outputs = OutputProcessor(self._queue, self.counters)

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
        return self._cache.has_copies

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

    def next_batch(self, now: float = 0.0, max_drafts: int | None = None) -> Batch | None:
        """Return the next step to launch, or None if there is nothing to compute. `now`: seconds since the epoch;
        `max_drafts`: draft tokens that the executor may add to a row, by default those of the limits."""
        assert not self._launched or self.may_run_ahead(), "the previous step has not been applied"
        limits = self.limits
        builder = BatchBuilder(self._queue, limits, now, limits.max_drafts if max_drafts is None else max_drafts)
        in_prompt = builder.add_decodes(self._computable())
        # The other requests have been preempted or only wait for their forks to join.
        begun = [each for each in in_prompt if each.slot >= 0 and each.num_computed < len(each.token_ids)]
        if limits.prefills:
            self._add_side_by_side(builder, begun, limits.prefills)
        else:
            self._add_in_order(builder, begun)
        if not builder.launched:
            return None
        self._launched.append(builder.launched)
        self._cache.begin_step()
        return builder.build(*self._queue.take_slot_changes(), self.pool.take_swaps())

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
        return self._outputs.process(launched, output)

    def check(self) -> None:
        """Check that all bookkeeping is consistent. Called between two steps."""
        self._queue.check()

    def _computable(self) -> list[Request]:
        """Return the running requests except those whose grammars do not know yet which tokens may follow."""
        running = self.running.values()
        return [
            each for each in running if each.grammar is None or each.grammar.is_ready or not each.prompt_outputs_sent
        ]

    def _tokens_during_swap_in(self) -> int:
        """Return how many tokens can be computed while blocks are swapped in, without making the step longer."""
        return self.pool.num_swap_ins * self.pool.block_size // SWAP_IN_SPEED

    def _add_in_order(self, builder: BatchBuilder, prompts: Sequence[Request]) -> None:
        """Add as much of each prompt as the budget allows, then waiting requests."""
        for request in prompts:
            if builder.budget > 0:
                builder.add_prompt(request, builder.budget)
        while builder.budget > self._tokens_during_swap_in():
            admitted = self._queue.admit(is_ahead=bool(self._launched))
            if admitted is None:
                return
            builder.add_prompt(admitted, builder.budget)

    def _add_side_by_side(self, builder: BatchBuilder, prompts: list[Request], limits: PrefillLimits) -> None:
        """Divide the budget equally among as many prompts as `limits` allow. What the shortest prompts do not need goes
        to the others, so that a short prompt does not wait for a long one."""
        while len(prompts) < limits.max_prefills and builder.budget > max(len(prompts), self._tokens_during_swap_in()):
            num_long = sum(len(request.token_ids) > limits.long_tokens for request in prompts)
            max_tokens = limits.long_tokens if num_long >= limits.max_long else None
            admitted = self._queue.admit(is_ahead=bool(self._launched), max_tokens=max_tokens)
            if admitted is None:
                break
            prompts.append(admitted)
        prompts.sort(key=lambda request: len(request.token_ids) - request.num_computed)
        for index, request in enumerate(prompts):
            if (share := builder.budget // (len(prompts) - index)) > 0:
                builder.add_prompt(request, share)
