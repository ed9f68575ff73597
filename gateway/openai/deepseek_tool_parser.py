"""Reads one call of a tool as DeepSeek's models write it: the name after a sign, or before it, then the arguments,
fenced or not. As call_reader.py it parses nothing of the arguments: only where they end matters."""

from __future__ import annotations

from collections.abc import Collection

BEGIN, NAME, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MAX_HEAD_LEN = 1024  # what is before the arguments


def ways(name: str) -> list[tuple[str, str]]:
    """To write a call, before and after its arguments: as V3 and R1 do, the second on a line of its own, and V3.1."""
    before, after = f"{BEGIN}function{NAME}{name}\n```json\n", f"\n```{END}"
    return [(before, after), (f"\n{before}", after), (f"{BEGIN}{name}{NAME}", END)]


class DeepSeekToolCallParser:
    """`push` what begins with BEGIN, until `is_done` or `has_failed`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._text = ""  # of what is read: before the arguments, after them
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._arguments = ""  # that nobody has taken

    def push(self, text: str) -> int:
        """How many characters were read: beyond the call, none."""
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
        """What is new of them, once the name is known."""
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
