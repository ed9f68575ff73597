"""Tells apart, while it comes, what an answer holds: what the model has thought, its words, its calls of tools. How the
text is cut does not matter."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.wire import REASONING_BEGIN, REASONING_END
from gateway.openai.output_syntax import PLAIN, OutputSyntax, ToolCallParser

CONTENT, REASONING, TOOL_CALL = "content", "reasoning_content", "call"
WHITESPACE = " \t\r\n"


class OutputPart(NamedTuple):
    kind: str
    text: str  # of a call: what is new of its arguments
    call_index: int = 0
    name: str | None = None  # of a call that begins


class OutputParser:
    """Of an answer in this syntax; `is_forced`: it has calls and nothing else. What looked like a call and is none, by
    the `names` that there are, becomes content, as it stands."""

    def __init__(
        self,
        syntax: OutputSyntax = PLAIN,
        is_forced: bool = False,
        tells_thoughts: bool = True,
        names: Collection[str] = (),
    ):
        self.num_calls = 0
        self._format = syntax.calls
        self._before, self._after = syntax.around
        self._is_forced = is_forced
        self._tells_thoughts = tells_thoughts
        self._names = names
        self._is_thought_sure = syntax.thought == "does"
        self._rest = ""  # not decided yet
        self._held = ""  # may belong to a call
        self._is_end = False
        self._call: ToolCallParser | None = None
        self._is_named = False  # and its client knows
        self._has_read_call = False  # since the last beginning of calls
        self._parts: list[OutputPart] = []
        # Each works on _rest and says whether there may be more to do.
        self._state: Callable[[], bool] = self._begin_answer if syntax.thought == "never" else self._begin

    def learn(self, thought: str) -> None:
        """What the model knows of this answer before its first text, as a Dialect has it: its prompt may have begun a
        thought, or ended it."""
        if self._state == self._begin:
            self._is_thought_sure = thought == "does"
            self._state = self._begin_answer if thought == "never" else self._begin

    def push(self, text: str, is_end: bool = False) -> list[OutputPart]:
        self._rest += text
        self._is_end = is_end
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _tell(self, kind: str, text: str) -> None:
        if text and (kind != REASONING or self._tells_thoughts):
            self._parts.append(OutputPart(kind, text))

    def _may_become(self, marker: str, start: str) -> bool:
        return not self._is_end and start != marker and marker.startswith(start)

    # States

    def _begin(self) -> bool:
        rest = self._rest.lstrip()
        if self._may_become(REASONING_BEGIN, rest):
            return False
        if rest.startswith(REASONING_BEGIN):
            self._rest, self._state = rest[len(REASONING_BEGIN) :], self._begin_thought
        else:
            self._state = self._begin_thought if self._is_thought_sure else self._begin_answer
        return True

    def _begin_thought(self) -> bool:
        return self._skip_lines(self._thought)

    def _thought(self) -> bool:
        return self._words(REASONING, REASONING_END, self._after_thought)

    def _after_thought(self) -> bool:
        self._held = ""
        return self._skip_lines(self._begin_answer)

    def _skip_lines(self, then: Callable[[], bool]) -> bool:
        self._rest = self._rest.lstrip("\n")
        if self._rest or self._is_end:
            self._state = then
            return True
        return False

    def _begin_answer(self) -> bool:
        bare, start = self._format.bare if self._format else "", self._rest.lstrip()
        if self._may_become(bare, start) or self._may_become(self._before, start):
            return False
        if self._before and start.startswith(self._before):
            self._rest, self._state = start[len(self._before) :], self._begin_words
            return True
        has_calls = self._is_forced or (bare and start.startswith(bare))
        self._state = self._calls if has_calls else self._answer
        return True

    def _begin_words(self) -> bool:
        return self._skip_lines(self._enclosed)

    def _enclosed(self) -> bool:
        return self._words(CONTENT, self._after, self._after_words)

    def _after_words(self) -> bool:
        self._held = ""
        return self._skip_lines(self._answer)

    def _answer(self) -> bool:
        return self._words(CONTENT, self._format.begin if self._format else "", self._calls)

    def _words(self, kind: str, marker: str, then: Callable[[], bool]) -> bool:
        """Up to the marker, without the space before it."""
        at = self._rest.find(marker) if marker else -1
        if at >= 0:
            words = self._rest[:at].rstrip()
            self._held, self._rest = self._rest[len(words) : at] + marker, self._rest[at + len(marker) :]
            self._has_read_call, self._state = False, then
        else:
            words = _certain(self._rest, marker) if marker and not self._is_end else self._rest
            self._rest = self._rest[len(words) :]
        self._tell(kind, words)
        return at >= 0

    def _calls(self) -> bool:
        assert self._format
        rest = self._rest.lstrip(WHITESPACE + self._format.filler)
        self._take(len(self._rest) - len(rest))
        opens = self._format.opens
        if rest.startswith(opens):
            self._call, self._is_named, self._state = self._format.reader(self._names), False, self._in_call
            return True
        if opens.startswith(rest or "-") and not self._is_end:
            return False
        for marker in filter(None, (self._format.begin, self._format.end)):
            if rest.startswith(marker):
                self._has_read_call &= marker != self._format.begin
                self._take(len(marker))
                return True
            if rest and marker.startswith(rest) and (self._has_read_call or not self._is_end):
                return False  # at its end, the answer was cut short in it
        if rest:
            self._state = self._answer
        if rest or self._is_end:
            self._let_go()
        return bool(rest)

    def _take(self, count: int) -> None:
        """What is around calls. After one it is of no interest."""
        if not self._has_read_call:
            self._held += self._rest[:count]
        self._rest = self._rest[count:]

    def _let_go(self) -> None:
        self._tell(CONTENT, self._held)
        self._held = ""

    def _in_call(self) -> bool:
        call = self._call
        assert call
        num_read = call.push(self._rest)
        self._held, self._rest = self._held + self._rest[:num_read], self._rest[num_read:]
        if call.has_failed or (call.name is None and self._is_end):
            self._let_go()
            self._state = self._answer
            return True
        if call.name is not None:
            self._tell_call(call, call.name)
        if call.is_done:
            self._has_read_call, self._state = True, self._calls
        return call.is_done

    def _tell_call(self, call: ToolCallParser, name: str) -> None:
        self._held = ""
        if not self._is_named:
            self._is_named, self.num_calls = True, self.num_calls + 1
            self._parts.append(OutputPart(TOOL_CALL, "", self.num_calls - 1, name))
        if arguments := call.take_arguments():
            self._parts.append(OutputPart(TOOL_CALL, arguments, self.num_calls - 1))


def _certain(text: str, marker: str) -> str:
    """Without what may be the beginning of the marker, and the space before it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return text[:-length].rstrip()
    return text.rstrip()
