"""The ops of `docs/ops.md` on NVIDIA GPUs: the functions of `engine.ops.reference` on torch's tensors.

Matrix products of many rows are torch's (cuBLASLt), all else is kernels in the Triton language, which the interpreter
of that language (TRITON_INTERPRET=1) also runs on the CPU. Activations have the type of the embedding table, float32,
bfloat16 or float16; sums are float32. Grids follow from shapes alone, never from values: every call can be part of a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from engine.ops.catalogue import OPS
from engine.ops.cuda.group import broadcast
from engine.ops.cuda.pointwise import last_tokens_in

__all__ = ["last_tokens_in", "broadcast", "packer"]


def __getattr__(name: str) -> Any:
    """Return the function of an op of the catalogue, which names the module that it is in."""
    if name not in OPS or not OPS[name].cuda:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_module(name), name)


def packer(op: str) -> Callable | None:
    """Return the function that puts weights in the order in which a linear layer's `op` reads them, if it has one."""
    return getattr(_module(op), "PACKED_BY", {}).get(op) if OPS[op].cuda else None


def _module(op: str) -> ModuleType:
    return import_module(f"{__name__}.{OPS[op].cuda}")
