"""Which device DEVICE means on this machine."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

from engine.errors import ConfigError
from engine.settings.config import Config

CPU, GPU = "cpu", "gpu"


def with_device(config: Config) -> Config:
    """`auto` replaced by what it comes to. Raises ConfigError where a GPU is asked for and none can be used."""
    if config.device == CPU:
        return config
    trouble = _why_no_gpu()
    if trouble and config.device == GPU:
        raise ConfigError(f"DEVICE is 'gpu', but {trouble}")
    return replace(config, device=CPU if trouble else GPU)


@functools.cache
def _why_no_gpu() -> str:
    """Empty: there is one that can be used."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is missing: pip install .[cuda]"
    import torch  # only here: it takes seconds to import, and CPU users need not have it

    return "" if torch.cuda.is_available() else "torch sees no GPU"
