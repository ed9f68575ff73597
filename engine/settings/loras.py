"""Settings: the adapters of the model. LORA_MODULES is vLLM's option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.settings.model import ModelSettings
from engine.settings.served import OWN_NAME, names_in
from engine.settings.setting import expanded, setting

MAX_NAME_LEN = 256


@dataclass(frozen=True)
class LoraSettings(ModelSettings):
    lora_modules: str = setting(
        "", "LORA_MODULES", "[adapters](lora.md) by the names that requests have as `model`: `name=path other=path`"
    )
    lora_dir: str = setting(
        "", "LORA_DIR", "a folder of adapters that requests may load and unload; empty: none may be loaded"
    )
    max_loras: int = setting(8, "MAX_LORAS", "adapters in memory at most", minimum=1, maximum=1024)
    max_lora_rank: int = setting(16, "MAX_LORA_RANK", "rank of an adapter at most", minimum=1, maximum=1024)

    @property
    def has_loras(self) -> bool:
        """Return whether requests may use adapters, now or after loading them."""
        return bool(self.lora_modules or self.lora_dir)

    @property
    def lora_path(self) -> Path | None:
        return expanded("LORA_DIR", self.lora_dir).absolute() if self.lora_dir else None

    @property
    def lora_paths(self) -> dict[str, Path]:
        """Return the folders of LORA_MODULES by adapter name. Raises ConfigError."""
        return _read_modules(self.lora_modules, self.lora_path)

    def check_loras(self) -> None:
        if len(self.lora_paths) > self.max_loras:
            raise ConfigError(f"LORA_MODULES has {len(self.lora_paths)} adapters, MAX_LORAS is {self.max_loras}")
        for name in self.lora_paths.keys() & {OWN_NAME, *names_in(self.served_model_name)}:
            raise ConfigError(f"LORA_MODULES has {name!r}, which is the model's own name")


def _read_modules(text: str, lora_dir: Path | None) -> dict[str, Path]:
    """Parse `name=path`, several of them separated by blanks, or JSON: an object with `name` and `path`, or a list of
    such objects. A relative path begins at `lora_dir`. Raises ConfigError.
    """
    modules: dict[str, Path] = {}
    for name, path in _pairs(text):
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LEN or not isinstance(path, str) or not path:
            what = f"a name of 1 to {MAX_NAME_LEN} characters and a path"
            raise ConfigError(f"LORA_MODULES has {name!r}={path!r}, it must have {what} for each adapter")
        if name in modules:
            raise ConfigError(f"LORA_MODULES has {name!r} twice")
        modules[name] = (lora_dir or Path()) / path
        if not modules[name].is_absolute():
            raise ConfigError(f"LORA_MODULES has {name!r} in {path!r}; without LORA_DIR it must be an absolute path")
    return modules


def _pairs(text: str) -> Iterator[tuple[Any, Any]]:
    if text.lstrip()[:1] not in ("[", "{"):
        for item in text.split():
            name, sign, path = item.partition("=")
            if not sign:
                raise ConfigError(f"LORA_MODULES has {item!r}, it must be name=path, or JSON")
            yield name, path
        return
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"LORA_MODULES is no JSON: {error}") from None
    for each in given if isinstance(given, list) else [given]:
        if not isinstance(each, dict):
            raise ConfigError(f"LORA_MODULES has {each!r}, it must be an object with `name` and `path`")
        yield each.get("name"), each.get("path")
