"""Regular expressions, grammars and texts in the language of the library's grammars, Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest, literally

A_RULE_OF_EBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def lark_of_regex(field: str, pattern: str) -> str:
    """Return a grammar of the pattern. Digits and letters of `\\d` and `\\w` are those of ASCII, as in JSON schemas."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest("The `{field}` ends with a backslash that escapes nothing", field=field)
    return f"start: /{regex_to_lark(pattern, 'dw')}/"


def lark_of_grammar(field: str, grammar: str) -> str:
    """Return Lark as it is, EBNF of llama.cpp's kind translated."""
    if not A_RULE_OF_EBNF.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises all sorts
        raise InvalidRequest(f"The `{{field}}` cannot be read: {literally(str(error))}", field=field) from None


def one_of(texts: Sequence[str]) -> str:
    """Return an expression of these texts."""
    expression = " | ".join(map(json.dumps, texts))
    return f"({expression})" if len(texts) > 1 else expression


def pattern_of(texts: Sequence[str]) -> str:
    """Return a regular expression of these texts, without its slashes."""
    return f"({'|'.join(map(_escaped, texts))})"


def _escaped(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
