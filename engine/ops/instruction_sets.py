"""The instruction sets that the CPU kernels are compiled for, and the one that this machine needs."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

X86 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*X86, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# g++ 12 warns of its own intrinsics (GCC bug 105593).
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
BF16 = ["-mavx512vnni", "-mavx512bf16"]
COMPILER_FLAGS = {
    "portable": [],
    "avx2": X86,
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, *BF16],
    "amx": [*AVX512, *BF16, "-DLLM_TILES"],
}
# What /proc/cpuinfo must say, beside the flags of the sets below it; `cpu/runtime.cc` decides by the same bits.
CPU_FLAGS = {
    "portable": [],
    "avx2": ["avx2", "fma"],
    "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq"],
    "avx512_bf16": ["avx512_vnni", "avx512_bf16"],
    "amx": ["amx_tile", "amx_bf16", "amx_int8"],
}
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


def wanted_isa() -> str | None:
    """Return the instruction set to compile for; None: all."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    given = os.environ.get("CPU_ISA")
    return given if given in COMPILER_FLAGS else best_isa(Path("/proc/cpuinfo").read_text())


def supported_isas() -> list[str] | None:
    """Return the instruction sets that this machine can run, the best one last; None: there is only one."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    names = list(COMPILER_FLAGS)
    return names[: names.index(best_isa(Path("/proc/cpuinfo").read_text())) + 1]


def best_isa(cpuinfo: str) -> str:
    """Return the best instruction set of this machine by its /proc/cpuinfo, as `cpu/runtime.cc` does."""
    found = re.search(r"^flags\s*: (.*)$", cpuinfo, re.M)
    flags, best = set(found[1].split()) if found else set(), "portable"
    for isa, needed in CPU_FLAGS.items():
        if not flags.issuperset(needed) or (isa == "amx" and not _may_use_tiles()):
            break
        best = isa
    return best


def _may_use_tiles() -> bool:
    """Ask the operating system, which must save the tile registers."""
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
