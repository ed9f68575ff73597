"""Reads config.json and checks single keys of it. Independent of families of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import SetupError


class ModelError(SetupError):
    """A checkpoint cannot be exported. The message names the key or tensor, what was found and what is supported."""


def read_json(path: Path, error: type[SetupError] = ModelError) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `error` with the file's name if it is missing or holds no JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path} is missing") from None
    return object_in(data, path, error)


def object_in(data: bytes, name: Path | str, error: type[SetupError]) -> dict[str, Any]:
    """Return the JSON object in the content of the file `name`. Raises `error` if it holds none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as reason:
        raise error(f"{name} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{name} holds a JSON {type(value).__name__}, an object was expected")
    return value


def whole_number(keys: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a key's value, a positive whole number. The default replaces a missing key or null.

    Raises ModelError for other values, and for a missing key without a default.
    """
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a positive whole number")
    return value


def number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a key's value, a positive number. The default replaces a missing key or null.

    Raises ModelError for other values, and for a missing key without a default.
    """
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a positive number")
    return float(value)


def an_object(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a key's value, an object; a missing key or null is empty. Raises ModelError for other values."""
    value = keys.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {value!r}, it must be an object")
    return value or {}
