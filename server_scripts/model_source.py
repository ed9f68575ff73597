"""Resolution of a model's name or folder to an exported graph on this disk.

The export runs in its own process, which may load Paddle: `python -m server_scripts.model_source CHECKPOINT CACHE
[QUANT]` exports into the cache what is missing, and prints lines `step TEXT` and `result FOLDER`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import ConfigError, SetupError
from engine.settings.config import Config
from engine.settings.model import QUANT_TYPES
from server_scripts import logs
from server_scripts.child import PROCESS_GROUP, ROOT, without_secrets

EXEC_CHILD = Path(__file__).with_name("exec_child.py")  # the export ends when this process is killed
EXPORTER = "server_scripts.model_source"
GGUF = ".gguf"
EXPORT_LOG = "export.log"
WRONG_SETTING = 2  # exit status


class ModelUnavailable(SetupError):
    """There is no model to serve; the message gives the reason."""


@dataclass(frozen=True)
class ModelSource:
    """Location of the model, which may still have to be exported."""

    path: Path
    label: str  # name for messages and /v1/models
    quant: str | None = None  # quantization in the model's name


def local_folder(name: str, model_dir: str) -> Path | None:
    """Return the absolute path of the folder that the user means by `name`, or None if it names a model to fetch.

    A path begins with `.`, `/` or `~`, ends with `/`, or is that of a GGUF file. `org/model` is a folder if it contains
    a model. Below MODEL_DIR it is what an earlier start has fetched, perhaps incompletely, and remains a name.
    """
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or name.endswith("/") or (name.endswith(GGUF) and path.is_file()):
        return path.absolute()
    is_fetched = path.absolute() == (Path(model_dir).expanduser() / name).absolute()
    return path.absolute() if name and (path / "config.json").exists() and not is_fetched else None


def find_source(config: Config, name: str, report: Callable[[str], None]) -> ModelSource:
    """Return where the model is.

    Fetch it if `name` is a model's name and not an absolute path; without a name the model is in MODEL_DIR. Raise
    ModelUnavailable.
    """
    if name and not name.startswith("/"):
        return _download(config, name, report)
    path = Path(name or config.model_dir).expanduser().absolute()
    is_gguf = path.suffix == GGUF and path.is_file()
    if not is_gguf and not (path / "config.json").exists() and not any(path.glob(f"*{GGUF}")):
        what = "has no config.json" if path.is_dir() else "does not exist"
        if path.is_file():
            what = f"is a file but no {GGUF} file; the model is the folder that has config.json"
        elif path.name in QUANT_TYPES and path.parent.is_dir():  # as behind the name of a model
            what += f"; the precision of a model in a folder is an option: --quant-type {path.name}"
        kind = "" if path.is_file() else "the folder "
        given = f"the model is {kind}{name}, which" if name else f"MODEL_DIR is {config.model_dir!r}, which"
        raise ModelUnavailable(
            f"{given} {what}. Set MODEL_DIR to a checkpoint or an exported model, or name one: "
            "start_server ./folder, or start_server org/model to fetch it"
        )
    return ModelSource(path, config.served_model_name or path.resolve().name.removesuffix(GGUF))


def source_of_scheduler(config: Config, name: str) -> ModelSource:
    """Return the model that decode instances serve. It need not be on this machine."""
    path = Path(name or config.model_dir)
    return ModelSource(path, config.served_model_name or path.name)


def fetch_draft_model(config: Config, report: Callable[[str], None]) -> None:
    """Fetch the draft model into MODEL_DIR if SPECULATE_MODEL_PATH is a name. Raise ModelUnavailable."""
    if config.draft_model_name:
        _download(config, config.draft_model_name, report)


def _download(config: Config, name: str, report: Callable[[str], None]) -> ModelSource:
    from download_model import (  # imported late: a local model needs no network code
        DownloadOptions,
        download,
        parse_model_name,
    )
    from engine.download.files import DownloadError

    news = logging.Handler()
    news.emit = lambda record: report(record.getMessage())  # type: ignore[method-assign]
    download_log = logging.getLogger("engine.download")
    download_log.addHandler(news)
    download_log.setLevel(logging.INFO)
    try:
        quant = parse_model_name(name)[1]
        mode = "master" if config.machines.is_master else "slave"
        options = DownloadOptions.from_env(nnodes=config.mp_nnode, mode=mode)
        report(f"fetching {name} into {config.model_dir}")
        done = download(name, Path(config.model_dir).expanduser(), options)
    except (DownloadError, OSError) as error:
        meant = f". A folder is given as a path: start_server ./{name}" if "/" not in name else ""
        into = ""
        if isinstance(error.__cause__, OSError):
            into, meant = f" into MODEL_DIR, which is {config.model_dir!r}", "; set MODEL_DIR to another folder"
        raise ModelUnavailable(f"fetching {name}{into}: {error}{meant}") from None
    finally:
        download_log.removeHandler(news)
    report(f"{name} is complete, {done.num_fetched} files fetched")
    return ModelSource(done.model_dir.absolute(), config.served_model_name or name, None if done.is_static else quant)


def export_if_needed(config: Config, source: ModelSource, report: Callable[[str], None]) -> Path:
    """Return the folder of the exported model.

    Raise ModelUnavailable, or ConfigError if the settings do not fit the model.
    """
    replace(config, served_model_name=source.label).check_loras()
    log_path = config.log_path / EXPORT_LOG
    command = [sys.executable, "-I", "-S", str(EXEC_CHILD), str(os.getpid()), sys.executable, "-m", EXPORTER]
    command += [str(source.path), str(Path(config.export_cache_dir).expanduser()), *filter(None, [source.quant])]
    with log_path.open("wb") as log:
        env = without_secrets(os.environ)
        exporter = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env, **PROCESS_GROUP
        )
    assert exporter.stdout
    result = ""
    try:
        for line in exporter.stdout:
            kind, _, text = line.rstrip("\n").partition(" ")
            if kind == "result":
                result = text
            elif kind == "step":  # libraries may print other lines
                report(text)
    finally:
        exporter.stdout.close()
        if not result:
            exporter.kill()  # SIGTERM would let Paddle print a long report, and threads start further compilers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(exporter.pid, signal.SIGTERM)  # the compilers remove their files then
        status = exporter.wait()
    if status != 0:
        last_lines = "\n".join(logs.tail(log_path, 5))
        if status == WRONG_SETTING and last_lines:
            raise ConfigError(last_lines)
        raise ModelUnavailable(f"exporting {source.path}: {last_lines or f'exit status {status}'}")
    return Path(result)


def export_dtype(quant: str | None, config: Config) -> tuple[str, str]:
    """Return the dtype and the quantization of the export, from the third part of the model's name or from the
    settings."""
    if quant is None:
        return config.dtype, config.quant_type
    return (config.dtype, quant) if quant in QUANT_TYPES else (quant, "none")


def export(checkpoint_dir: Path, cache_dir: Path, quant: str | None = None) -> Path:
    """Export a checkpoint into the cache unless that was done before, and return the folder of the graph."""
    from engine.exporting.cache import export_cached
    from engine.exporting.export_options import options_of
    from engine.exporting.gguf_folder import as_checkpoint
    from engine.exporting.manifest import is_exported
    from engine.settings.unused import set_for_an_export

    config = Config.from_env()
    ranks = config.machines.exported_ranks
    checkpoint_dir = as_checkpoint(checkpoint_dir, cache_dir)
    if is_exported(checkpoint_dir, ranks):
        for name in set_for_an_export(config):
            print("step", f"note: {name} has no effect: {checkpoint_dir} is exported already", flush=True)
        return checkpoint_dir
    dtype, quant_type = export_dtype(quant, config)
    options = options_of(replace(config, dtype=dtype, quant_type=quant_type), checkpoint_dir)
    try:
        return export_cached(checkpoint_dir, cache_dir, options, lambda step: print("step", step, flush=True))
    except OSError as error:
        if str(cache_dir) not in str(error):  # the error is about the checkpoint
            raise
        raise ConfigError(f"EXPORT_CACHE_DIR is {str(cache_dir)!r}: {error}") from None


def export_draft(graph_dir: Path) -> None:
    """Export the draft model of the settings, if there is one. The engine finds it in the cache."""
    from engine.exporting.draft import export_draft_model

    config = Config.from_env()
    if config.machines.is_master:
        export_draft_model(graph_dir, config, lambda step: print("step", f"draft model: {step}", flush=True))


def check_settings(graph_dir: Path) -> None:
    """Raise SetupError if the engine could not run this graph with the settings.

    The check runs before any process is started.
    """
    from engine.executors import check_num_ranks
    from engine.executors.memory import check_host_memory
    from engine.exporting.manifest import Manifest
    from engine.images.reader import processor_of
    from engine.settings.device import GPU, with_device

    config, manifest = Config.from_env(), Manifest.read(graph_dir)
    config.model_len(manifest.max_seq_len)
    # Not checked on a GPU, where a model that is being replaced may still hold the memory.
    if (config.swap_space or config.experts_on_host) and (found := with_device(config)).device != GPU:
        check_host_memory(found)
    check_num_ranks(graph_dir, manifest, config)
    processor_of(config, graph_dir)
    if config.lora_modules:
        from engine.models.adapters import AdapterError
        from engine.serving.lora_registry import LoraRegistry

        try:
            LoraRegistry(config, graph_dir)
        except AdapterError as error:
            raise ConfigError(f"LORA_MODULES: {error}") from None


if __name__ == "__main__":
    try:
        graph_dir = export(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
        check_settings(graph_dir)
        export_draft(graph_dir)
        print("result", graph_dir, flush=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(WRONG_SETTING)
    except (SetupError, OSError) as error:
        sys.exit(str(error))
