"""Declaration of a setting, its lookup in the environment and its checks. The settings themselves are in config.py and
its bases."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# Suffixes of numbers, as at vLLM: thousands in small letters, and multiples of 1024 in capital ones
UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # in Markdown; `doc` is a part of docs/settings.md


@dataclass(frozen=True)
class Setting:
    """Declaration of one field: its environment variable, description and accepted values."""

    env: str
    doc: str
    old: tuple[str, ...] = ()  # names of earlier generations that still work
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    other: str = ""  # what else may be chosen ends so
    synonyms: Mapping[str, str] = field(default_factory=dict)  # what others call a choice
    refused: Mapping[str, str] = field(default_factory=dict)  # why a value that others have is not a choice here
    has_units: bool = False  # a whole number that may end in one of UNITS
    automatic: tuple[str, ...] = ()  # texts that mean the same as an unset variable
    may_be_empty: bool = False  # elsewhere an empty text is like an unset variable
    internal: bool = False  # set by start_server for the processes it starts; no operator's business


def setting(default: Any, env: str, doc: str, is_shown: bool = True, **limits: Any) -> Any:
    return field(default=default, repr=is_shown, metadata={"setting": Setting(env, doc, **limits)})


def port(default: int, env: str, doc: str, *old: str, minimum: int = 1) -> Any:
    return setting(default, env, doc, old=old, minimum=minimum, maximum=65535)


def given(setting: Setting, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the name and text of the variable that sets the field, or None for the text. An empty text counts as
    unset, unless the setting may be empty. Raises ConfigError."""
    names = [name for name in (setting.env, *setting.old) if name in environ]
    found = [(name, environ[name]) for name in names if environ[name] or setting.may_be_empty]
    if not found:
        return setting.env, None
    for name, text in found[1:]:
        if text != found[0][1]:
            raise ConfigError(f"{found[0][0]} is {found[0][1]!r} and {name}, its old name, is {text!r}; set only one")
    return found[0]


def parse(name: str, text: str, kind: str, setting: Setting) -> Any:
    """Parse the text of a setting. `kind` is the annotation of its field. Raises ConfigError that names `name`, the
    text and what was expected.
    """
    text = setting.synonyms.get(text, text)
    if text in setting.automatic:
        return None
    is_other = bool(setting.other) and text.endswith(setting.other)
    if text in setting.refused:
        raise ConfigError(f"{name} is {text!r}: {setting.refused[text]}")
    if setting.choices and text not in setting.choices and not is_other:
        raise ConfigError(f"{name} is {text!r}, it must be one of: {', '.join(setting.choices)}")
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name} is {text!r}, it must be 0 or 1")
        return text.lower() in ("1", "true")
    value = _number(name, text, kind.startswith("int"), setting)
    low, high = setting.minimum, setting.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        meaning = LINK.sub(r"\1", setting.doc)
        raise ConfigError(f"{name} is {text}, it must be {_range(low, high)} ({meaning})")
    return value


def _number(name: str, text: str, is_whole: bool, setting: Setting) -> float:
    try:
        value: float = float(text) if not is_whole else with_unit(text) if setting.has_units else int(text)
    except ValueError:
        expected = "a whole number" if is_whole else "a number"
        if setting.has_units:
            expected += " such as 32768, 32k (32000) or 32K (32768)"
        raise ConfigError(f"{name} is {text!r}, it must be {' or '.join((expected, *setting.automatic[:1]))}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {text!r}, it must be a finite number")
    return value


def with_unit(text: str) -> int:
    """Read a whole number that may end in one of UNITS: `32k`, `25.6k`, `32K`. Raises ValueError."""
    number, unit = text.strip()[:-1], UNITS.get(text.strip()[-1:])
    if unit is None:
        return int(text)
    if not re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII):
        raise ValueError(text)
    product = Fraction(number) * unit
    if product.denominator != 1:
        raise ValueError(text)
    return int(product)


def _range(low: float | None, high: float | None) -> str:
    if low == high:
        return f"{low:g}"
    limits = [f"at least {low:g}"] if low is not None else []
    return " and ".join(limits + [f"at most {high:g}"] if high is not None else limits)


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; an empty text stands for an empty object. Raises ValueError, which says what is
    wrong."""
    try:
        found = json.loads(text or "{}")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is none")
    return found


def expanded(env: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{env} is {text!r}, and there is no such home directory; write the path out") from None
