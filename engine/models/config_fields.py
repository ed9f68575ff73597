"""Reads config.json and checks single fields of it. Independent of families of models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import SetupError

MAX_COUNT, MAX_WIDTH, MAX_NUMBER = 4096, 2**20, 2**31 - 1
MIN_FLOAT, MAX_FLOAT = 1e-15, 1e15  # products and squares of numbers between them are numbers of float32, too
COUNTS = (  # of layers, heads and experts, of which the network has an object each, and sides of patches
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "n_shared_experts",
    "moe_num_shared_experts",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "depth",
    "num_heads",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "merge_size",
)
WIDTHS = ("hidden_size", "intermediate_size", "_dim", "_rank")  # ends of the names of widths of matrices


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


def whole_number(keys: Mapping[str, Any], name: str, default: int | None = None, minimum: int = 1) -> int:
    """Return a key's value, a whole number of at least `minimum`, 0 or 1. The default replaces a missing key or null.

    Raises ModelError for other values, for numbers that are larger than any model has, which would take hours or all
    memory before anything else refuses them, and for a missing key without a default.
    """
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        kind = "positive whole number" if minimum else "whole number"
        raise ModelError(f"config.json: {name} is {value!r}, it must be a {kind}")
    limit = MAX_COUNT if name in COUNTS else MAX_WIDTH if name.endswith(WIDTHS) else MAX_NUMBER
    if value > limit:
        raise ModelError(f"config.json: {name} is {value}, it must be at most {limit}")
    return value


def number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a key's value, a number from MIN_FLOAT to MAX_FLOAT. The default replaces a missing key or null.

    Raises ModelError for other values, and for a missing key without a default.
    """
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a positive number")
    if not MIN_FLOAT <= value <= MAX_FLOAT:
        raise ModelError(f"config.json: {name} is {value!r:.40}, it must be from {MIN_FLOAT:g} to {MAX_FLOAT:g}")
    return float(value)


def an_object(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a key's value, an object; a missing key or null is empty. Raises ModelError for other values."""
    value = keys.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {value!r}, it must be an object")
    return value or {}


def layer_list(keys: Mapping[str, Any], name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a key's value, a list of layers. The default replaces a missing key or null. Raises ModelError for other
    values."""
    value = keys.get(name)
    if value is None:
        return tuple(default)
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise ModelError(f"config.json: {name} is {value!r}, it must be a list of whole numbers")
    return tuple(value)


def values_of_layers(keys: Mapping[str, Any], name: str, num_layers: int) -> list[Any]:
    """Return a key's value, a list with a value for each of the layers, or more; without it, an empty list. Raises
    ModelError for other values."""
    value = keys.get(name) or []
    if not isinstance(value, list) or 0 < len(value) < num_layers:
        raise ModelError(
            f"config.json: {name} is {value!r}, it must be a list of {num_layers} values, one for each layer"
        )
    return value
