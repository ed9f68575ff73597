"""Streaming parser of a tool call in the syntax of DeepSeek's models: the name after a separator or before it, then the
arguments, with or without a code fence. Like json_tool_parser.py it decodes only the name and finds the end of the
arguments.
"""

from __future__ import annotations

from collections.abc import Collection

BEGIN, NAME, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MAX_HEAD_LEN = 1024  # characters before the arguments


def ways(name: str) -> list[tuple[str, str]]:
    """Return the text before and after the arguments of a call to `name`, for each way to write it: that of V3 and R1,
    the same on a new line, and that of V3.1.
    """
    before, after = f"{BEGIN}function{NAME}{name}\n```json\n", f"\n```{END}"
    return [(before, after), (f"\n{before}", after), (f"{BEGIN}{name}{NAME}", END)]


class DeepSeekToolCallParser:
    """Parser of one tool call. `push` text that begins with BEGIN until `is_done` or `has_failed`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._text = ""  # text before the arguments, later the text after them
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._arguments = ""  # text that was not taken yet

    def push(self, text: str) -> int:
        """Parse `text` and return how many characters belong to the call."""
        for position, char in enumerate(text, 1):
            if self.name is None:
                self._read_head(char)
            elif self._depth:
                self._read_argument(char)
            else:
                self._text += char
                self.is_done = self._text.endswith(END)
            if self.is_done or self.has_failed:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """Return the text of the arguments that is new since the last call, and "" until the name is known."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read_head(self, char: str) -> None:
        if char != "{":
            self._text += char
            self.has_failed = len(self._text) > MAX_HEAD_LEN or self._text.endswith(END)
            return
        before, _, after = self._text.removeprefix(BEGIN).partition(NAME)  # "function" and the name, or that alone
        self.name = (after.strip() or before).strip().split("\n")[0].strip()
        self.has_failed = not self.name or NAME not in self._text
        self._text, self._depth, self._arguments = "", 1, char

    def _read_argument(self, char: str) -> None:
        self._arguments += char
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
