"""What the tests of the GPU share. They need one, or TRITON_INTERPRET=1, which runs the kernels on the CPU, slowly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.exporting.export import ExportOptions, export
from tests.checkpoints import make_checkpoint

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
def exported():
    """The exported golden model of a family. Kept in build/golden, which can be taken to where Paddle is not."""

    def make(family: str, dtype: str = "float32") -> Path:
        directory = ROOT / "build/golden" / f"{family}-{dtype}"
        if not directory.exists():
            checkpoint = ROOT / "build/golden" / family
            if not checkpoint.exists():
                make_checkpoint(checkpoint, family)
            export(checkpoint, directory, ExportOptions(dtype))
        return directory

    return make
