"""Streaming parser of the model's output: it separates reasoning, text and tool calls.

The result does not depend on how the text is split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.wire import REASONING_BEGIN, REASONING_END
from gateway.openai.output_syntax import NO_SYNTAX, OutputSyntax, ToolCallParser

CONTENT, REASONING, TOOL_CALL = "content", "reasoning_content", "call"
WHITESPACE = " \t\r\n"


class OutputPart(NamedTuple):
    """Part of an answer: a piece of text or reasoning, or of the arguments of a tool call."""

    kind: str
    text: str  # for a tool call: new text of the arguments
    call_index: int = 0
    name: str | None = None  # name of a tool call that starts


class OutputParser:
    """Parser of one answer in the given syntax.

    With `is_forced` the answer consists of tool calls only.

    Text that looked like a call and is none, because its name is not in `names`, becomes content unchanged.
    """

    def __init__(
        self,
        syntax: OutputSyntax = NO_SYNTAX,
        is_forced: bool = False,
        include_reasoning: bool = True,
        names: Collection[str] = (),
    ):
        self.num_calls = 0
        self._format = syntax.calls
        self._before, self._after = syntax.around
        self._is_forced = is_forced
        self._include_reasoning = include_reasoning
        self._names = names
        self._must_reason = syntax.reasoning == "does"
        self._rest = ""  # text that is not classified yet
        self._held = ""  # text that may belong to a call
        self._is_end = False
        self._call: ToolCallParser | None = None
        self._is_named = False  # the name of the call was emitted
        self._has_read_call = False  # since the last `begin`
        self._parts: list[OutputPart] = []
        # A state consumes text of `_rest` and returns True if the next state can continue.
        self._state: Callable[[], bool] = self._begin_answer if syntax.reasoning == "never" else self._begin

    def set_reasoning(self, reasoning: str) -> None:
        """Set whether this answer starts with reasoning, as in `OutputSyntax.reasoning`.

        The model knows it before its first text, because the prompt may have started or ended the reasoning.
        """
        if self._state == self._begin:
            self._must_reason = reasoning == "does"
            self._state = self._begin_answer if reasoning == "never" else self._begin

    def push(self, text: str, is_end: bool = False) -> list[OutputPart]:
        """Parse `text` and return the parts that are complete. `is_end` marks the end of the answer."""
        self._rest += text
        self._is_end = is_end
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: str, text: str) -> None:
        if text and (kind != REASONING or self._include_reasoning):
            self._parts.append(OutputPart(kind, text))

    def _may_become(self, marker: str, start: str) -> bool:
        return not self._is_end and start != marker and marker.startswith(start)

    # States

    def _begin(self) -> bool:
        rest = self._rest.lstrip()
        if self._may_become(REASONING_BEGIN, rest):
            return False
        if rest.startswith(REASONING_BEGIN):
            self._rest, self._state = rest[len(REASONING_BEGIN) :], self._begin_reasoning
        else:
            self._state = self._begin_reasoning if self._must_reason else self._begin_answer
        return True

    def _begin_reasoning(self) -> bool:
        return self._skip_lines(self._reasoning)

    def _reasoning(self) -> bool:
        return self._text_until(REASONING, REASONING_END, self._after_reasoning)

    def _after_reasoning(self) -> bool:
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
            self._rest, self._state = start[len(self._before) :], self._begin_enclosed
            return True
        has_calls = self._is_forced or (bare and start.startswith(bare))
        self._state = self._calls if has_calls else self._answer
        return True

    def _begin_enclosed(self) -> bool:
        return self._skip_lines(self._enclosed)

    def _enclosed(self) -> bool:
        return self._text_until(CONTENT, self._after, self._after_enclosed)

    def _after_enclosed(self) -> bool:
        self._held = ""
        return self._skip_lines(self._answer)

    def _answer(self) -> bool:
        return self._text_until(CONTENT, self._format.begin if self._format else "", self._calls)

    def _text_until(self, kind: str, marker: str, then: Callable[[], bool]) -> bool:
        """Emit text of this kind up to `marker`, without the whitespace before the marker."""
        at = self._rest.find(marker) if marker else -1
        if at >= 0:
            text = self._rest[:at].rstrip()
            self._held, self._rest = self._rest[len(text) : at] + marker, self._rest[at + len(marker) :]
            self._has_read_call, self._state = False, then
        else:
            text = _without_marker_prefix(self._rest, marker) if marker and not self._is_end else self._rest
            self._rest = self._rest[len(text) :]
        self._emit(kind, text)
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
                return False  # the answer was cut short inside the marker
        if rest:
            self._state = self._answer
        if rest or self._is_end:
            self._emit_held()
        return bool(rest)

    def _take(self, count: int) -> None:
        """Skip text around calls. It is kept while it may still turn out to be content."""
        if not self._has_read_call:
            self._held += self._rest[:count]
        self._rest = self._rest[count:]

    def _emit_held(self) -> None:
        self._emit(CONTENT, self._held)
        self._held = ""

    def _in_call(self) -> bool:
        call = self._call
        assert call
        num_read = call.push(self._rest)
        self._held, self._rest = self._held + self._rest[:num_read], self._rest[num_read:]
        if call.has_failed or (call.name is None and self._is_end):
            self._emit_held()
            self._state = self._answer
            return True
        if call.name is not None:
            self._emit_call(call, call.name)
        if call.is_done:
            self._has_read_call, self._state = True, self._calls
        return call.is_done

    def _emit_call(self, call: ToolCallParser, name: str) -> None:
        self._held = ""
        if not self._is_named:
            self._is_named, self.num_calls = True, self.num_calls + 1
            self._parts.append(OutputPart(TOOL_CALL, "", self.num_calls - 1, name))
        if arguments := call.take_arguments():
            self._parts.append(OutputPart(TOOL_CALL, arguments, self.num_calls - 1))


def _without_marker_prefix(text: str, marker: str) -> str:
    """Return `text` without a suffix that may be the beginning of `marker`, and without the whitespace before it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return text[:-length].rstrip()
    return text.rstrip()
