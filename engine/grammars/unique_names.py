"""Prevents duplicate property names in JSON objects, which a grammar cannot express for names that only match a
pattern."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from llguidance import LLMatcher

from engine.wire import REASONING_BEGIN, REASONING_END

KEYWORD = "patternProperties"  # grammars with it need this
ALWAYS_THINKS, MAY_THINK = "start: thought BREAK", "thought BREAK)?"  # in a grammar (engine/text/grammars.py)
NEXT_NAME = (b',"', b', "')  # after a property, with one of the separators that grammars have
QUOTE, BACKSLASH = b'"', b"\\"


class TokensOfNames:
    """The tokens of a vocabulary that may end the name of a property."""

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = tokens
        self.closing: defaultdict[bytes, list[int]] = defaultdict(list)  # by their text up to the first quote
        self.with_name: list[int] = []  # ids of tokens that hold a whole string
        for token_id, token in enumerate(tokens):
            if QUOTE in token:
                self.closing[token[: token.index(QUOTE)]].append(token_id)
                if token.count(QUOTE) > 1:
                    self.with_name.append(token_id)
        self.with_comma = [token_id for token_id, token in enumerate(tokens) if b"," in token]
        # Other spellings of characters that have one in any case
        self.escapes = [token_id for token_id, token in enumerate(tokens) if BACKSLASH + b"u" in token]
        self.rest_of_escapes = [token_id for token_id, token in enumerate(tokens) if token.startswith(b"u")]

    @cached_property
    def ids(self) -> dict[bytes, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


@dataclass
class OpenObject:
    names: set[bytes] = field(default_factory=set)
    expects_name: bool = True


class NameReader:
    """Reads the JSON of one answer as it is written, and knows the names of the objects that are open."""

    def __init__(self, grammar: str = ""):
        self.name: bytes | None = None  # the beginning of the name that is being written
        self.is_escaping = False
        self._open: list[OpenObject | None] = []  # None: an array
        self._is_in_text = False
        is_thought = ALWAYS_THINKS in grammar
        self._thought = REASONING_BEGIN.encode() if is_thought else b"" if MAY_THINK in grammar else None

    @property
    def names(self) -> set[bytes]:
        """Return those of the innermost object."""
        innermost = self._open[-1] if self._open else None
        return innermost.names if innermost else set()

    def copy(self) -> NameReader:
        other = NameReader()
        other.__dict__ |= self.__dict__
        other._open = [each and OpenObject(set(each.names), each.expects_name) for each in self._open]
        return other

    def asks_name(self, text: bytes) -> bool:
        """Return whether after this text the innermost object must have one more property."""
        other = self.copy()
        other.read(text)
        innermost = other._open[-1] if len(other._open) == len(self._open) else None
        return innermost is not None and (innermost.expects_name or other.name is not None)

    def read(self, text: bytes) -> bool:
        """Read on. Return whether an object got a name for the second time."""
        is_repeated = False
        for byte in self._after_thought(text):
            is_repeated |= self._read(bytes((byte,)))
        return is_repeated

    def _after_thought(self, text: bytes) -> bytes:
        if self._thought is None:
            return text
        self._thought += text
        begin, end = REASONING_BEGIN.encode(), REASONING_END.encode()
        if begin.startswith(self._thought):
            return b""
        if not self._thought.lstrip(b"\xff").startswith(begin):
            text, self._thought = self._thought, None
            return text
        if end not in self._thought:
            self._thought = begin + self._thought[len(begin) :][-len(end) :]
            return b""
        text, self._thought = self._thought.partition(end)[2], None
        return text

    def _read(self, byte: bytes) -> bool:
        if self._is_in_text:
            return self._read_text(byte)
        innermost = self._open[-1] if self._open else None
        if byte == QUOTE:
            self._is_in_text = True
            self.name = b"" if innermost and innermost.expects_name else None
        elif byte in b"{[":
            self._open.append(OpenObject() if byte == b"{" else None)
        elif byte in b"}]" and self._open:
            self._open.pop()
        elif byte in b",:" and innermost:
            innermost.expects_name = byte == b","
        return False

    def _read_text(self, byte: bytes) -> bool:
        if byte == QUOTE and not self.is_escaping:
            return self._end_text()
        self.is_escaping = byte == BACKSLASH and not self.is_escaping
        if self.name is not None:
            self.name += byte
        return False

    def _end_text(self) -> bool:
        name, self.name, self._is_in_text = self.name, None, False
        innermost = self._open[-1] if self._open else None
        if name is None or innermost is None:
            return False
        is_repeated = name in innermost.names
        innermost.names.add(name)
        innermost.expects_name = False
        return is_repeated


def forbid_repeated(matcher: LLMatcher, reader: NameReader, tokens: TokensOfNames, row: np.ndarray) -> None:
    """Take the tokens out of a mask that would give an object a name for the second time, or leave no other way."""
    if not reader.names:
        return
    forbidden = [each for each in tokens.with_name if _is_set(row, each) and reader.copy().read(tokens.tokens[each])]
    if reader.name is not None:
        forbidden += _repeating(reader.name, reader.names, tokens)
        forbidden += [
            token_id
            for token_id, longer in _towards(reader.name, reader.names, tokens)
            if _is_set(row, token_id) and _has_no_name(_after(matcher, [token_id]), longer, reader.names, tokens)
        ]
    elif any(map(partial(_ends_all, matcher, reader, tokens), NEXT_NAME)):
        forbidden += [
            each for each in tokens.with_comma if _is_set(row, each) and reader.asks_name(tokens.tokens[each])
        ]
    _clear(row, forbidden)


def _repeating(name: bytes, names: set[bytes], tokens: TokensOfNames) -> list[int]:
    """Return the tokens that end a name, of which `name` is written, as one of `names`, or may spell it otherwise."""
    is_escaping = (len(name) - len(name.rstrip(BACKSLASH))) % 2
    found = list(tokens.rest_of_escapes if is_escaping else tokens.escapes)
    for rest in (known[len(name) :] for known in names if known.startswith(name)):
        found += tokens.closing[rest]
        if QUOTE in rest:
            found += [each for each in tokens.with_name if tokens.tokens[each].startswith(rest + QUOTE)]
    return found


def _towards(name: bytes, names: set[bytes], tokens: TokensOfNames) -> dict[tuple[int, bytes], None]:
    """Return the tokens after which a name may still become one of `names`, with what is written then."""
    longer = (known[:end] for known in names if known.startswith(name) for end in range(len(name) + 1, len(known) + 1))
    return {(tokens.ids[each[len(name) :]], each): None for each in longer if each[len(name) :] in tokens.ids}


def _has_no_name(matcher: LLMatcher, name: bytes, names: set[bytes], tokens: TokensOfNames) -> bool:
    """Return whether a name that begins with `name` can only become one of `names`."""
    row = np.frombuffer(matcher.compute_bitmask(), np.uint32).copy()
    _clear(row, _repeating(name, names, tokens))
    towards = [each for each in _towards(name, names, tokens) if _is_set(row, each[0])]
    _clear(row, [token_id for token_id, _ in towards])
    if row.any():
        return False
    return all(_has_no_name(_after(matcher, [token_id]), longer, names, tokens) for token_id, longer in towards)


def _ends_all(matcher: LLMatcher, reader: NameReader, tokens: TokensOfNames, text: bytes) -> bool:
    """Return whether another property may begin with `text`, but has no name left."""
    token_ids = [tokens.ids[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in tokens.ids]
    if len(token_ids) < len(text) or matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    return _has_no_name(_after(matcher, token_ids), b"", reader.names, tokens)


def _after(matcher: LLMatcher, token_ids: list[int]) -> LLMatcher:
    matcher = matcher.deep_copy()
    matcher.consume_tokens(token_ids)
    return matcher


def _clear(row: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        row[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _is_set(row: np.ndarray, token_id: int) -> bool:
    return bool(row[token_id // 32] >> (token_id % 32) & 1)
