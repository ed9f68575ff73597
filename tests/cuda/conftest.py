"""Fixtures of the GPU tests, which need a GPU or TRITON_INTERPRET=1. The latter runs the kernels on the CPU, slowly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.exporting.export import ExportOptions, export
from engine.models.adapters import identified
from tests import checkpoints, family_checkpoints
from tests.lora_adapters import make_adapter, merged
from tests.quantized_checkpoints import KINDS, make_quantized

if TYPE_CHECKING:
    import torch  # every module here skips itself where it is missing

ROOT = Path(__file__).parents[2]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not IS_INTERPRETED:
        pytest.skip("torch sees no GPU; TRITON_INTERPRET=1 runs these tests on the CPU")
    return torch.device("cpu")


@pytest.fixture(scope="session")
def two_devices(device) -> torch.device:
    """Return the device type of tests with ranks. With the interpreter the CPU is the device of both."""
    import torch

    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
    return device


@pytest.fixture(params=[2, 4])
def num_ranks(two_devices, request) -> int:
    """Return the number of ranks; it is limited by the number of devices."""
    import torch

    if two_devices.type == "cuda" and torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, torch sees {torch.cuda.device_count()}")
    return request.param


@pytest.fixture
def products_are_chains_of_sums(monkeypatch):
    """Replace products of the interpreter, which are those of BLAS: their order depends on where in a tile a row is,
    and they have no bfloat16.
    """
    if not IS_INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from engine.dtypes import FP8_VALUES

    def numbers(handle):
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        if handle.dtype.scalar == tl.float8e4nv:
            return FP8_VALUES[handle.data]
        return handle.data.astype(np.float32)

    def dot(self, a, b, sums, *_):
        x, y, total = numbers(a), numbers(b), sums.data.copy()
        for k in range(x.shape[-1]):
            total += x[..., k, None] * y[..., None, k, :]
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def exported():
    """Return a function that makes the exported golden model of a family, or a small one that is quantized in a foreign
    format. Models are kept in build/golden, which can be copied to a machine without Paddle.
    """

    def make(family: str, dtype: str = "float32", **options: object) -> Path:
        name = "-".join([family, dtype, *(f"{key}={value}" for key, value in options.items())])
        directory = ROOT / "build/golden" / name
        if not directory.exists():
            checkpoint = ROOT / "build/golden" / family
            if family in KINDS:
                checkpoint = checkpoint / "quantized"
            if not checkpoint.exists():
                if family in KINDS:
                    make_quantized(checkpoint.parent, family)
                else:
                    of_family = family_checkpoints if family in family_checkpoints.ALL else checkpoints
                    of_family.make_checkpoint(checkpoint, family)
            export(checkpoint, directory, ExportOptions(dtype, **options))
        return directory

    return make


@pytest.fixture(scope="session")
def adapted(exported):
    """Return the graph of a small model, two adapters, and the graphs of checkpoints with each of them merged in. They
    are kept in build/golden, which can be copied to a machine without Paddle.
    """
    graph_dir, folder, checkpoint = exported("qwen2"), ROOT / "build/golden/adapters", ROOT / "build/golden/qwen2"
    graphs, adapters = [graph_dir], []
    for seed, given in ((1, {"rank": 5}), (2, {"rank": 16, "target_modules": ["v_proj", "down_proj"]})):
        graph, adapter = folder / f"{seed}-merged", folder / f"{seed}"
        if not graph.exists():
            if not checkpoint.exists():
                checkpoints.make_checkpoint(checkpoint, "qwen2")
            make_adapter(adapter, checkpoint, seed, **given)
            export(merged(folder / f"{seed}-checkpoint", checkpoint, adapter), graph, ExportOptions())
        graphs.append(graph)
        adapters.append(identified(adapter))
    return graphs, adapters
