"""From token ids to text: the bytes of each token, text as it becomes certain, stop strings.

Each request has its own objects; only the table of bytes is shared. Knows no chat, no devices and no sockets.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

KNOWN_STEPS = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace and Strip (of the beginning)"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}


@dataclass(frozen=True)
class DecoderRules:
    """The decoder of tokenizer.json, as rules for one token at a time."""

    byte_level: bool = False  # every character of a token stands for a byte
    byte_fallback: bool = False  # the token <0x0A> is a byte
    replace: tuple[tuple[str, str], ...] = ()
    separator: bytes = b""  # between tokens
    dropped_at_start: str = ""  # removed from the first token of a text
    strip: tuple[bytes, int] = (b"", 0)  # removed from the beginning of a text: what, and at most how often

    @classmethod
    def read(cls, backend: tokenizers.Tokenizer) -> DecoderRules:
        if backend.decoder is None:
            return cls(separator=b" ")
        rules: dict[str, Any] = {"replace": ()}
        fused = False  # from here on a step sees the whole text, not one token
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
    """What each token adds to a text, looked up once. Bytes, because a token may end inside a character."""

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self._backend = backend
        self.rules = DecoderRules.read(backend)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # a model may have more rows than its tokenizer has tokens: these say nothing
            return b""
        data = self[token_id] = self.rules.separator + self.rules.bytes_of(token)
        return data

    def at_start(self, token_id: int) -> bytes:
        """The same for the first token of a text."""
        token = self._backend.id_to_token(token_id)
        return self.rules.bytes_of(token.replace(self.rules.dropped_at_start, ""))


class Detokenizer:
    """Token ids in, text out as soon as its characters are complete.

    Some tokenizers write every word with a space in front of it and drop the first one of a text.
    `is_continuation` says that the text goes on after another (a prompt), so that its first space is kept.
    """

    def __init__(self, table: TokenBytes, skipped_ids: Set[int] = frozenset(), is_continuation: bool = False):
        self._table = table
        self._skipped_ids = skipped_ids
        self._at_start = not is_continuation
        self._strip_char, self._num_to_strip = table.rules.strip
        self._pending = b""  # the beginning of a character, three bytes at most

    @property
    def is_inside_character(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        data = self._pending + self.bytes_of(token_id)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        """A character that was never completed becomes U+FFFD."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def decode(self, token_ids: Iterable[int]) -> str:
        """All at once, for a fresh object. The same text as `push` for each token and `flush`."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
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


class StopMatcher:
    """Finds the stop string that ends first; of two that end together, the longer.

    The text comes in parts. How it is cut does not matter and the work is linear (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = sorted(set(stops), key=len, reverse=True)  # so that the longer is asked first
        if "" in self._stops:
            raise ValueError("a stop string is empty")
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._num_matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self.num_held = 0  # so many characters at the end of the text may be the beginning of a stop string

    def push(self, text: str) -> tuple[int, str | None]:
        """How many characters were read, and the stop string that ends there."""
        if not self.num_held and self._first_chars.isdisjoint(text):  # the usual case, at the speed of C
            return len(text), None
        for position, char in enumerate(text, 1):
            for index, stop in enumerate(self._stops):
                matched = self._num_matched[index]
                while matched and stop[matched] != char:
                    matched = self._borders[index][matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    return position, stop
                self._num_matched[index] = matched
        self.num_held = max(self._num_matched)
        return len(text), None


def _borders(stop: str) -> list[int]:
    """Of each beginning of `stop`: the length of its longest proper beginning that is also its end."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders


class Delta(NamedTuple):
    """What a push made visible."""

    text: str
    num_tokens: int  # whose text is now complete
    stopped: str | None  # the stop string that ended the text


@dataclass(frozen=True)
class TextOptions:
    """How one request wants its text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string at the end of the text
    skip_special_tokens: bool = True
    is_continuation: bool = False  # see Detokenizer


PLAIN = TextOptions()


class TextStream:
    """The text of one answer, in deltas that are final: token ids in, text out.

    All deltas together are `Tokenizer.decode` of all tokens, up to the stop string. Held back are incomplete
    characters and what may be the beginning of a stop string. The `num_tokens` of all deltas together count
    the tokens of the visible text, with the one in whose middle a stop string began.

    What is visible after n tokens depends on these tokens alone, not on how they were grouped. So after a
    crash a new stream is given as `pushed_ids` every token that was pushed into the old one (not only the
    visible ones); its deltas go on where those of the old one ended.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions = PLAIN, pushed_ids: Iterable[int] = ()):
        skipped_ids = tokenizer.special_ids if options.skip_special_tokens else frozenset()
        self.stopped: str | None = None
        self._include_stop = options.include_stop
        self._detokenizer = Detokenizer(tokenizer.token_table, skipped_ids, options.is_continuation)
        self._matcher = StopMatcher(options.stop)
        self._held = ""
        self._num_read = 0  # characters that came out of the detokenizer
        self._num_visible = 0  # of these, how many were delivered
        self._ends: deque[int] = deque()  # of each token not yet visible, in half characters
        self._last_end = 0  # of the last visible token
        self._is_finished = False
        self.push(pushed_ids)

    def push(self, token_ids: Iterable[int]) -> Delta:
        """Tokens after the one that ended the text are ignored."""
        assert not self._is_finished, "push after finish"
        parts = []
        for token_id in token_ids:
            if self.stopped:
                break
            text = self._detokenizer.push(token_id)
            # A token that ends inside a character ends half a character further than the text that it gave.
            end = 2 * (self._num_read + len(text)) + self._detokenizer.is_inside_character
            self._ends.append(end)
            parts.append(self._read(text))
        return Delta("".join(parts), self._take_tokens(), self.stopped)

    def finish(self) -> Delta:
        """What was held back. The last call."""
        text = ""
        if not self.stopped:
            text = self._read(self._detokenizer.flush())  # may complete a stop string
        if not self.stopped:
            text += self._held
            self._num_visible = self._num_read
        self._is_finished = True
        return Delta(text, self._take_tokens(), self.stopped)

    def _read(self, text: str) -> str:
        """Of the text that was held back and `text`: what is certain to be visible."""
        num_matched, self.stopped = self._matcher.push(text)
        self._num_read += len(text)
        text = self._held + text[:num_matched]
        if self._include_stop:
            num_held = 0
        else:
            num_held = len(self.stopped) if self.stopped else self._matcher.num_held
        visible = text[: len(text) - num_held]
        self._held = text[len(visible) :]
        self._num_visible += len(visible)
        return visible

    def _take_tokens(self) -> int:
        """The tokens whose text is visible; if it was ended, also the one that is visible in part."""
        end = 2 * self._num_visible
        num_tokens = 0
        while self._ends and (self._ends[0] <= end or (self.stopped and self._last_end < end)):
            self._last_end = self._ends.popleft()
            num_tokens += 1
        return num_tokens
