"""GGUF files as checkpoints: a folder with config.json, the tokenizer's files and links to the GGUF files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

from engine.exporting.atomic_folder import atomic_folder, is_complete
from engine.exporting.export import COPIED_FILES
from engine.exporting.manifest import CONFIG, GRAPH_VERSION
from engine.models.config_fields import ModelError
from engine.models.gguf_model import read_gguf
from engine.text.gguf_tokenizer import write_tokenizer

SUFFIX = ".gguf"
PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # at the end of the name of one of several files of a model
OTHER_WEIGHTS = ("*.safetensors", "*.pdparams", "*.pdiparams", "rank_*")


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files of the model that a user means by a file or a folder; none if it is not a GGUF model.

    Raises ModelError if a folder has several models.
    """
    if path.suffix == SUFFIX and path.is_file():
        stem = PART.sub("", path.stem)
        return sorted(other for other in path.parent.glob(f"*{SUFFIX}") if PART.sub("", other.stem) == stem)
    if not path.is_dir() or any(found for pattern in OTHER_WEIGHTS for found in path.glob(pattern)):
        return []
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))
    if len({PART.sub("", file.stem) for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} has several GGUF models: {names}; name the file of one of them")
    return files


def as_checkpoint(path: Path, cache_dir: Path) -> Path:
    """Return a folder in the cache that has a GGUF model as a checkpoint. Other paths are returned as they are.

    A tokenizer beside the file is preferred to that of its metadata. Raises ModelError and TokenizerError.
    """
    files = gguf_files(path)
    if not files:
        return path
    beside = [file for name in COPIED_FILES if (file := files[0].parent / name).is_file()]
    known = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in (*files, *beside)]
    digest = hashlib.sha256(json.dumps([GRAPH_VERSION, known]).encode()).hexdigest()[:16]
    folder = cache_dir / f"{PART.sub('', files[0].stem)}-{digest}"
    if is_complete(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    keys, _, metadata = read_gguf(files)
    with atomic_folder(folder) as partial:
        (partial / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")
        if not any(file.name == "tokenizer.json" for file in beside):
            write_tokenizer(metadata, partial)
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        for file in files:
            (partial / file.name).symlink_to(file.resolve())
    return folder
