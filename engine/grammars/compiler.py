"""Compilation of grammars: their order, their time limits, and the compile budget of each owner."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from os import WIFSIGNALED, WTERMSIG

from engine.errors import EngineUnavailable, Overloaded, RequestError, escape_braces
from engine.grammars.compile_budget import CompileBudget
from engine.grammars.matcher import CompiledGrammar
from engine.grammars.processes import Exit
from engine.grammars.refusals import Refusal, Refusals, refusal_of_exit
from engine.grammars.worker import LOWEST_PRIORITY
from engine.grammars.workers import HUNG_S, Workers
from engine.settings.config import Config
from engine.text.compile_errors import brief

log = logging.getLogger(__name__)

# Most grammars are compiled in milliseconds. What takes longer begins again behind others, at the lowest priority.
SHORT_CPU_S = 0.05
NUM_SHORT, NUM_LONG = 2, 1  # compiled at the same time
SHORT_NICENESS, LONG_NICENESS = 5, LOWEST_PRIORITY
LONG_WALL_FACTOR = 10  # of the limit of CPU time, beside other work
MAX_LOSSES = 4  # workers in a row that ended for another reason than their grammar
MAX_IDLE = 32  # workers that no answer needs
IDLE_S, LOOK_EVERY_S = 60.0, 10.0  # until one of them ends, and how often that is looked for


class GrammarCompiler:
    """Gives each grammar a worker process that compiles it. `on_compiled` is called when answers can follow the
    grammar."""

    def __init__(self, workers: Workers, config: Config, on_compiled: Callable[[CompiledGrammar], None]):
        self._workers, self._config, self._on_compiled = workers, config, on_compiled
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()  # by their text, least recently used first
        self._short: deque[CompiledGrammar] = deque()  # wait to be compiled
        self._long: deque[CompiledGrammar] = deque()
        self._budget = CompileBudget(config.grammar_compile_budget_s)
        self._refusals = Refusals()
        self._look_at = math.inf

    @property
    def num_waiting(self) -> int:
        return len(self._short) + len(self._long)

    @property
    def grammars(self) -> list[CompiledGrammar]:
        return list(self._grammars.values())

    def find(self, source: str, owner: str) -> CompiledGrammar | Refusal:
        """Return the grammar of this text, which may still have to be compiled."""
        if refusal := self._refusals.find(source):
            return refusal
        if source not in self._grammars:
            grammar = self._grammars[source] = CompiledGrammar(source, owner)
            self._short.append(grammar)
        self._grammars.move_to_end(source)
        return self._grammars[source]

    def start_next(self) -> None:
        """Begin what may be compiled now, and end workers of grammars that were not needed for long."""
        compiling = [each for each in self._grammars.values() if each.process and not each.is_compiled]
        num_long = sum(each.is_long for each in compiling)
        self._start(self._short, NUM_SHORT - len(compiling) + num_long)
        self._start(self._long, NUM_LONG - num_long)
        self._end_idle(time.monotonic())

    @property
    def has_idle(self) -> bool:
        """Return whether idle workers should be checked, which may end those that were not needed for long."""
        return time.monotonic() > self._look_at

    def _end_idle(self, now: float) -> None:
        idle = []
        for grammar in self._grammars.values():
            if grammar.is_wanted or not grammar.is_compiled:
                grammar.used_at = now
            else:
                idle.append(grammar)
        memory_bytes = sum(each.memory_bytes for each in idle)
        for index, grammar in enumerate(idle):
            is_too_much = len(idle) - index > MAX_IDLE or memory_bytes > self._config.grammar_memory_mb << 20
            if is_too_much or now - grammar.used_at > IDLE_S:
                memory_bytes -= grammar.memory_bytes
                self.forget(grammar)
        self._look_at = now + LOOK_EVERY_S if self._grammars else math.inf

    def forget(self, grammar: CompiledGrammar) -> None:
        """End its worker, if it has one."""
        self._workers.stop(grammar)
        if self._grammars.get(grammar.source) is grammar:
            del self._grammars[grammar.source]

    def cancel(self, grammar: CompiledGrammar) -> None:
        """Record that an answer is cancelled. A grammar without answers is not compiled to the end."""
        if not grammar.is_compiled and not grammar.is_wanted:
            self.forget(grammar)

    def refuse(self, grammar: CompiledGrammar, error_of: Callable[[str], RequestError]) -> None:
        """End all its answers with the error that `error_of` makes for a field."""
        self.forget(grammar)
        openings, grammar.openings = grammar.openings, []
        for matcher in grammar.matchers:
            matcher.fail(error_of(matcher.field))
        for opening in openings:
            opening.begun.set_exception(error_of(opening.matchers[0].field))

    def wall_limit_s(self, grammar: CompiledGrammar) -> float:
        """Return how long its worker may be without a reply."""
        is_long = grammar.is_long and not grammar.is_compiled
        return LONG_WALL_FACTOR * self._config.grammar_compile_timeout_s if is_long else HUNG_S

    def exited(self, grammar: CompiledGrammar, exit_: Exit | None) -> None:
        """Handle the exit of a worker: refuse the grammar if it was the cause, otherwise start another worker."""
        if exit_ and not grammar.is_compiled:
            self._budget.charge(grammar.owner, exit_.cpu_s)
        status = exit_.status if exit_ else 0
        is_out_of_time = WIFSIGNALED(status) and WTERMSIG(status) == signal.SIGPROF
        if is_out_of_time and not grammar.is_compiled and not grammar.is_long:
            self._compile_as_long(grammar)
        elif grammar.is_overdue and not grammar.is_compiled:
            limit_s = self.wall_limit_s(grammar)
            text = "the grammar could not be compiled within {limit} s beside other work; retry later"
            self.refuse(grammar, lambda _: Overloaded(text, limit=limit_s))
        elif refusal := refusal_of_exit(status, grammar.is_compiled, self._config):
            log.warning("a grammar of %d characters is refused: %s", len(grammar.source), refusal.error(""))
            self._refusals.add(grammar.source, refusal)
            self.refuse(grammar, refusal.error)
        else:
            self._begin_again(grammar)

    def close(self) -> None:
        """Forget all grammars; their workers have ended."""
        for grammar in list(self._grammars.values()):
            self.refuse(grammar, lambda _: RequestError("the grammars of this engine were closed"))

    def _compile_as_long(self, grammar: CompiledGrammar) -> None:
        if wait_s := self._budget.wait_s(grammar.owner):
            self.refuse(grammar, lambda _: _over_budget(self._budget.seconds_per_minute, wait_s))
        else:
            grammar.is_long = True
            self._long.append(grammar)

    def _begin_again(self, grammar: CompiledGrammar) -> None:
        grammar.num_losses += 1
        if grammar.num_losses > MAX_LOSSES:
            text = "The `{field}` could not be compiled and followed: its worker was ended {value} times; retry later"
            self.refuse(grammar, lambda field: EngineUnavailable(text, field=field, value=grammar.num_losses))
            return
        log.warning("a grammar worker has ended, its %d answers go on in another one", len(grammar.matchers))
        grammar.lost_worker()
        grammar.is_overdue = False
        if grammar.is_wanted:
            (self._long if grammar.is_long else self._short).append(grammar)
        else:
            self.forget(grammar)

    def _start(self, waiting: deque[CompiledGrammar], count: int) -> None:
        while waiting and count > 0:
            grammar = waiting.popleft()
            if self._grammars.get(grammar.source) is not grammar:  # cancelled or refused meanwhile
                continue
            count -= 1
            limit_s = self._config.grammar_compile_timeout_s if grammar.is_long else SHORT_CPU_S
            niceness = LONG_NICENESS if grammar.is_long else SHORT_NICENESS
            self._workers.start(grammar)
            assert grammar.process
            on_reply = partial(self._compiled, grammar)
            grammar.process.call("compile", grammar.source, limit_s, niceness, on_reply=on_reply)

    def _compiled(self, grammar: CompiledGrammar, reply: tuple[str, int]) -> None:
        assert grammar.process
        error, memory_bytes = reply
        cpu_s, grammar.process.cpu_s = grammar.process.cpu_s, 0.0
        self._budget.charge(grammar.owner, cpu_s)
        if error:
            refusal = Refusal(f"The `{{field}}` cannot be compiled: {escape_braces(brief(error, grammar.source))}")
            self._refusals.add(grammar.source, refusal)
            self.refuse(grammar, refusal.error)
            return
        log.info("a grammar of %d characters was compiled in %.0f ms", len(grammar.source), 1e3 * cpu_s)
        grammar.is_compiled, grammar.memory_bytes = True, memory_bytes
        self._on_compiled(grammar)


def _over_budget(limit_s: float, wait_s: int) -> Overloaded:
    text = "the API key has used more than {limit} s of a minute to compile grammars (GRAMMAR_COMPILE_BUDGET)"
    error = Overloaded(text, limit=limit_s)
    error.retry_after_s = wait_s
    return error
