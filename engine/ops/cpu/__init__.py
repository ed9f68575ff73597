"""The ops of `docs/ops.md` on the CPU: the functions of `engine.ops.reference`, done by the C++ kernels here.

`engine.ops.cpu.linear(x, weight)` uses the best instruction set of the machine, or the one that CPU_ISA
names; `load("avx2").linear(x, weight)` a chosen one. Compiled on first use.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from engine.errors import SetupError
from engine.ops.cpu.calls import NUMBER
from engine.ops.cpu.kernels import CpuOps
from engine.ops.cpu.library import c_library


class UnknownIsa(SetupError):
    """CPU_ISA names an instruction set that this build or this machine does not have."""


def load(isa: str | None = None) -> CpuOps:
    """Load the ops for an instruction set. None means the one that CPU_ISA names, or the best one."""
    return _load(isa or os.environ.get("CPU_ISA") or None)


@functools.cache
def _load(isa: str | None) -> CpuOps:
    lib = c_library()
    table = lib.llm_kernels(isa.encode() if isa else None)
    if not table:
        known, supported = (lib.llm_isas(only, 0).decode().split(",") for only in (0, 1))
        trouble = "this machine does not support it" if isa in known else "there is no such instruction set"
        raise UnknownIsa(f"CPU_ISA is {isa!r}: {trouble}; it must be one of {', '.join(supported)}")
    return CpuOps(lib, table)


def available_isas() -> list[str]:
    """Return what this machine and this build have, best first. `python -m engine.ops.build` builds all."""
    return c_library().llm_isas(1, 1).decode().split(",")


def cpu_isa() -> str:
    return load().isa


def num_threads() -> int:
    return c_library().llm_num_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads for all ops and all callers, including Paddle's ops."""
    if count < 1:
        raise ValueError(f"set_num_threads: count is {count}, it must be at least 1")
    c_library().llm_set_num_threads(count)


def __getattr__(name: str) -> Any:
    """Return an op of the default instruction set."""
    if name not in NUMBER and (name.startswith("_") or name not in vars(CpuOps)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load(), name)
