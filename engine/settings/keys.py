"""The file of API keys: a JSON object of names, each with its key and its limits.

{"alice": {"key": "a long secret", "max_requests": 8, "tokens_per_minute": 60000, "priority": 0}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from engine.errors import ConfigError

NAME = re.compile("[A-Za-z0-9_.@-]{1,64}")  # it is a label of metrics and a word of the log
LIMITS = {"max_requests": (1, 1 << 20), "tokens_per_minute": (1, 1 << 40), "priority": (-100, 100)}


@dataclass(frozen=True)
class Owner:
    """Owner of an API key, with the limits of its requests."""

    name: str = ""  # empty: the anonymous owner
    max_requests: int | None = None  # at once
    tokens_per_minute: int | None = None  # of prompts and answers
    priority: int = 0  # of its requests; lower is earlier
    # What the owner uses at other replicas: open requests, and tokens as `OwnerUsage.num_recent_tokens` counts them
    num_open_elsewhere: int = 0
    num_tokens_elsewhere: float = 0.0
    cached_at: str = ""  # host:port of the replica that has cached the beginning of this request's prompt

    @property
    def is_unlimited(self) -> bool:
        return self.max_requests is None and self.tokens_per_minute is None


def read_keys(path: str) -> dict[str, Owner]:
    """Return the owners by their keys, read from a file. Raises ConfigError, whose text never contains a key."""
    try:
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
    except OSError as error:
        raise ConfigError(f"API_KEYS is {path!r}, a file that cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # its text may quote the file
        place = f": {error.msg} in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"API_KEYS is {path!r}, which is not valid JSON{place}") from None
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"API_KEYS is {path!r}, which must hold an object with a name or more")
    owners: dict[str, Owner] = {}
    for name, fields in given.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"API_KEYS: {name!r} is no name of up to 64 letters, digits and _ . @ -")
        if not isinstance(fields, dict) or "key" not in fields:
            raise ConfigError(f"API_KEYS: {name} must have an object with a `key`")
        key = fields.pop("key", None)
        if not isinstance(key, str) or not is_key(key):
            raise ConfigError(f"API_KEYS: the key of {name} must be a text of visible ASCII without blanks")
        if key in owners:
            raise ConfigError(f"API_KEYS: the key of {name} is that of {owners[key].name}, too")
        limits: dict[str, Any] = {limit: _limit(name, limit, value) for limit, value in fields.items()}
        owners[key] = Owner(name, **limits)
    return owners


def replica_token(keys: Iterable[str]) -> str:
    """Return the text by which servers recognize each other: a hash of all API keys, which all of them have."""
    return blake2b("\n".join(sorted(keys)).encode(), person=b"replica", digest_size=32).hexdigest()


def is_key(text: str) -> bool:
    """Return whether an HTTP header can carry the text."""
    return text != "" and all("!" <= char <= "~" for char in text)


def _limit(name: str, limit: str, value: Any) -> int:
    if limit not in LIMITS:
        raise ConfigError(f"API_KEYS: {name} has {limit!r}, there are key, {', '.join(LIMITS)}")
    low, high = LIMITS[limit]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"API_KEYS: {limit} of {name} is {value!r}, it must be a whole number from {low} to {high}")
    return value
