"""Reads a config.json and single keys of it, with one kind of error. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import SetupError


class ModelError(SetupError):
    """A checkpoint cannot be exported. Names the key or tensor, what was found and what is supported."""


def read_json(path: Path, error: type[SetupError] = ModelError) -> dict[str, Any]:
    """The object in a file. Raises `error` that names the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path} is missing") from None
    return object_in(data, path, error)


def object_in(data: bytes, name: Path | str, error: type[SetupError]) -> dict[str, Any]:
    """Of a file with that name. Raises `error`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as reason:
        raise error(f"{name} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{name} holds a JSON {type(value).__name__}, an object was expected")
    return value


def whole_number(keys: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number; null counts as absent, an absent one without a default is an error."""
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a positive whole number")
    return value


def number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; null counts as absent, an absent one without a default is an error."""
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a positive number")
    return float(value)


def an_object(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object; an absent one and null are empty."""
    value = keys.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {value!r}, it must be an object")
    return value or {}
