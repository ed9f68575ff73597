"""Shortens the errors of llguidance for clients. In a grammar that the gateway has generated from tool schemas, the
error names the schema instead of the rule."""

from __future__ import annotations

import json
import re

MAX_LEN = 300
NO_END = "no text has this form"
# Beginning of an error in a Lark grammar: `at 6(22): failed to compile JSON schema: Invalid type: objekt`
PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
LABEL = re.compile(r'// ("(?:[^"\\]|\\.)*")$')  # comment at the end of a rule
SOURCE = re.compile(r"\n\s*\d+ \| ")  # the quoted lines of the grammar


def brief(error: str, grammar: str) -> str:
    """Return the reason without internal state of llguidance, with the label of the failing rule, if it has one."""
    reason = error.partition("\n<")[0].strip()
    if reason.startswith("NoExtension"):
        return NO_END
    if (place := PLACE.match(reason)) and (label := _label(grammar, int(place[1]))):
        reason = f"{label}: {SOURCE.split(reason[place.end() :])[0]}"
    return reason[:MAX_LEN].strip()


def _label(grammar: str, line: int) -> str:
    grammars = [each["lark_grammar"] for each in json.loads(grammar)["grammars"] if "lark_grammar" in each]
    lines = grammars[-1].split("\n") if grammars else []
    found = LABEL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return json.loads(found[1]) if found else ""
