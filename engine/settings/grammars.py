"""Settings: what the grammars of structured output may cost."""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings.setting import setting


@dataclass(frozen=True)
class GrammarSettings:
    grammar_compile_timeout_s: float = setting(
        5.0,
        "GRAMMAR_COMPILE_TIMEOUT",
        "CPU seconds to compile the grammar of a request; beyond, it is refused",
        minimum=0.1,
    )
    grammar_memory_mb: int = setting(
        512, "GRAMMAR_MEMORY", "MiB to compile and follow one grammar; beyond, its requests are refused", minimum=64
    )
    grammar_compile_budget_s: float = setting(
        30.0,
        "GRAMMAR_COMPILE_BUDGET",
        "CPU seconds a minute to compile grammars of one API key; beyond, only those that take a moment are compiled",
        minimum=1,
    )
