"""The CPU ops by tile registers (AMX), on machines that have none: their instructions are made of plain code
(LLM_SOFT_TILES in engine/ops/cpu/tiles.h), everything around them is what such a machine runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops import build, cpu

ROOT = Path(__file__).parents[2]
# The first parametrize their tests over the instruction sets, the others take the one that CPU_ISA names.
OF_ALL_SETS = ("ops/test_cpu", "ops/test_invariance")
OTHERS = ("executors/test_cpu_program", "executors/test_batch_invariance")


@pytest.fixture(scope="module")
def soft_tiles(tmp_path_factory) -> Path:
    """Return a folder for ENGINE_BUILD_DIR: the ops of this build, with two files compiled anew."""
    folder = tmp_path_factory.mktemp("soft-tiles")
    into = Path(shutil.copytree(build.library(isas="supported").parent, folder / f"ops-{build.build_key()}"))
    objects = build.sources(into)
    for name in ("amx.o", "runtime.o"):
        flags = [*build.FLAGS, *objects[into / name], "-DLLM_SOFT_TILES"]
        subprocess.run([*build.compiler(), *flags, "-c", "-o", str(into / name)], check=True)
    build._link(into, list(objects))
    return folder


@pytest.mark.skipif("avx512_bf16" not in cpu.available_isas(), reason="what surrounds the registers is AVX-512")
def test_the_tests_of_the_ops_pass_with_tile_registers_of_plain_code(soft_tiles):
    environ = {**os.environ, "ENGINE_BUILD_DIR": str(soft_tiles), "CPU_ISA": "amx"}
    files = [f"tests/pure/{name}.py" for name in (*OF_ALL_SETS, *OTHERS)]
    others = " or ".join(Path(name).name for name in OTHERS)
    command = [sys.executable, "-m", "pytest", *files, "-q", "-k", f"amx or {others}", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) > 200
