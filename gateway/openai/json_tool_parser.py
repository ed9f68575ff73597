"""Streaming parser of a tool call in JSON: an object with a name and arguments, in any order.

Only the name is decoded. The arguments are passed on as the model wrote them, because the client has to judge them.
"""

from __future__ import annotations

import json
from collections.abc import Collection

ARGUMENTS = ("arguments", "parameters")
BEFORE_NAME = ("name", "type", "id", *ARGUMENTS)


class JsonToolCallParser:
    """Parser of one tool call.

    `push` text that begins with the object until `is_done` or `has_failed`.

    An object without a name is no call and fails. If `names` is given, so does an object with another name.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_key = True  # the text at depth 1 is a key; otherwise it is the value of _key
        self._key = ""
        self._text = ""  # text of the key, or of a value that is read as a whole
        self._arguments = ""  # text that was not taken yet
        self._has_arguments = self._is_streaming = False

    def push(self, text: str) -> int:
        """Parse `text` and return how many characters belong to the object."""
        for position, char in enumerate(text, 1):
            self._read(char)
            if self.is_done or self.has_failed:
                return position
        return len(text)

    def take_arguments(self) -> str:
        """Return the text of the arguments that is new since the last call, and "" until the name is known."""
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
            self._has_arguments = self._is_streaming = True  # an object, as expected
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
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
