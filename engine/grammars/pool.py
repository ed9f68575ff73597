"""Grammars of one engine: compiles them and computes masks in worker processes.

No grammar can harm another request. Its worker has limits of CPU time and memory; a grammar that exceeds them, or
crashes, is refused and remembered. A worker that ends for another reason is replaced, and its answers go on. A step
waits for masks for `MAX_WAIT_S` at most: an answer whose mask is late is left out of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from engine.core.grammar import MaskRow
from engine.core.types import Grammar, Request
from engine.errors import Cancelled
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.fork_server import Setup
from engine.grammars.matcher import NO_MASK, NUM_LATE_STEPS, CompiledGrammar, Matcher, Opening
from engine.grammars.processes import SharedRows, WorkerProcess
from engine.grammars.refusals import Refusal
from engine.grammars.worker import ALL_ALLOWED, Followed
from engine.grammars.workers import Workers
from engine.settings.config import Config
from engine.text.allowed_tokens import FIELD, AllowedTokens, allowed_tokens, answer_mismatch
from engine.text.tokenizer import Tokenizer

MAX_WAIT_S = 0.05  # of a step for its workers
ROWS_OF_ANSWER = 18  # masks of one step: after the last token, and after each draft
Batch = list[tuple[Matcher, int, list[int]]]  # answers of one grammar, each with its first row and its drafts


class GrammarPool:
    """`engine.core.grammar.Grammars` of one model, for one thread. `vocab_size` is the model's, at least the
    tokenizer's; `load_tokenizer` is pickled. The processes start with the first call that needs them."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, config: Config | None = None):
        config = config or Config()
        self._vocab_size = vocab_size
        self._rows = SharedRows(2 * ROWS_OF_ANSWER * config.batch_size, vocab_size)
        setup = Setup(load_tokenizer, vocab_size, config.grammar_memory_mb << 20)
        self._workers = Workers(setup, self._rows, lambda *exited: self._compiler.exited(*exited))
        self._compiler = GrammarCompiler(self._workers, config, self._open)
        self._grown: list[Matcher] = []  # answers whose workers have not been sent of their last tokens
        self._late_rows: dict[WorkerProcess, int] = {}  # the end of the rows that a late worker may still write

    @property
    def is_busy(self) -> bool:
        """Return whether `poll` has something to do."""
        return self._compiler.num_waiting > 0 or self._workers.is_busy or self._compiler.has_idle

    def load(self) -> None:
        """Start the processes."""
        self._workers.load()

    def wait_until_loaded(self) -> None:
        """Raise SetupError if the vocabulary cannot be loaded."""
        self._workers.wait_until_loaded()

    def begin(self, request: Request) -> Future[Sequence[Grammar]]:
        """See `engine.core.grammar.Grammars`."""
        field, text = request.sampling.structured_output
        if field == FIELD:
            return allowed_tokens(request, self._vocab_size)
        grammar = self._compiler.find(text, request.owner)
        if isinstance(grammar, Refusal):
            refused: Future[Sequence[Grammar]] = Future()
            refused.set_exception(grammar.error(field))
            return refused
        opening = Opening([Matcher(grammar, each, self) for each in (request, *request.forks)])
        grammar.openings.append(opening)
        if grammar.is_compiled:
            self._open(grammar)
        self._compiler.start_next()
        return opening.begun

    def cancel(self, begun: Future[Sequence[Grammar]]) -> None:
        """Forget a request that waits for its grammar."""
        for grammar in self._compiler.grammars:
            for opening in [each for each in grammar.openings if each.begun is begun]:
                grammar.openings.remove(opening)
                begun.set_exception(Cancelled("the request was cancelled"))
                opening.matchers = ()
                self._compiler.cancel(grammar)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the workers have done, or wait for it."""
        self._workers.receive(timeout_s)
        self._workers.end_hung(self._compiler.wall_limit_s)
        self._compiler.start_next()

    def advance_workers(self) -> None:
        """Tell the workers of new tokens, and wait for what follows from them."""
        if not self._grown:
            return
        grown, self._grown = self._grown, []
        sent = {}
        for grammar, matchers in _by_grammar(each for each in grown if each.is_ready).items():
            if grammar.is_slow:
                self._catch_up(grammar, matchers)
            elif grammar.process:
                unsent = [(each.matcher_id, each.unsent()) for each in matchers]
                grammar.process.call("advance", unsent, False, on_reply=partial(self._advanced, grammar, matchers))
                sent[grammar] = matchers
        for grammar in self._wait(list(sent)):
            self._mark_late(grammar, sent[grammar])

    def note_growth(self, matcher: Matcher) -> None:
        """Tell its worker with the next call of `advance_workers`."""
        matcher.mask = NO_MASK
        self._grown.append(matcher)

    def masks(self, choices: Sequence[MaskRow]) -> np.ndarray:
        """See `engine.core.executor.Step.mask`."""
        num_rows = sum(1 + len(drafts) for _, drafts in choices)
        first = max(self._late_rows_ends(), default=0)
        bits = self._rows.take(num_rows, first)
        if is_full := bits is None:  # late workers have them
            bits = np.empty((num_rows, self._rows.num_words), np.uint32)
        asked: dict[CompiledGrammar, Batch] = defaultdict(list)
        row = 0
        for request, drafts in choices:
            matcher = request.grammar
            if isinstance(matcher, AllowedTokens):
                bits[row : row + 1 + len(drafts)] = matcher.row
            elif not isinstance(matcher, Matcher):
                bits[row : row + 1 + len(drafts)] = ALL_ALLOWED
            elif matcher.mask and not drafts:
                bits[row] = np.frombuffer(matcher.mask, np.uint32)
            elif matcher.is_ready and not matcher.failure and not matcher.grammar.is_slow and not is_full:
                asked[matcher.grammar].append((matcher, first + row, list(drafts)))
            else:
                bits[row : row + 1 + len(drafts)] = 0
                self._leave_out(matcher)
            row += 1 + len(drafts)
        self._ask(asked, first + num_rows)
        return bits

    def close(self) -> None:
        """End all processes. They start again when they are needed."""
        self._workers.close()
        self._compiler.close()

    def _ask(self, asked: dict[CompiledGrammar, Batch], end_row: int) -> None:
        for grammar, batch in asked.items():
            if grammar.process:
                answers = [(matcher.matcher_id, row, drafts) for matcher, row, drafts in batch]
                matchers = [matcher for matcher, *_ in batch]
                grammar.num_rows += sum(1 + len(drafts) for *_, drafts in batch)
                grammar.process.call("masks", answers, end_row, on_reply=partial(self._masked, grammar, matchers))
        for grammar in self._wait(list(asked)):
            if grammar.process:
                self._late_rows[grammar.process] = end_row
            self._mark_late(grammar, [matcher for matcher, *_ in asked[grammar]])
            for matcher, *_ in asked[grammar]:
                matcher.is_mask_missing = True

    def _late_rows_ends(self) -> Iterable[int]:
        self._late_rows = {process: end for process, end in self._late_rows.items() if process.num_pending}
        return self._late_rows.values()

    def _leave_out(self, matcher: Matcher) -> None:
        matcher.is_mask_missing = True
        if matcher.is_ready and not matcher.failure:
            self._catch_up(matcher.grammar, [matcher])

    def _wait(self, grammars: Sequence[CompiledGrammar]) -> list[CompiledGrammar]:
        """Wait for the replies of these, but not for long. Return those that are late."""
        deadline = time.monotonic() + MAX_WAIT_S
        while late := [each for each in grammars if each.process is None or each.process.num_pending]:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not any(each.process for each in late):
                return late
            self._workers.receive(left_s)
        return []

    def _mark_late(self, grammar: CompiledGrammar, matchers: Sequence[Matcher]) -> None:
        grammar.num_late_steps = NUM_LATE_STEPS
        for matcher in matchers:
            matcher.is_ready = matcher.failure is not None

    def _catch_up(self, grammar: CompiledGrammar, matchers: Sequence[Matcher]) -> None:
        """Get the next masks of answers that are left out of steps until these are there."""
        grammar.num_late_steps = max(0, grammar.num_late_steps - 1)
        for matcher in matchers:
            matcher.is_ready = False
        if grammar.process:
            if grammar.is_always_slow and not grammar.has_low_priority:
                grammar.has_low_priority = True
                grammar.process.call("lower_priority", on_reply=lambda _: None)
            unsent = [(each.matcher_id, each.unsent()) for each in matchers]
            grammar.process.call("advance", unsent, True, on_reply=partial(self._caught_up, grammar, matchers))

    def _open(self, grammar: CompiledGrammar) -> None:
        """Tell its worker of answers that begin."""
        assert grammar.process
        for opening in grammar.openings:
            if not opening.is_sent:
                opening.is_sent = True
                answers = [each.opened_by(grammar.process) for each in opening.matchers]
                grammar.process.call("open", answers, on_reply=partial(self._opened, grammar, opening))

    # Replies

    def _opened(self, grammar: CompiledGrammar, opening: Opening, followed: Sequence[Followed | None]) -> None:
        if opening not in grammar.openings:  # cancelled
            return
        grammar.openings.remove(opening)
        if any(each is None for each in followed):
            error = answer_mismatch(opening.matchers[0].field)
            for matcher in opening.matchers:
                matcher.fail(error)
            opening.begun.set_exception(error)
            return
        self._caught_up(grammar, opening.matchers, followed)
        opening.begun.set_result(opening.matchers)

    def _advanced(self, grammar: CompiledGrammar, matchers: Sequence[Matcher], followed: Sequence[Followed]) -> None:
        for matcher, each in zip(matchers, followed, strict=True):
            matcher.take(each)
        self._go_on(grammar, matchers)

    def _masked(self, grammar: CompiledGrammar, matchers: Sequence[Matcher], errors: Sequence[str]) -> None:
        for matcher, error in zip(matchers, errors, strict=True):
            matcher.note_error(error)
        self._go_on(grammar, matchers)

    def _go_on(self, grammar: CompiledGrammar, matchers: Sequence[Matcher]) -> None:
        """Continue after a late reply."""
        grammar.num_losses = 0
        if late := [each for each in matchers if not each.is_ready]:
            self._catch_up(grammar, late)

    def _caught_up(
        self, grammar: CompiledGrammar, matchers: Sequence[Matcher], followed: Sequence[Followed | None]
    ) -> None:
        for matcher, each in zip(matchers, followed, strict=True):
            assert each
            matcher.take(each)
            matcher.is_ready = True
        if behind := [each for each in matchers if each.is_behind]:
            self._catch_up(grammar, behind)


def _by_grammar(matchers: Iterable[Matcher]) -> dict[CompiledGrammar, list[Matcher]]:
    grouped: dict[CompiledGrammar, list[Matcher]] = defaultdict(list)
    for matcher in matchers:
        grouped[matcher.grammar].append(matcher)
    return grouped
