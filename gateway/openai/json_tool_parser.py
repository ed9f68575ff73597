"""Reads one call of a tool while it comes: a JSON object with a name and arguments, whichever is first. Nothing is
parsed but the name: what the model writes as arguments is the client's to judge."""

from __future__ import annotations

import json
from collections.abc import Collection

ARGUMENTS = ("arguments", "parameters")
BEFORE_NAME = ("name", "type", "id", *ARGUMENTS)


class JsonToolCallParser:
    """`push` what begins with the object, until `is_done` or `has_failed`: an object without a name is no call, or, if
    there are `names`, without one of these."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_key = True  # what is read at depth 1, else the value of _key
        self._key = ""
        self._text = ""  # of the key or of the value, if that is read in one piece
        self._arguments = ""  # that nobody has taken
        self._has_arguments = self._is_streaming = False

    def push(self, text: str) -> int:
        """How many characters were read: beyond the object, none."""
        for position, char in enumerate(text, 1):
            self._read(char)
            if self.is_done or self.has_failed:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """What is new of them, once the name is known."""
        if self.name is None:
            return ""
        if self.is_done and not self._has_arguments:
            self._has_arguments, self._arguments = True, "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            self._keep(char)
        elif self._depth == 1 and char in ":,}":
            self._end_part(char)
        elif self._depth == 0:
            self._depth = 1
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._depth == 1 and char.isspace() and not self._in_string:
            return
        if char == "{" and not self._text and not self._is_key and self._key in ARGUMENTS and not self._has_arguments:
            self._has_arguments = self._is_streaming = True  # an object, as they should be
        if self._is_streaming:
            self._arguments += char
        else:
            self._text += char

    def _end_part(self, char: str) -> None:
        text, self._text = self._text, ""
        if char == ":":
            self._key, self._is_key = _string(text) or "", False
            self.has_failed = bool(self._names) and self.name is None and self._key not in BEFORE_NAME
        else:
            if self._key == "name" and not self._is_key:
                self.name = _string(text)
                self.has_failed = self.name is None or bool(self._names and self.name not in self._names)
            elif self._key in ARGUMENTS and not self._has_arguments:
                self._has_arguments = True
                self._arguments += _string(text) or "{}"
            self._key, self._is_key, self._is_streaming = "", True, False
        if char == "}":
            self.is_done, self.has_failed = True, self.has_failed or self.name is None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
