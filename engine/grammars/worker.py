"""A grammar worker: a process that compiles one grammar and computes the masks of all answers that follow it.

A grammar comes from a client, and the library that compiles it may crash or need any amount of time and memory. So a
worker has limits, which end the process; nothing else ends with it.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from engine.grammars.unique_names import KEYWORD, NameReader, TokensOfNames, forbid_repeated
from engine.grammars.vocabulary import Vocabulary

STACK_BYTES = 256 << 20  # the library descends into rules: 6 KB a level, some 10,000 levels fit into a request's limit
# Found by all answers of a grammar together: about 0.4 s to compile and 15 ms a token at worst. A long grammar may have
# a state for each of its bytes: a choice of many texts has.
MIN_LEXER_STATES = 50_000
QUIET = 0
MAX_ERROR_LEN = 10_000
STEP_CPU_S = 0.25  # for one token of one answer; some 15 ms are usual at worst
MIN_ROWS_FOR_THREADS = 4
ALL_ALLOWED = 0xFFFFFFFF
LOWEST_PRIORITY = 19
NO_NAME_LEFT = "a property must follow, but every name that it may have is taken"

Mask = bytes  # u32 [ceil(V / 32)]; bit i of word w: token 32 w + i is allowed
Followed = tuple[str, bool, Sequence[int], Mask]  # error, whether the grammar is complete, forced tokens, next mask


class Worker:
    """Answers the messages of the engine, one after another. `rows` [R, ceil(V / 32)] is shared with the engine."""

    def __init__(self, vocabulary: Vocabulary, connection: Connection, rows: np.ndarray):
        self._vocabulary = vocabulary
        self._connection = connection
        self._rows = rows
        self._compiled: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}
        self._stop_ids: dict[int, Sequence[int]] = {}
        self._cpu_limit_s = 0.0  # of the compilation
        self._grammar = ""
        self._tokens_of_names: TokensOfNames | None = None  # where no object may have a property twice
        self._readers: dict[int, NameReader] = {}

    def run(self) -> None:
        """Serve until the engine closes the connection."""
        calls: dict[str, Callable[..., Any]] = {
            "compile": self.compile,
            "open": self.open,
            "advance": self.advance,
            "masks": self.masks,
            "lower_priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY),
        }
        while True:
            try:
                kind, closed, *arguments = msgpack.unpackb(self._connection.recv_bytes(), use_list=False)
            except EOFError:
                return
            for matcher_id in closed:
                del self._matchers[matcher_id], self._stop_ids[matcher_id]
                self._readers.pop(matcher_id, None)
            began = time.process_time()
            result = calls[kind](*arguments)
            self._connection.send_bytes(msgpack.packb((result, time.process_time() - began)))

    def compile(self, grammar: str, cpu_limit_s: float, niceness: int) -> tuple[str, int]:
        """Return why the grammar is refused, or an empty text; and the memory that this process has of its own."""
        self._cpu_limit_s = cpu_limit_s
        with _cpu_limit(cpu_limit_s):
            error = _in_thread(lambda: self._compile(grammar), niceness)
        return error, resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()

    def open(self, answers: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> list[Followed | None]:
        """Begin answers, each with an id, the ids that may end it and the tokens that it has already; None for tokens
        that the grammar does not allow."""
        assert self._compiled
        with _cpu_limit(self._cpu_limit_s):
            followed: list[Followed | None] = []
            for matcher_id, stop_ids, token_ids in answers:
                self._matchers[matcher_id] = self._compiled.deep_copy()
                self._stop_ids[matcher_id] = stop_ids
                if self._tokens_of_names:
                    self._readers[matcher_id] = NameReader(self._grammar)
                is_allowed = not token_ids or self._num_allowed(matcher_id, token_ids) == len(token_ids)
                followed.append(self._follow(matcher_id, token_ids, True) if is_allowed else None)
            return followed

    def advance(self, answers: Sequence[tuple[int, Sequence[int]]], with_mask: bool) -> list[Followed]:
        """Append tokens to answers."""
        with _cpu_limit(STEP_CPU_S * len(answers)):
            return [self._follow(*each, with_mask) for each in answers]

    def masks(self, answers: Sequence[tuple[int, int, Sequence[int]]], num_rows: int) -> list[str]:
        """Write the masks of answers, each with its first row and its drafts, after each of which there is a mask too;
        behind a draft that is not allowed everything is. Return the error of each, or an empty text."""
        with _cpu_limit(STEP_CPU_S * len(answers)):
            answers = [(each, row, self._cut(each, row, drafts) if drafts else ()) for each, row, drafts in answers]
            where = (self._rows.ctypes.data, 4 * self._rows.shape[1], num_rows)
            drafted = [(self._matchers[each], row, list(drafts)) for each, row, drafts in answers if drafts]
            plain = [(self._matchers[each], row) for each, row, drafts in answers if not drafts]
            if len(plain) < MIN_ROWS_FOR_THREADS:
                for matcher, row in plain:
                    matcher.unsafe_compute_mask_ptr(self._rows[row].ctypes.data, where[1])
            else:
                self._threads.unsafe_compute_mask_ptr(plain, *where)
            if drafted:
                self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
            errors = []
            for matcher_id, row, drafts in answers:
                rows = self._rows[row : row + 1 + len(drafts)]
                self._let_end(matcher_id, rows)
                errors.append(_error(self._matchers[matcher_id]) or self._forbid_repeated(matcher_id, rows, drafts))
            return errors

    def _cut(self, matcher_id: int, row: int, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts that may follow, and let everything follow behind the others."""
        count = self._num_allowed(matcher_id, drafts)
        self._rows[row + 1 + count : row + 1 + len(drafts)] = ALL_ALLOWED
        return drafts[:count]

    def _num_allowed(self, matcher_id: int, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, from the first on."""
        count = self._matchers[matcher_id].validate_tokens(list(token_ids))
        return self._num_unrepeated(matcher_id, token_ids[:count])

    def _num_unrepeated(self, matcher_id: int, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, give no object a property twice."""
        if matcher_id not in self._readers:
            return len(token_ids)
        reader, tokens = self._readers[matcher_id].copy(), self._vocabulary.tokens
        return next((i for i, each in enumerate(token_ids) if reader.read(tokens[each])), len(token_ids))

    def _forbid_repeated(self, matcher_id: int, rows: np.ndarray, drafts: Sequence[int]) -> str:
        """Take tokens out of the masks after each of the drafts. Return an error if the first has none left."""
        if not self._tokens_of_names:
            return ""
        matcher, reader = self._matchers[matcher_id], self._readers[matcher_id]
        forbid_repeated(matcher, reader, self._tokens_of_names, rows[0])
        for token_id, row in zip(drafts, rows[1:], strict=True):
            matcher, reader = matcher.deep_copy(), reader.copy()
            matcher.consume_token(token_id)
            reader.read(self._vocabulary.tokens[token_id])
            forbid_repeated(matcher, reader, self._tokens_of_names, row)
        return "" if rows[0].any() else NO_NAME_LEFT

    def _follow(self, matcher_id: int, token_ids: Sequence[int], with_mask: bool) -> Followed:
        matcher = self._matchers[matcher_id]
        if token_ids:
            matcher.consume_tokens(list(token_ids))
        if matcher_id in self._readers:
            self._readers[matcher_id].read(b"".join(self._vocabulary.tokens[each] for each in token_ids))
        mask = b""
        if with_mask and not matcher.is_error():
            row = np.zeros((1, self._rows.shape[1]), np.uint32)
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._let_end(matcher_id, row)
            if error := self._forbid_repeated(matcher_id, row, ()):
                return error, False, (), b""
            mask = row.tobytes()
        if matcher.is_error():
            return _error(matcher), False, (), b""
        is_complete = matcher.is_stopped()
        forced = () if is_complete else matcher.compute_ff_tokens()
        return "", is_complete, forced[: self._num_unrepeated(matcher_id, forced)], mask

    def _compile(self, grammar: str) -> str:
        max_states = max(MIN_LEXER_STATES, len(grammar.encode()))
        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        compiled = LLMatcher(self._vocabulary.of_library, grammar, log_level=QUIET, limits=limits)
        if not compiled.is_error():
            compiled.deep_copy().compute_bitmask()  # the first mask finds out what is left
            compiled.compute_bitmask()
        self._compiled, self._grammar = compiled, grammar
        if KEYWORD in grammar:
            self._tokens_of_names = TokensOfNames(self._vocabulary.tokens)
        return _error(compiled)

    def _let_end(self, matcher_id: int, rows: np.ndarray) -> None:
        """Allow the stop ids of the answer, instead of the usual ones, where the grammar may end."""
        stop_ids, vocabulary = self._stop_ids[matcher_id], self._vocabulary
        if not vocabulary.eos_ids.symmetric_difference(stop_ids):
            return
        eos = vocabulary.eos_token_id
        may_end = (rows[:, eos // 32] >> (eos % 32) & 1).astype(bool)
        for token_id in vocabulary.eos_ids:
            rows[may_end, token_id // 32] &= ~np.uint32(1 << token_id % 32)
        for token_id in stop_ids:
            rows[may_end, token_id // 32] |= np.uint32(1 << token_id % 32)

    @cached_property
    def _threads(self) -> LLExecutor:
        return LLExecutor()


def limit_memory(num_bytes: int) -> None:
    """Let this process have so many more bytes, and the stack of a compilation."""
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + STACK_BYTES + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """End the process by SIGPROF when the block takes more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _in_thread(work: Callable[[], str], niceness: int) -> str:
    """Run `work` on a large stack and at a low priority, which a thread can have of its own."""
    results: list[str] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        results.append(work())

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    threading.stack_size(0)
    if not results:  # Python has no memory left; if it is the library, that ends the process in the same way
        os.abort()
    return results[0]


def _error(matcher: LLMatcher) -> str:
    return (matcher.get_error() or "unknown error")[:MAX_ERROR_LEN] if matcher.is_error() else ""
