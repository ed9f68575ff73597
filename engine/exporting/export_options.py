"""Export options from the settings, including number formats that depend on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from engine.exporting.export import ExportOptions
from engine.exporting.manifest import CONFIG
from engine.models import support
from engine.models.config import EAGLE3_GRAPH, MTP_GRAPH
from engine.models.config_fields import read_json
from engine.models.formats import without_cache
from engine.models.modelopt import read_config
from engine.models.quantization import is_fp8, is_mxfp4
from engine.settings.config import Config
from engine.settings.device import GPU, with_device


def options_of(config: Config, checkpoint_dir: Path) -> ExportOptions:
    """Return the options of the export. Unless a type is requested, 8-bit floats, and experts of
    4-bit floats, are kept on a GPU. Raises
    ConfigError, also for a family that the device cannot run."""
    _check_device(config, checkpoint_dir)
    if config.dtype == "float16" and with_device(config).device != GPU:
        raise ConfigError(
            "DTYPE or the model's name asks for float16, which only GPUs compute with: take bfloat16 or float32"
        )
    quant_type, has_int8_cache = without_cache(config.quant_type)
    options = ExportOptions(
        config.dtype,
        quant_type,
        config.block_size,
        num_ranks=config.mp_num,
        ranks=config.machines.exported_ranks,
        int8_cache=config.use_cache_kv_int8 or has_int8_cache,
        load_format=config.load_format,
        hf_overrides=config.hf_overrides,
        mtp=config.speculate_method == MTP_GRAPH,
        eagle3=str(config.draft_model_path) if config.speculate_method == EAGLE3_GRAPH else "",
        expert_parallel=config.enable_expert_parallel,
    )
    is_free = (options.dtype, options.quant_type, options.load_format) == ("auto", "none", "auto")
    if not is_free or config.batch_invariant or not (checkpoint_dir / CONFIG).exists():
        return options
    keys = read_config(checkpoint_dir)
    kept = "weight_only_fp8" if is_fp8(keys) else "mxfp4" if is_mxfp4(keys) else ""
    return replace(options, quant_type=kept) if kept and with_device(config).device == GPU else options


def _check_device(config: Config, checkpoint_dir: Path) -> None:
    """Raise ConfigError if the model's family needs an op that the device has no kernel for."""
    if not (checkpoint_dir / CONFIG).exists():
        return
    model_type = read_json(checkpoint_dir / CONFIG).get("model_type")
    only_cpus = [each.model_type for each in support.FAMILIES if not each.runs_on_gpus]
    if model_type in only_cpus and with_device(config).device == GPU:
        raise ConfigError(
            f"config.json: model_type is {model_type!r}, which has no kernels for GPUs yet; set DEVICE=cpu to run it"
        )
