"""Which numbers of a checkpoint an export keeps because of what will run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.exporting.export import ExportOptions
from engine.exporting.manifest import CONFIG
from engine.models.keys import read_json
from engine.models.quantization import is_fp8
from engine.settings.config import Config
from engine.settings.device import GPU, with_device


def with_kept(checkpoint_dir: Path, options: ExportOptions, config: Config) -> ExportOptions:
    """Where nothing else is asked for, 8-bit floats stay what they are on a GPU."""
    is_free = (options.dtype, options.quant_type, options.load_format) == ("auto", "none", "auto")
    if not is_free or config.batch_invariant or not (checkpoint_dir / CONFIG).exists():
        return options
    if is_fp8(read_json(checkpoint_dir / CONFIG)) and with_device(config).device == GPU:
        return replace(options, quant_type="weight_only_fp8")
    return options
