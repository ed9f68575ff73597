"""Prometheus text format of the model's metrics.

All metrics are counted behind the gateway, so that every worker returns the same values; the gateway has no counters of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Family, kind, description, labels, value and suffix: engine.serving.metrics.Sample as the wire has it
Sample = tuple[str, str, str, Sequence[tuple[str, str]], float, str]


def as_text(samples: Iterable[Sample]) -> str:
    """Return the metrics page.

    `samples` are those of engine/serving/metrics.py, in which the samples of a family are adjacent.
    """
    lines, last = [], None
    for family, kind, doc, labels, value, suffix in samples:
        if family != last:
            lines += [f"# HELP {family} {doc}", f"# TYPE {family} {kind}"]
            last = family
        named = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
        lines.append(f"{family}{suffix}{{{named}}} {value}" if named else f"{family}{suffix} {value}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
