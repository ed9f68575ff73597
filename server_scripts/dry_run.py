"""Memory that the server would need for a model, and whether it fits. `start_server --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.core.cache_groups import PAGED, STATE, CacheGroup
from engine.errors import ConfigError
from engine.executors.memory import BlockSizes, check_host_memory, free_memory_bytes, num_blocks
from engine.executors.nixl_blocks import staging_bytes
from engine.exporting.export_options import options_of
from engine.exporting.gguf_folder import as_checkpoint
from engine.exporting.manifest import Manifest, is_exported
from engine.exporting.sizing import ModelSizes, sizes_of
from engine.models.adapters import AdapterError, checked
from engine.settings.config import Config
from engine.settings.device import CPU, with_device

GIB = 2**30


def dry_run(config: Config, path: Path) -> tuple[list[str], bool]:
    """Return the lines of the report on the model in `path`, and whether it fits. Raises SetupError if the model or the
    settings are not supported."""
    config = with_device(config)
    model = model_sizes(config, path)
    _check_adapters(config, path)
    manifest = model.manifest
    sizes = _block_sizes(manifest)
    model_len = config.model_len(manifest.max_seq_len)
    longest = min(model_len, config.max_prompt_len + config.max_answer_len)
    per_request = sizes.blocks_for(longest, config.max_step_tokens) * sizes.block_bytes
    free = _free_bytes(config)
    weight_bytes, weight_lines = _weights(config, model)
    lines = [
        f"model     {path.name}: {manifest.weight_format}, ranks: {config.mp_num}, device: {config.device}",
        *weight_lines,
        *_cache_lines(sizes),
        f"request   {per_request / GIB:.3f} GiB per rank for the longest one, {longest} tokens",
        f"free      {free / GIB:.2f} GiB per rank",
    ]
    try:
        check_host_memory(config)
        if weight_bytes >= free:
            raise ConfigError("the weights alone do not fit")
        left = max(0, free - weight_bytes - staging_bytes(config, sizes.block_bytes))
        count = num_blocks(config, model_len, sizes, left)
    except ConfigError as error:
        return [*lines, f"fits      no: {error}"], False
    cache = count * sizes.block_bytes
    return [
        *lines,
        f"fits      yes: the KV cache gets {cache / GIB:.2f} GiB per rank, which is"
        f" {cache / per_request:.1f} of the longest requests (BATCH_SIZE is {config.batch_size});"
        " steps need memory, too",
    ], True


def model_sizes(config: Config, path: Path) -> ModelSizes:
    """Return what the model in `path` needs memory for. Raises SetupError if it is not supported."""
    path = as_checkpoint(path, Path(config.export_cache_dir).expanduser())
    if not is_exported(path, config.machines.exported_ranks):
        return sizes_of(path, options_of(config, path), widens_fp8=config.device == CPU)
    from engine import graph
    from engine.executors.cpu.fp8_weights import with_bf16_weights
    from engine.graph.experts import expert_sizes

    loaded = graph.load(path)
    params = with_bf16_weights(*loaded)[1] if config.device == CPU else loaded[1]
    return ModelSizes(Manifest.read(path), sum(array.nbytes for array in params.values()), expert_sizes(loaded[0]))


def _check_adapters(config: Config, path: Path) -> None:
    """Raise ConfigError if an adapter of LORA_MODULES cannot be read or does not fit the model in `path`."""
    try:
        for directory in config.lora_paths.values():
            checked(directory, as_checkpoint(path, Path(config.export_cache_dir).expanduser()), config.max_lora_rank)
    except AdapterError as error:
        raise ConfigError(f"LORA_MODULES: {error}") from None


def _weights(config: Config, model: ModelSizes) -> tuple[int, list[str]]:
    """Return the bytes of the weights on the device of a rank, and what is printed about them."""
    if not config.experts_on_host:
        return model.weight_bytes, [f"weights   {model.weight_bytes / GIB:.2f} GiB per rank"]
    host_bytes = model.experts.host_bytes(config.host_expert_bytes)
    stage_bytes = model.experts.stage_bytes(config.host_expert_bytes)
    num_bytes = model.weight_bytes - host_bytes + stage_bytes
    text = f"weights   {num_bytes / GIB:.2f} GiB per rank, with {stage_bytes / GIB:.2f} to which experts are copied"
    return num_bytes, [text, f"experts   {host_bytes / GIB:.2f} GiB per rank in the host's memory"]


def _block_sizes(manifest: Manifest) -> BlockSizes:
    decoder = manifest.graph()
    block_bytes = sum(cache.block_bytes for cache in decoder.caches)
    return BlockSizes(manifest.block_size, block_bytes, decoder.cache_groups)


def _cache_lines(sizes: BlockSizes) -> list[str]:
    """Return what the KV cache needs for a token, and what windows and states need for a request."""
    groups: Sequence[CacheGroup] = sizes.groups
    per_token = sum(group.kind == PAGED for group in groups) * sizes.block_bytes / sizes.block_size
    lines = [f"KV cache  {per_token / 1024:.1f} KiB per token and rank"]
    for kind in dict.fromkeys(group for group in groups if group.kind not in (PAGED, STATE)):
        per_window = groups.count(kind) * sizes.block_bytes * -(-kind.window // sizes.block_size)
        lines.append(f"windows   {per_window / 2**20:.1f} MiB per request and rank for windows of {kind.window} tokens")
    if parts := sum(group.num_parts for group in groups if group.kind == STATE):
        lines.append(f"states    {parts * sizes.block_bytes / 2**20:.1f} MiB per request and rank")
    return lines


def _free_bytes(config: Config) -> int:
    """Return the memory that a rank may use, for weights and KV cache."""
    if config.device == CPU:
        return free_memory_bytes() // (len(config.machines.ranks) * config.data_parallel_size)
    import torch  # only here: it takes seconds to import

    free, total = torch.cuda.mem_get_info(0)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free))
