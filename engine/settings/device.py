"""Choice of the device that DEVICE selects on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import replace

from engine.errors import ConfigError
from engine.settings.config import Config

CPU, GPU = "cpu", "gpu"
MIN_CAPABILITY = (8, 0)  # bfloat16 products and conversions are instructions of these GPUs


def with_device(config: Config) -> Config:
    """Return `config` with `auto` replaced by the device that it selects. Raises ConfigError if a GPU is requested and
    none can be used.
    """
    if config.device == CPU:
        return config
    trouble = _why_no_gpu()
    if trouble and config.device == GPU:
        raise ConfigError(f"DEVICE is 'gpu', but {trouble}")
    return replace(config, device=CPU if trouble else GPU)


def may_be_gpu(config: Config) -> bool:
    """Return whether a GPU may be used, without the seconds that an exact check takes."""
    return config.device != CPU and not _missing_package()


def check_packages(config: Config) -> None:
    """Raise ConfigError where a GPU is asked for and the packages for one are missing, without importing them."""
    if config.device == GPU and (package := _missing_package()):
        raise ConfigError(f"DEVICE is 'gpu', but {package} is missing: pip install .[cuda]")


def _missing_package() -> str:
    return next((name for name in ("torch", "triton") if importlib.util.find_spec(name) is None), "")


@functools.cache
def _why_no_gpu() -> str:
    """Return why no GPU can be used; empty if one can."""
    if package := _missing_package():
        return f"{package} is missing: pip install .[cuda]"
    import torch  # only here: it takes seconds to import, and CPU users need not have it

    return _too_old(0) if torch.cuda.is_available() else "torch sees no GPU"


def _too_old(index: int) -> str:
    """Return what is wrong with the compute capability of a GPU, empty if nothing is."""
    import torch

    found = torch.cuda.get_device_capability(index)
    if found >= MIN_CAPABILITY:
        return ""
    (major, minor), name = found, torch.cuda.get_device_name(index)
    needed = ".".join(map(str, MIN_CAPABILITY))
    return f"GPU {index}, {name}, has compute capability {major}.{minor}, {needed} or more is needed (docs/gpu.md)"


def take_gpus(config: Config) -> None:
    """Make only the GPUs of this engine visible to this process and its ranks. Must be called before CUDA is
    initialized. Raises ConfigError if there are too few for all engines."""
    if config.data_parallel_size == 1 or not may_be_gpu(config):
        return
    import torch

    num_gpus, needed = torch.cuda.device_count(), config.data_parallel_size * config.mp_num
    if num_gpus == 0:
        return  # `with_device` decides
    if needed > num_gpus:
        raise ConfigError(
            f"DATA_PARALLEL_SIZE is {config.data_parallel_size} and MP_NUM {config.mp_num}: each of the {needed} ranks"
            f" needs a GPU of its own and torch sees {num_gpus} (CUDA_VISIBLE_DEVICES says which those may be)"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    first = config.engine_index * config.mp_num
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + config.mp_num])


def check_gpus(config: Config) -> None:
    """Raise ConfigError unless each rank of this machine can have its own GPU."""
    import torch

    machines = config.machines
    count, where, whose = len(machines.ranks), f"MP_NUM is {config.mp_num}", "each rank"
    if machines.num_hosts > 1:
        where += f" and MP_NNODE {machines.num_hosts}"
        whose = f"each of the {count} ranks on {machines.ips[machines.host]}"
    if config.mp_num > 1 and config.batch_invariant:
        raise ConfigError(f"BATCH_INVARIANT is 1 and MP_NUM {config.mp_num}; on GPUs only one rank keeps that promise")
    if count > torch.cuda.device_count():
        raise ConfigError(
            f"{where}, {whose} needs a GPU of its own and torch sees {torch.cuda.device_count()}"
            " (CUDA_VISIBLE_DEVICES says which those may be)"
        )
    if trouble := next(filter(None, map(_too_old, range(count))), ""):
        raise ConfigError(f"{where}, but {trouble}; CUDA_VISIBLE_DEVICES leaves it out")
