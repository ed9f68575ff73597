"""How many KV blocks fit. Knows the machine's memory and the settings, not what a block is made of."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.errors import ConfigError


def num_blocks(config: Config, model_len: int, block_size: int, block_bytes: int, free_bytes: int) -> int:
    """Blocks of the pool. With BLOCK_BS: BLOCK_BS times the blocks of the longest request. Without: what the share
    KV_CACHE_MEMORY_FRACTION of `free_bytes` holds, but no more than BATCH_SIZE of the longest requests can use."""
    per_request = -(-max(config.max_dec_len, model_len) // block_size)
    if config.block_bs is not None:
        count, origin = int(config.block_bs * per_request), f"BLOCK_BS is {config.block_bs:g}"
        if count * block_bytes > free_bytes:
            raise ConfigError(
                f"{origin}: {count} blocks need {count * block_bytes / 2**30:.1f} GiB, "
                f"{free_bytes / 2**30:.1f} GiB are free; at most {free_bytes / block_bytes / per_request:.2f} fits"
            )
    else:
        fitting = int(free_bytes * config.kv_cache_memory_fraction / block_bytes)
        count, origin = min(fitting, config.batch_size * per_request), "by free memory"
    if count < 1:
        raise ConfigError(f"the KV cache would have no block ({origin}); the longest request needs {per_request}")
    return count


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """What the machine, or the container if that is less, can still give."""
    lines = (proc / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            maximum, current = (cgroup / limit).read_text().strip(), (cgroup / usage).read_text()
        except OSError:
            continue
        if maximum.isdigit():
            free = min(free, int(maximum) - int(current))
    return max(free, 0)
