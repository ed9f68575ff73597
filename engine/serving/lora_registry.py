"""Registry of LoRA adapters by name: those of LORA_MODULES and those loaded or unloaded at run time. It is the only
list: each request carries its adapter to the engine, and the gateway asks for the names."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import wire
from engine.errors import InvalidRequest, UnknownModel, escape_braces
from engine.models.adapters import CONFIG, WEIGHTS, Adapter, AdapterError, checked
from engine.settings.config import Config
from engine.settings.processes import LORAS_FILE
from engine.wire import LOAD_LORA, LORA_FIELDS, UNLOAD_LORA, shown

log = logging.getLogger(__name__)


class LoraRegistry:
    """Loads, unloads and finds adapters. Thread-safe. With `file` the list is saved for the next process of the same
    server, in case this one dies. The constructor raises AdapterError if an adapter of the settings is invalid."""

    def __init__(self, config: Config, graph_dir: Path, file: Path | None = None):
        self._config, self._graph_dir, self._file = config, graph_dir, file
        self._server = [str(graph_dir), config.lora_modules, config.lora_dir]  # a file of another server is ignored
        self._lock = threading.Lock()
        saved = self._load_saved()
        self._adapters: Mapping[str, Adapter] = self._configured() if saved is None else saved
        self._save()

    @classmethod
    def of_server(cls, config: Config) -> LoraRegistry:
        """Return the registry that the processes of the server share by a file in RUN_DIR."""
        return cls(config, config.graph_path, config.run_path / LORAS_FILE)

    def names(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return [*self._adapters]

    def all(self) -> list[Adapter]:
        """Return the loaded adapters."""
        return [*self._adapters.values()]

    def find(self, name: str) -> Adapter:
        """Return the adapter called `name`. Raises UnknownModel."""
        try:
            return self._adapters[name]
        except KeyError:
            text = "The `{field}` {value} is not loaded; loaded adapters: {limit}"
            raise UnknownModel(text, field="lora_name", value=shown(name), limit=self.names()) from None

    def answer(self, body: Mapping[str, Any], owner: wire.Owner) -> wire.LoraList | None:
        """Load or unload an adapter if `body` asks for it and return the loaded names; otherwise return None. Raises
        RequestError."""
        for key, change in ((LOAD_LORA, self._load), (UNLOAD_LORA, self._unload)):
            if key in body:
                fields = LORA_FIELDS[key]
                given = wire.check_fields(wire.json_object(key, body[key]), fields)
                for name in fields.keys() - given.keys():
                    raise InvalidRequest("`{field}` is missing", field=name)
                self._check_may_change(owner)
                change(**given)
                log.info("%s: %s", key, shown(given["lora_name"]))
                return wire.LoraList(self.names())
        return None

    def _check_may_change(self, owner: wire.Owner) -> None:
        if not self._config.lora_dir:
            raise InvalidRequest("adapters are not loaded or unloaded while the server runs: LORA_DIR is not set")
        if owner.name:
            raise InvalidRequest("adapters are shared: clients with an API key of a named owner cannot change them")

    def _load(self, lora_name: str, lora_path: str) -> None:
        """Read and register an adapter. The disk is read without the lock, so the room is checked before and after."""
        self._check_room(lora_name)
        adapter = self._read(lora_path)
        with self._lock:
            self._check_room(lora_name)
            self._change({**self._adapters, lora_name: adapter})

    def _unload(self, lora_name: str) -> None:
        """Remove the name. Requests that use the adapter continue to use it."""
        with self._lock:
            self.find(lora_name)
            self._change({name: adapter for name, adapter in self._adapters.items() if name != lora_name})

    def _change(self, adapters: dict[str, Adapter]) -> None:
        self._adapters = adapters
        self._save()

    def _check_room(self, lora_name: str) -> None:
        if lora_name in self._adapters:
            raise InvalidRequest("The `{field}` {value} is loaded already", field="lora_name", value=shown(lora_name))
        if len(self._adapters) >= self._config.max_loras:
            text = "{value} adapters are loaded, at most MAX_LORAS({limit}) may be"
            value, limit = len(self._adapters), self._config.max_loras
            raise InvalidRequest(text, field="lora_name", value=value, limit=limit)

    def _read(self, lora_path: str) -> Adapter:
        assert self._config.lora_path
        folder = self._config.lora_path.resolve()
        try:
            path = (folder / lora_path).resolve()
            is_inside = all((path / name).resolve().is_relative_to(folder) for name in ("", CONFIG, WEIGHTS))
        except (OSError, ValueError, RuntimeError):  # no path, a loop of links
            is_inside = False
        if not is_inside:
            text = "The `{field}` {value} is not in LORA_DIR, or a link in it leads out"
            raise InvalidRequest(text, field="lora_path", value=shown(lora_path))
        try:
            return self._checked(path)
        except AdapterError as error:
            raise InvalidRequest(escape_braces(str(error)), field="lora_path") from None

    def _checked(self, path: Path) -> Adapter:
        return checked(path, self._graph_dir, self._config.max_lora_rank)

    def _configured(self) -> dict[str, Adapter]:
        return {name: self._checked(path) for name, path in self._config.lora_paths.items()}

    def _load_saved(self) -> dict[str, Adapter] | None:
        if self._file is None or not self._config.has_loras:
            return None
        try:
            server, adapters = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        return {name: tuple(adapter) for name, adapter in adapters.items()} if server == self._server else None

    def _save(self) -> None:
        if self._file is None or not self._config.has_loras:
            return
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")  # the engine may write the same file
        try:
            partial.write_text(json.dumps([self._server, self._adapters]))
            os.replace(partial, self._file)
        except OSError as error:  # disk full: the list is lost with this process
            log.error("%s could not be written: %s", self._file, error)
