"""The text of one answer as it becomes certain: whole characters, and nothing that may begin a stop string.

Each request has its own objects. Knows no chat, no devices and no sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


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
    ends: Sequence[int]  # of the tokens whose text is now complete: the characters of the whole answer up to there
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
    characters and what may be the beginning of a stop string. The `ends` of all deltas together are those of
    the tokens of the visible text, with the one in whose middle a stop string began.

    What is visible after n tokens depends on these tokens alone, not on how they were grouped. So after a
    crash an answer is pushed once more as far as it is known, and goes on where it was.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions = PLAIN):
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
        return Delta("".join(parts), self._take_ends(), self.stopped)

    def finish(self) -> Delta:
        """What was held back. The last call."""
        text = ""
        if not self.stopped:
            text = self._read(self._detokenizer.flush())  # may complete a stop string
        if not self.stopped:
            text += self._held
            self._num_visible = self._num_read
        self._is_finished = True
        return Delta(text, self._take_ends(), self.stopped)

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

    def _take_ends(self) -> list[int]:
        """Of the tokens whose text is visible; if it was ended, also of the one that is visible in part."""
        end, ends = 2 * self._num_visible, []
        while self._ends and (self._ends[0] <= end or (self.stopped and self._last_end < end)):
            self._last_end = self._ends.popleft()
            ends.append(min(self._last_end // 2, self._num_visible))
        return ends
