"""Exports a checkpoint into the cache, unless it is there or is exported already: for `start_server`.

`python -m server_scripts.export_model CHECKPOINT CACHE [QUANT]` writes `step TEXT` lines and `result FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.errors import SetupError
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.exporting.manifest import is_exported
from engine.settings.config import Config
from server_scripts.model_source import as_dtype
from server_scripts.run_dir import make_folder


def main(arguments: list[str]) -> int:
    checkpoint_dir, cache_dir = map(Path, arguments[:2])
    quant = arguments[2] if len(arguments) > 2 else None
    try:
        print("result", graph_of(checkpoint_dir, cache_dir, quant), flush=True)
    except (SetupError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def graph_of(checkpoint_dir: Path, cache_dir: Path, quant: str | None) -> Path:
    if is_exported(checkpoint_dir):
        return checkpoint_dir
    config = Config.from_env()
    make_folder("EXPORT_CACHE_DIR", cache_dir)
    options = ExportOptions(dtype=as_dtype(quant, config), block_size=config.block_size, num_ranks=config.mp_num)
    return export_cached(checkpoint_dir, cache_dir, options, lambda step: print("step", step, flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
