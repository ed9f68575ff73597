"""Reads single keys of a config.json with one kind of error. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import SetupError


class ModelError(SetupError):
    """A checkpoint cannot be exported. Names the key or tensor, what was found and what is supported."""


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
