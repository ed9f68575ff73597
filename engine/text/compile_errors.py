"""What the library says of a grammar that it cannot compile, as a client can use it: of a grammar that the gateway has
made of schemas, the name of the schema instead of the rule."""

from __future__ import annotations

import json
import re

MAX_LEN = 300
NO_END = "no text has this form"
# How an error in a Lark grammar begins: `at 6(22): failed to compile JSON schema: Invalid type: objekt`
PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
LABEL = re.compile(r'// ("(?:[^"\\]|\\.)*")$')  # at the end of a rule
SOURCE = re.compile(r"\n\s*\d+ \| ")  # the lines around the place


def brief(error: str, form: str) -> str:
    """Return the reason without the state of the library, with the label of the rule that it is about."""
    reason = error.partition("\n<")[0].strip()
    if reason.startswith("NoExtension"):
        return NO_END
    if (place := PLACE.match(reason)) and (label := _label(form, int(place[1]))):
        reason = f"{label}: {SOURCE.split(reason[place.end() :])[0]}"
    return reason[:MAX_LEN].strip()


def _label(form: str, line: int) -> str:
    grammars = [each["lark_grammar"] for each in json.loads(form)["grammars"] if "lark_grammar" in each]
    lines = grammars[-1].split("\n") if grammars else []
    found = LABEL.search(lines[line - 1]) if 0 < line <= len(lines) else None
    return json.loads(found[1]) if found else ""
