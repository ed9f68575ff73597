"""Sizing of the KV cache: how many blocks fit beside the longest step. Independent of what a block contains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine.core.cache_groups import FULL_ATTENTION, STATE, CacheGroup
from engine.core.executor import Executor
from engine.core.types import Arrival, Batch, Row, Sampling
from engine.errors import ConfigError
from engine.executors.nixl_blocks import staging_bytes
from engine.settings.config import Config
from engine.settings.device import GPU, with_device

log = logging.getLogger(__name__)

# Files of cgroup v2 and v1: limit, usage, and the field of memory.stat that counts cached files, which are reclaimable.
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def allocate_cache(executor: Executor, config: Config, model_len: int) -> int:
    """Allocate the largest KV cache that settings and memory allow, after running the longest step on a small one.
    Return its number of blocks. Raises ConfigError when there is no room."""
    config, model_len = with_device(config), config.model_len(model_len)
    num_tokens = min(config.max_step_tokens, model_len)
    small = max(-(-num_tokens // executor.block_size), *(group.num_parts for group in executor.cache_groups))
    executor.allocate(small)
    executor.warm_up()
    run_longest_step(executor, config, model_len, small)
    sizes = BlockSizes(executor.block_size, executor.block_bytes, executor.cache_groups)
    free_bytes = max(0, executor.free_bytes() - staging_bytes(config, executor.block_bytes))
    count = num_blocks(config, model_len, sizes, free_bytes)
    executor.allocate(count)
    if config.use_warmup:
        run_longest_step(executor, config, model_len, count)
    return count


def check_host_memory(config: Config) -> None:
    """Raise ConfigError if SWAP_SPACE or EXPERTS_ON_HOST has no effect on the device or does not fit into memory.
    `config` has a device."""
    on_cpus = {
        "SWAP_SPACE": "the KV cache is in the host's memory itself: BLOCK_BS makes it larger",
        "EXPERTS_ON_HOST": "all weights are in the host's memory: set it to 0",
    }
    free = free_memory_bytes() / 2**30
    for name, reason in on_cpus.items():
        wanted = getattr(config, name.lower())
        if wanted and config.device != GPU:
            raise ConfigError(f"{name} is {wanted:g}, but on the CPU {reason}")
        own = wanted / config.machines.num_hosts
        if own > free:
            share = "" if own == wanted else f", of which {own:g} on each of {config.machines.num_hosts} hosts"
            raise ConfigError(f"{name} is {wanted:g} GiB{share}, the host has {free:.1f} GiB free")
        free -= own


def run_longest_step(executor: Executor, config: Config, model_len: int, num_blocks: int) -> None:
    """Run the longest step that a cache of `num_blocks` blocks allows. It overwrites the content of the cache."""
    num_tokens = min(config.max_step_tokens, model_len, num_blocks * executor.block_size)
    arrival = Arrival(0, [0] * num_tokens, num_tokens, Sampling(max_new_tokens=1))
    count = -(-num_tokens // executor.block_size)
    # Lists, because other ranks receive them as a message.
    blocks = [list(range(group.num_parts if group.kind == STATE else count)) for group in executor.cache_groups]
    row = Row(0, 0, [0] * num_tokens, blocks)
    executor.launch(Batch([row], [arrival])).result()


class BlockSizes(NamedTuple):
    """Sizes that determine how many blocks of the pool a request needs."""

    block_size: int  # tokens
    block_bytes: int
    groups: Sequence[CacheGroup] = FULL_ATTENTION

    def blocks_for(self, num_tokens: int, max_chunk: int) -> int:
        """Return how many blocks a request of `num_tokens` tokens needs if its prompt is computed in chunks of
        `max_chunk`."""
        count = -(-num_tokens // self.block_size)
        return sum(group.max_blocks(count, self.block_size, max_chunk) for group in self.groups)


def num_blocks(config: Config, model_len: int, sizes: BlockSizes, free_bytes: int) -> int:
    """Return the number of blocks of the pool. Raises ConfigError if they do not fit into `free_bytes`.

    NUM_GPU_BLOCKS_OVERRIDE is that number itself; BLOCK_BS is a multiple of the blocks of the longest request. Without
    either, the pool takes `free_bytes`, on the CPU only the share KV_CACHE_MEMORY_FRACTION of them, but never more than
    BATCH_SIZE requests of `model_len` tokens can use.
    """
    longest = min(model_len, config.max_prompt_len + config.max_answer_len)
    per_request, block_bytes = sizes.blocks_for(longest, config.max_step_tokens), sizes.block_bytes
    is_gpu, fitting = config.device == GPU, free_bytes // block_bytes
    if is_gpu and config.num_gpu_blocks_override:
        count, origin = config.num_gpu_blocks_override, f"NUM_GPU_BLOCKS_OVERRIDE is {config.num_gpu_blocks_override}"
        most = float(fitting)
    elif config.block_bs is not None:
        count, origin = int(config.block_bs * per_request), f"BLOCK_BS is {config.block_bs:g}"
        most = int(100 * free_bytes / block_bytes / per_request) / 100
    else:
        share = 1 if is_gpu else config.kv_cache_memory_fraction
        count = min(int(fitting * share), config.batch_size * sizes.blocks_for(model_len, config.max_step_tokens))
        name = "GPU_MEMORY_UTILIZATION" if is_gpu else "KV_CACHE_MEMORY_FRACTION"
        origin = f"{name} is {getattr(config, name.lower()):g}"
        most = float(count)
    if count > fitting:
        raise ConfigError(
            f"{origin}: {count} blocks need {count * block_bytes / 2**30:.1f} GiB, "
            f"{free_bytes / 2**30:.1f} GiB are free; at most {most:g} fits"
        )
    if count < 1:
        raise ConfigError(
            f"{origin}, it must be larger: of the {free_bytes / 2**30:.1f} GiB that are free the KV cache would have no"
            f" block, a request of {longest} tokens needs {per_request}"
        )
    if count < per_request:
        text = (
            "%s: the KV cache has %d blocks. A request of the greatest length (%d tokens) needs %d and will be refused"
        )
        log.warning(text, origin, count, longest, per_request)
    return count


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Return the bytes that the machine, or its container if that is less, can still allocate."""
    free = _fields(proc / "meminfo")["MemAvailable:"] * 1024
    for limit, usage, cache in CGROUP_FILES:
        try:
            maximum, current = (cgroup / limit).read_text().strip(), int((cgroup / usage).read_text())
        except OSError:
            continue
        if maximum.isdigit():
            cached = _fields((cgroup / usage).with_name("memory.stat")).get(cache, 0)
            free = min(free, int(maximum) - current + cached)
    return max(free, 0)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line, by name; an empty dict if the file is
    missing."""
    lines = (line.split() for line in (path.read_text().splitlines() if path.exists() else ()))
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1}
