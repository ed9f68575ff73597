"""Incremental detokenization: the bytes of each token, and characters as soon as they are complete.

The table of bytes is shared by all requests; a Detokenizer belongs to one text. Independent of stop strings and chats.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import tokenizers

from engine.errors import ConfigError

KNOWN_STEPS = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace and Strip (of the beginning)"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}


@dataclass(frozen=True)
class DecoderRules:
    """Rules that decode one token at a time, equivalent to the decoder of tokenizer.json."""

    byte_level: bool = False  # every character of a token stands for a byte
    byte_fallback: bool = False  # the token <0x0A> is a byte
    replace: tuple[tuple[str, str], ...] = ()
    separator: bytes = b""  # between tokens
    dropped_at_start: str = ""  # removed from the first token of a text
    strip: tuple[bytes, int] = (b"", 0)  # prefix removed from the beginning of a text, and the maximum number of times

    @classmethod
    def read(cls, backend: tokenizers.Tokenizer) -> DecoderRules:
        """Return the rules of a tokenizer. Raises ConfigError if its decoder has an unknown step."""
        if backend.decoder is None:
            return cls(separator=b" ")
        rules: dict[str, Any] = {"replace": ()}
        fused = False  # the steps after this see the whole text, not single tokens
        for step in _flat(json.loads(backend.decoder.__getstate__())):
            match step:
                case {"type": "ByteLevel"}:
                    fused = rules["byte_level"] = True
                case {"type": "ByteFallback"}:
                    rules["byte_fallback"] = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                    rules["replace"] += ((old, new),)
                case {"type": "Strip", "content": char, "start": count, "stop": 0} if fused:
                    rules["strip"] = (char.encode(), count)
                case {"type": "Metaspace", "replacement": char}:
                    rules["replace"] += ((char, " "),)
                    rules["dropped_at_start"] = "" if step.get("prepend_scheme") == "never" else char
                case _:
                    found = json.dumps(step)
                    raise ConfigError(f"the tokenizer decodes with {found}, known are {KNOWN_STEPS}")
        return cls(**rules)

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token, given by its text in the vocabulary."""
        if self.byte_fallback and BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_level and all(char in BYTE_OF for char in token):
            return bytes([BYTE_OF[char] for char in token])
        return token.encode()


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


class TokenBytes(dict[int, bytes]):
    """Lazy table from token id to the bytes that it appends to a text. A token may end inside a character."""

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self._backend = backend
        self.rules = DecoderRules.read(backend)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # padding rows of the model's vocabulary have no text
            return b""
        data = self[token_id] = self.rules.separator + self.rules.bytes_of(token)
        return data

    def at_start(self, token_id: int) -> bytes:
        """Return the bytes of the first token of a text."""
        token = self._backend.id_to_token(token_id)
        assert token is not None, "the token has no text"
        return self.rules.bytes_of(token.replace(self.rules.dropped_at_start, ""))


class Detokenizer:
    """Converts a stream of token ids to text. Characters are returned as soon as they are complete.

    Some tokenizers prefix every word with a space and drop the first space of a text. `is_continuation` states that the
    text continues another one (a prompt), so that its first space is kept.
    """

    def __init__(self, table: TokenBytes, skipped_ids: Set[int] = frozenset(), is_continuation: bool = False):
        self._table = table
        self._skipped_ids = skipped_ids
        self._at_start = not is_continuation
        self._strip_char, self._num_to_strip = table.rules.strip
        self._pending = b""  # beginning of an incomplete character, at most three bytes

    @property
    def is_inside_character(self) -> bool:
        """Return whether the last token ended inside a character."""
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        data = self._pending + self.bytes_of(token_id)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character at the end, else an empty string."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of all tokens, as `push` for each of them and `flush` would. For new objects only."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the next token appends to the text."""
        if token_id in self._skipped_ids:
            return b""
        data = self._table[token_id]
        return self._begin(token_id) if self._at_start and data else data

    def _begin(self, token_id: int) -> bytes:
        data = self._table.at_start(token_id)
        while self._num_to_strip and data.startswith(self._strip_char):
            data = data[len(self._strip_char) :]
            self._num_to_strip -= 1
        self._at_start = not data and self._num_to_strip > 0  # all was stripped, and more may be
        return data
