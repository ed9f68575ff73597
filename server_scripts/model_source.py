"""From a model's name or directory to an exported graph on this disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError, SetupError
from engine.models.checkpoint import read_json
from engine.models.config import read_config
from engine.models.keys import ModelError
from engine.settings.config import Config
from server_scripts import logs
from server_scripts.child import EXEC_CHILD, ROOT

Tell = Callable[[str], None]
EXPORTER = "server_scripts.export_model"
EXPORT_LOG = "export.log"


class ModelUnavailable(SetupError):
    """There is no model to serve; the message says why."""


@dataclass(frozen=True)
class Source:
    """Where the model is, exported or not yet."""

    path: Path
    label: str  # for people and for /v1/models
    quant: str | None = None  # that its name asks for


def find_source(config: Config, name: str, tell: Tell) -> Source:
    """Fetches the model if it goes by a name. Raises ModelUnavailable, and ConfigError for what the name asks for."""
    if name:
        return _download(config, name, tell)
    path = Path(config.model_dir).expanduser().absolute()
    if not (path / "config.json").exists():
        what = "which has no config.json" if path.is_dir() else "which is no folder"
        raise ModelUnavailable(
            f"MODEL_DIR is {config.model_dir!r}, {what}. Set MODEL_DIR to a checkpoint or an exported model, "
            "or name a model to fetch: start_server org/model"
        )
    return Source(path, config.served_model_name or path.resolve().name)


def _download(config: Config, name: str, tell: Tell) -> Source:
    from download_model import Options, download, parse_model_name  # only now: a model that is here needs no network
    from engine.download.files import DownloadError

    try:
        quant = parse_model_name(name)[1]
        options = Options.from_env(check_config=_refuse_unsupported)
    except DownloadError as error:
        raise ModelUnavailable(str(error)) from None
    if options.mirror is None:
        as_dtype(quant, config)  # raises before gigabytes are fetched
    tell(f"fetching {name} into {config.model_dir}")
    logging.basicConfig(stream=sys.stdout, format="           %(message)s")
    logging.getLogger("engine.download").setLevel(logging.INFO)
    try:
        done = download(name, Path(config.model_dir).expanduser(), options)
    except (DownloadError, ModelError, OSError) as error:
        raise ModelUnavailable(f"fetching {name}: {error}") from None
    tell(f"{name} is complete, {done.num_fetched} files fetched")
    return Source(done.model_dir.absolute(), config.served_model_name or name, None if done.is_static else quant)


def _refuse_unsupported(config_json: Path) -> None:
    read_config(read_json(config_json))


def export_if_needed(config: Config, source: Source, tell: Tell) -> Path:
    """The exported model's folder. Exporting is left to a process of its own, which may load Paddle."""
    log_path = config.log_path / EXPORT_LOG
    command = [sys.executable, "-I", "-S", str(EXEC_CHILD), str(os.getpid())]
    command += [sys.executable, "-m", EXPORTER, str(source.path), str(Path(config.export_cache_dir).expanduser())]
    command += [source.quant] if source.quant else []
    with log_path.open("wb") as log:
        exporter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    assert exporter.stdout
    result = ""
    try:
        for line in exporter.stdout:
            kind, _, text = line.rstrip("\n").partition(" ")
            if kind == "result":
                result = text
            elif kind == "step":  # a library may have something to say there, too
                tell(text)
    finally:
        exporter.stdout.close()
        if not result:
            exporter.terminate()
        status = exporter.wait()
    if status != 0:
        last_lines = "\n".join(logs.tail(log_path, 5))
        raise ModelUnavailable(f"exporting {source.path}: {last_lines or f'exit status {status}'}")
    return Path(result)


def as_dtype(quant: str | None, config: Config) -> str:
    """What the third part of a model's name asks the export for."""
    if quant is None:
        return config.dtype
    if quant in ("float32", "bfloat16"):
        return quant
    raise ConfigError(f"the name asks for {quant}, exporting as that is not supported yet; leave it out of the name")
