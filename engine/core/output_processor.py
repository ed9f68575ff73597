"""Output processor: enters the tokens of a step into its requests, and makes their updates. Independent of which
requests are scheduled."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core import prompt_outputs
from engine.core.batch_builder import Launched
from engine.core.limits import Counters
from engine.core.running_queue import RunningQueue
from engine.core.types import Logprobs, PromptOutputs, Request, Row, State, StepOutput
from engine.core.updates import FAILED, Update, append, check_grammar

RUNNING = State.RUNNING  # looked up once
# Tokens of a row and, if wanted, the log-probabilities of each
Sampled = tuple[Sequence[int], Sequence[Logprobs] | None]


class OutputProcessor:
    """Applies the outputs of steps. Publishes blocks that have become full, and finishes requests that have ended."""

    def __init__(self, queue: RunningQueue, counters: Counters):
        self._queue, self._cache, self._counters = queue, queue.cache, counters

    def process(self, launched: Sequence[Launched], output: StepOutput) -> list[Update]:
        """Return the updates of the requests of a step. The blocks of finished requests are free on return."""
        updates: list[Update] = []
        guided: list[Update] = []
        sampled, of_prompts = zip(output.token_ids, output.logprobs, strict=True), iter(output.prompt_outputs)
        block_size, has_prompt_outputs = self._cache.pool.block_size, bool(output.prompt_outputs)
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
                self._counters.num_drafted_tokens += num_sampled - 1
                self._counters.num_accepted_tokens += len(token_ids) - 1
            update: Update | None
            if token_ids and request.prompt_outputs_sent:
                update = append(request, token_ids, logprobs)
            else:
                update = _first_update(request, row, outputs, (token_ids, logprobs))
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
        self._counters.num_drafted_tokens += output.num_drafts
        return updates

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


def _first_update(request: Request, row: Row, outputs: PromptOutputs | None, sampled: Sampled) -> Update | None:
    """Return the update with the first token or the failure of a request, or None inside its prompt."""
    token_ids, logprobs = sampled
    if outputs and not prompt_outputs.collect(request, row, outputs):
        return Update(request, (), None, FAILED)
    if token_ids:
        return append(request, token_ids, logprobs)
    return Update(request, (), None, "length") if prompt_outputs.is_finished_by(request, row) else None


def _append_to_forks(forks: Sequence[Request], sampled: Sequence[Sampled]) -> list[tuple[Request, Update]]:
    """Append the first tokens of forks that still run, and return their updates."""
    pairs = zip(forks, sampled, strict=True)
    return [(fork, append(fork, *tokens)) for fork, tokens in pairs if fork.state is RUNNING]
