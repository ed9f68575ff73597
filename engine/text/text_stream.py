"""Text of one answer as a stream: complete characters, and nothing that may be the beginning of a stop string.

Each choice has its own objects. Independent of chats, devices and sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


class StopMatcher:
    """Finds the stop string that ends first; if two end at the same position, the longer one.

    The text is pushed in parts, whose boundaries do not matter. Takes linear time (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = sorted(set(stops), key=len, reverse=True)  # so that the longer one matches first
        if "" in self._stops:
            raise ValueError("a stop string is empty")
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._num_matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self.num_held = 0  # characters at the end of the text that may begin a stop string

    def push(self, text: str) -> tuple[int, str | None]:
        """Return the number of characters consumed, and the stop string that ends there or None."""
        if not self.num_held and self._first_chars.isdisjoint(text):  # fast path
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
    """Return the KMP failure function: for each prefix of `stop`, the length of its longest proper border."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders


class TextDelta(NamedTuple):
    """Text that a push has made visible."""

    text: str
    ends: Sequence[int]  # per token whose text is now complete: length of the answer up to its end, in characters
    stop_string: str | None  # the stop string that ended the text


@dataclass(frozen=True)
class TextOptions:
    """Text options of a request."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string at the end of the text
    skip_special_tokens: bool = True
    is_continuation: bool = False  # see Detokenizer


PLAIN = TextOptions()


class TextStream:
    """Converts the tokens of one answer to text deltas that are final.

    The concatenation of all deltas is `Tokenizer.decode` of all tokens, up to the stop string. Incomplete characters
    and possible beginnings of a stop string are held back. The `ends` of all deltas are those of the tokens of the
    visible text, including a token inside which a stop string begins.

    The visible text after n tokens depends on these tokens only, not on how they were grouped. Therefore an answer can
    be restored after a crash by pushing its known tokens again.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions = PLAIN):
        skipped_ids = tokenizer.special_ids if options.skip_special_tokens else frozenset()
        self.stop_string: str | None = None
        self._include_stop = options.include_stop
        self._detokenizer = Detokenizer(tokenizer.token_table, skipped_ids, options.is_continuation)
        self._matcher = StopMatcher(options.stop)
        self._held = ""
        self._num_read = 0  # characters that came out of the detokenizer
        self._num_visible = 0  # characters that were returned
        self._ends: deque[int] = deque()  # per token that is not visible yet, in half characters
        self._last_end = 0  # of the last visible token
        self._is_finished = False

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Append tokens and return the new visible text. Tokens after a stop string are ignored."""
        assert not self._is_finished, "push after finish"
        parts = []
        for token_id in token_ids:
            if self.stop_string:
                break
            text = self._detokenizer.push(token_id)
            # A token that ends inside a character ends half a character after the text that it has completed.
            end = 2 * (self._num_read + len(text)) + self._detokenizer.is_inside_character
            self._ends.append(end)
            parts.append(self._read(text))
        return TextDelta("".join(parts), self._take_ends(), self.stop_string)

    def finish(self) -> TextDelta:
        """Return the text that was held back. Must be the last call."""
        text = ""
        if not self.stop_string:
            text = self._read(self._detokenizer.flush())  # may complete a stop string
        if not self.stop_string:
            text += self._held
            self._num_visible = self._num_read
        self._is_finished = True
        return TextDelta(text, self._take_ends(), self.stop_string)

    def _read(self, text: str) -> str:
        """Append `text` to the held back text and return the part that is certainly visible."""
        num_matched, self.stop_string = self._matcher.push(text)
        self._num_read += len(text)
        text = self._held + text[:num_matched]
        if self._include_stop:
            num_held = 0
        else:
            num_held = len(self.stop_string) if self.stop_string else self._matcher.num_held
        visible = text[: len(text) - num_held]
        self._held = text[len(visible) :]
        self._num_visible += len(visible)
        return visible

    def _take_ends(self) -> list[int]:
        """Return the ends of tokens that have become visible, including a token that a stop string has cut."""
        end, ends = 2 * self._num_visible, []
        while self._ends and (self._ends[0] <= end or (self.stop_string and self._last_end < end)):
            self._last_end = self._ends.popleft()
            ends.append(min(self._last_end // 2, self._num_visible))
        return ends
