"""The end of a grammar's worker says whether the grammar was the cause, and which limit it has exceeded."""

import os
import signal

import pytest

from engine.grammars import refusals
from engine.grammars.refusals import Refusal, Refusals, refusal_of_exit
from engine.grammars.worker import STEP_CPU_S
from engine.settings.config import Config

CONFIG = Config(grammar_compile_timeout_s=7.0, grammar_memory_mb=300)


@pytest.mark.parametrize(
    ("number", "is_compiled", "text", "limit"),
    [
        (signal.SIGPROF, False, "to compile (GRAMMAR_COMPILE_TIMEOUT)", 7.0),
        (signal.SIGPROF, True, "of CPU time for a token", STEP_CPU_S),
        (signal.SIGABRT, False, "MiB of memory (GRAMMAR_MEMORY)", 300),
        (signal.SIGSEGV, True, "crashes the grammar compiler", None),
    ],
)
def test_a_signal_that_a_grammar_can_cause_is_a_refusal(number, is_compiled, text, limit):
    status = int(number)  # of a process that a signal has ended, as waitpid returns it
    refusal = refusal_of_exit(status, is_compiled, CONFIG)
    assert text in refusal.text and refusal.limit == limit
    assert refusal.error("guided_json").code == 400


@pytest.mark.parametrize("status", [int(signal.SIGKILL), int(signal.SIGTERM), 1 << 8])
def test_a_worker_that_ended_for_another_reason_refuses_nothing(status):
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 1
    assert refusal_of_exit(status, False, CONFIG) is None


def test_only_the_latest_refusals_are_remembered(monkeypatch):
    monkeypatch.setattr(refusals, "MAX_REFUSALS", 2)
    found = Refusals()
    for source in "abc":
        found.add(source, Refusal(source))
    assert [found.find(source) for source in "abc"] == [None, Refusal("b"), Refusal("c")]
