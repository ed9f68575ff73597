"""Checkpoints that are exported once: a folder of results, each under a name that changes when the export would."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from dataclasses import asdict
from pathlib import Path

from engine.exporting.atomic_folder import is_complete
from engine.exporting.export import ExportOptions, copied_files, export
from engine.exporting.manifest import CONFIG, GRAPH_VERSION, is_exported, refuse_static_graph
from engine.file_lock import file_lock
from engine.log import Report
from engine.models import modelopt
from engine.models.checkpoint import weight_files
from engine.models.paddlenlp import rank_files
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WHOLE_UP_TO = 16 << 20  # bytes of a file that is read whole, such as a tokenizer's
NUM_PIECES, PIECE = 64, 16 << 10  # bytes; of a larger one, from its first to its last, at equal distances
LEFT_OVER_AFTER_S = 30 * 24 * 3600


def export_cached(checkpoint_dir: Path, cache_dir: Path, options: ExportOptions, report: Report = log.info) -> Path:
    """Return the folder of the exported checkpoint in the cache, and export it if necessary. A lock prevents two
    processes from exporting it at the same time.

    Raises TokenizerError before the export if the engine could not read the tokenizer.
    """
    checkpoint_dir = checkpoint_dir.resolve()
    refuse_static_graph(checkpoint_dir, options.ranks)
    name = f"{checkpoint_dir.name}-{_identity(checkpoint_dir, options)}"
    out_dir = cache_dir / name
    if _is_made(out_dir, options):
        return out_dir
    Tokenizer.load(checkpoint_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    waits = "wait for another process that exports the same checkpoint"
    with file_lock(cache_dir / f".{name}.lock", lambda: report(waits)):
        if not _is_made(out_dir, options):
            if out_dir.exists():
                report(f"{out_dir} is damaged, and is made anew")
                out_dir.rename(cache_dir / f".{name}.damaged.partial")
            _remove_leftovers(cache_dir, name)
            export(checkpoint_dir, out_dir, options, report)
    return out_dir


def _is_made(out_dir: Path, options: ExportOptions) -> bool:
    return is_complete(out_dir) and is_exported(out_dir, options.ranks)


def _remove_leftovers(cache_dir: Path, name: str) -> None:
    """Remove partial exports of killed processes: those of this export, whose lock is held, and old ones of others."""
    for path in cache_dir.glob(".*.partial"):
        if path.name.startswith(f".{name}.") or path.lstat().st_mtime < time.time() - LEFT_OVER_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _identity(checkpoint_dir: Path, options: ExportOptions) -> str:
    """Return a hash that changes whenever the result of the export would change."""
    paths = [checkpoint_dir / CONFIG, *checkpoint_dir.glob(modelopt.FILE)]
    if options.load_format != "dummy":
        paths += rank_files(checkpoint_dir) or weight_files(checkpoint_dir)
    paths += copied_files(checkpoint_dir)
    if options.eagle3:
        paths += [Path(options.eagle3) / CONFIG, *weight_files(Path(options.eagle3))]
    files = [(path.name, path.stat().st_mtime_ns, _fingerprint(path)) for path in paths]
    return hashlib.sha256(json.dumps([GRAPH_VERSION, asdict(options), files]).encode()).hexdigest()[:16]


def _fingerprint(path: Path) -> str:
    """Return a fingerprint of a file: of its whole content, or of its size and samples if it is large. Training changes
    every matrix, so models differ in the samples even if names, sizes and times are equal."""
    with path.open("rb") as file:
        size = path.stat().st_size
        found = hashlib.blake2b(str(size).encode(), digest_size=16)
        if size <= WHOLE_UP_TO:
            found.update(file.read())
        else:
            for index in range(NUM_PIECES):
                file.seek((size - PIECE) * index // (NUM_PIECES - 1))
                found.update(file.read(PIECE))
    return found.hexdigest()
