"""Builder of one batch: the rows of running answers and of chunks of prompts, within the budget of tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core import prompt_outputs
from engine.core.cache_groups import MAX_REJECTED
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.limits import Limits
from engine.core.running_queue import RunningQueue
from engine.core.types import PENDING, Arrival, Batch, Copy, Request, Row, Swaps

Launched = tuple[Request, Row, Sequence[Request]]  # a row, its request and the forks that also sample from it


class BatchBuilder:
    """Rows of the next step, with the blocks that they need. `launched` are the rows so far, and `budget` is the number
    of tokens that may be added."""

    def __init__(self, queue: RunningQueue, limits: Limits, now: float, max_drafts: int):
        """Begin an empty batch. `now`: seconds since the epoch; `max_drafts`: draft tokens that the executor may add to
        a row."""
        self.launched: list[Launched] = []
        self.budget = limits.max_batched_tokens
        self._queue, self._limits = queue, limits
        self._cache: KVCacheManager = queue.cache
        self._now, self._max_drafts = now, max_drafts
        self._num_prompt_logits_left = limits.max_prompt_logits
        self._has_mask = False

    def add_decodes(self, requests: Iterable[Request]) -> list[Request]:
        """Add a row for each running request that decodes. Return the requests that still compute their prompts.
        Preempts if necessary, but only requests that are younger than all that have a row."""
        in_prompt, may_draft, launched = [], self._max_drafts > 0, self.launched
        num_forced, spare = 0, self.budget - self._queue.num_running  # tokens that a grammar forces
        for request in requests:
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
                continue  # that token is the last one of the answer
            last = start + request.num_unverified  # at most
            if last >= cache.num_writable and (request.slot < 0 or not self._queue.allocate_or_preempt(request)):
                continue  # it was preempted
            num_sampled, max_drafts = 1, 0
            if (may_draft or request.grammar) and not request.in_lockstep:
                forced, max_drafts = self._reserve_drafts(request, spare - num_forced)
                token_ids += forced
                num_forced += len(forced)
                num_sampled = len(token_ids)
                request.num_unverified += len(forced) + max_drafts
            request.num_computed, request.num_retractable = start + 1, 0
            new = self._cache.take_new_blocks(request) if cache.has_new_blocks else ()
            row = Row(request.slot, start, token_ids, new, num_sampled, (), None, max_drafts)
            launched.append((request, row, ()))
            if request.grammar:
                self._has_mask = True
        self.budget -= len(launched) + num_forced
        return in_prompt

    def add_prompt(self, request: Request, max_tokens: int) -> None:
        """Add a row with the next chunk of a prompt, unless it has to wait for another step. The last chunk samples the
        first tokens of the request and of its forks."""
        start = request.num_computed
        request.began_at = request.began_at or self._now
        if request.wants_token_outputs and not request.prompt_outputs_sent:
            max_tokens = min(max_tokens, self._num_prompt_logits_left)
            if not max_tokens:
                return
        count = self._cache.chunk_len(request, min(max_tokens, len(request.token_ids) - start))
        token_ids = request.token_ids[start : start + count]
        if request.grammar and not request.grammar.is_ready and start + len(token_ids) == len(request.token_ids):
            token_ids.pop()  # the grammar does not know yet which tokens may follow
            if not token_ids:
                return
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
        self.launched.append((request, row, forks))
        self._has_mask |= bool(request.grammar and num_sampled)
        self.budget -= len(token_ids)

    def build(self, arrivals: Sequence[Arrival], copies: Sequence[Copy], swaps: Swaps | None) -> Batch:
        """Return the batch of all rows."""
        rows = [row for _, row, _ in self.launched]
        has_prompt_outputs = self._num_prompt_logits_left < self._limits.max_prompt_logits
        max_drafts = self.budget if self._max_drafts else 0  # of all rows together
        return Batch(rows, arrivals, copies, self._has_mask, has_prompt_outputs, swaps, max_drafts)

    def _reserve_drafts(self, request: Request, spare: int) -> tuple[Sequence[int], int]:
        """Return the tokens that its grammar forces now, at most `spare`, or else how many draft tokens the executor
        may add. There are blocks for them behind the next token, wherever that comes to be."""
        grammar = request.grammar
        forced = grammar.forced()[:spare] if grammar and spare > 0 else ()
        num_drafts = len(forced) or (self._max_drafts if grammar is None or grammar.takes_drafts else 0)
        num_drafts = min(num_drafts, request.max_len - 1 - request.num_computed)
        if num_drafts > 0:
            num_drafts = self._cache.allocate_drafts(request, num_drafts, len(self._queue.running))
        num_drafts = max(num_drafts, 0)
        return (forced[:num_drafts], 0) if forced else ((), num_drafts)
