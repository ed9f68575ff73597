"""Identity of the served model, in a file of the run directory that exists once the model was reloaded under running
processes. The supervisor writes it; the gateway and the Triton model read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SERVED_FILE = "served.json"
OWN_NAME = "default"  # of the model on every server, beside its name


@dataclass(frozen=True)
class Served:
    id: str = ""  # never two models have the same; empty: the one of the start
    name: str = ""  # names for /v1/models, as SERVED_MODEL_NAME has them; empty: as the settings say
    is_changing: bool = False  # new requests wait, so that the open ones can end
    graph_dir: str = ""  # its folder, whose chat template requests are read by; empty: as the settings say

    def text(self) -> str:
        return json.dumps(asdict(self))


class ServedModel:
    """Reads the file when it has changed, so it may be asked for every request."""

    def __init__(self, run_path: Path):
        self._path = run_path / SERVED_FILE
        self._version: tuple[int, int] | None = None
        self._served = Served()

    def now(self) -> Served:
        try:
            found = self._path.stat()
            version = found.st_mtime_ns, found.st_ino
            if version != self._version:
                self._served, self._version = Served(**json.loads(self._path.read_text())), version
        except FileNotFoundError:
            self._served, self._version = Served(), None
        return self._served

    def names(self, of_settings: str) -> list[str]:
        """Return the names in /v1/models, of which answers have the first; `of_settings` is SERVED_MODEL_NAME."""
        return names_in(self.now().name or of_settings)

    def name(self, of_settings: str) -> str:
        """Return the first name."""
        return self.names(of_settings)[0]


def names_in(text: str) -> list[str]:
    """Return the names in a value of SERVED_MODEL_NAME, at least one."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or [OWN_NAME]
