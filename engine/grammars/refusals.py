"""Grammars that have exceeded a limit, so that the next request with the same is refused at once."""

from __future__ import annotations

import hashlib
import os
import signal
from collections import OrderedDict
from typing import NamedTuple

from engine.errors import InvalidRequest
from engine.grammars.worker import STEP_CPU_S
from engine.settings.config import Config

MAX_REFUSALS = 10_000
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class Refusal(NamedTuple):
    """The template of an error, without the field that asks for the grammar."""

    text: str
    limit: float | None = None

    def error(self, field: str) -> InvalidRequest:
        return InvalidRequest(self.text, field=field, limit=self.limit)


class Refusals:
    """Refused grammars by hash, at most MAX_REFUSALS."""

    def __init__(self) -> None:
        self._by_hash: OrderedDict[bytes, Refusal] = OrderedDict()

    def add(self, source: str, refusal: Refusal) -> None:
        self._by_hash[_hash(source)] = refusal
        if len(self._by_hash) > MAX_REFUSALS:
            self._by_hash.popitem(last=False)

    def find(self, source: str) -> Refusal | None:
        return self._by_hash.get(_hash(source))


def refusal_of_exit(status: int, is_compiled: bool, config: Config) -> Refusal | None:
    """Return the refusal of a grammar whose worker has ended with the waitpid status `status`; None if the grammar was
    not the cause."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF and is_compiled:
        return Refusal("The `{field}` takes more than {limit} s of CPU time for a token", STEP_CPU_S)
    if number == signal.SIGPROF:
        text = "The `{field}` takes more than {limit} s of CPU time to compile (GRAMMAR_COMPILE_TIMEOUT)"
        return Refusal(text, config.grammar_compile_timeout_s)
    if number == signal.SIGABRT:  # the library ends the process when it gets no memory
        return Refusal("The `{field}` needs more than {limit} MiB of memory (GRAMMAR_MEMORY)", config.grammar_memory_mb)
    if number in CRASHES:
        return Refusal("The `{field}` crashes the grammar compiler")
    return None


def _hash(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()
