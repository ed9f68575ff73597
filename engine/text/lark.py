"""Conversion of regular expressions, EBNF and texts to Lark, the grammar language of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest, escape_braces

A_RULE_OF_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def lark_of_regex(field: str, pattern: str) -> str:
    """Return the Lark grammar of a pattern. `\\d` and `\\w` match ASCII only, as in JSON schemas. Raises InvalidRequest
    for the request field `field`."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest("The `{field}` ends with a backslash that escapes nothing", field=field)
    return f"start: /{regex_to_lark(pattern, 'dw')}/"


def lark_of_grammar(field: str, grammar: str) -> str:
    """Return the Lark grammar of a grammar in Lark or in llama.cpp's GBNF. Raises InvalidRequest for `field`."""
    if not A_RULE_OF_EBNF.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # llguidance raises several types
        raise InvalidRequest(f"The `{{field}}` cannot be read: {escape_braces(str(error))}", field=field) from None


def one_of(texts: Sequence[str]) -> str:
    """Return a Lark expression that matches one of these texts."""
    expression = " | ".join(map(json.dumps, texts))
    return f"({expression})" if len(texts) > 1 else expression


def pattern_of(texts: Sequence[str]) -> str:
    """Return a regular expression that matches one of these texts, without slashes."""
    return f"({'|'.join(map(_escaped, texts))})"


def _escaped(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
