"""Building the CPU ops: without warnings, once, and with a clear word when it cannot be done."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.ops import build, cpu, instruction_sets
from tests.server import ROOT

# What an optimizer believes of code that is right differs from one version to the next.
BELIEFS = ("uninitialized]", "-Warray-bounds]", "-Wstringop-overflow=]", "-Wstringop-overread]")


def test_sources_compile_without_a_warning():
    said = build.library().with_name(build.WARNINGS).read_text().splitlines()
    assert [line for line in said if "warning:" in line and not line.endswith(BELIEFS)] == []


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in instruction_sets.COMPILER_FLAGS if isa not in cpu.available_isas()])
def test_the_compiler_accepts_the_sources_for_instruction_sets_that_this_machine_lacks(isa, tmp_path):
    arguments = build.sources(tmp_path, [isa]).get(tmp_path / f"{isa}.o")
    if arguments is None:
        pytest.skip("for another kind of processor")
    command = [*build.compiler(), *build.FLAGS, *arguments, "-Werror", "-fsyntax-only"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_kernels_share_no_code_between_instruction_sets():
    """A template of the standard library would be linked once, perhaps for instructions that a machine lacks."""
    folder = build.library().parent
    for isa in cpu.available_isas():
        command = ["nm", str(folder / f"{isa}.o")]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        shared = [line for line in listing.splitlines() if " W " in line]
        assert shared
        own = (f"{len(isa)}{isa}", f"llm_kernels_{isa}")  # the namespace and the table of kernels, in mangled names
        assert [line for line in shared if not any(name in line for name in own)] == []


def test_the_build_of_the_kernels_imports_no_package_because_none_may_be_installed_yet():
    code = "import engine.ops.build; engine.ops.build.generated.files()"
    subprocess.run([sys.executable, "-S", "-E", "-c", code], cwd=ROOT, check=True)  # -S: without site-packages


def test_a_missing_compiler_is_named(tmp_path):
    environment = {**os.environ, "CXX": "no-such-compiler", "ENGINE_BUILD_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.ops.build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("the C++ compiler 'no-such-compiler' is not on the PATH; install g++")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_compiler_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("ENGINE_BUILD_DIR", str(tmp_path))
    for cached in (build.build_key, build.source_key):
        cached.cache_clear()
    with pytest.raises(build.BuildError, match="failed with exit status 1"):
        build.library()
    for cached in (build.build_key, build.source_key):
        cached.cache_clear()
    assert list(tmp_path.glob("ops-*")) == []


@pytest.mark.slow
def test_an_interrupted_build_leaves_no_compiler_behind(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('[ "$1" = --version ] || { : > "$0.begun.$$"; sleep 1; : > "$0.ended.$$"; }')
    environment = {**os.environ, "CXX": f"sh {compiler}", "ENGINE_BUILD_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.ops.build"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as building:
        while not list(tmp_path.glob("compiler.begun.*")):
            time.sleep(0.01)
        building.terminate()
        assert building.communicate()[1] == "interrupted\n"
    assert building.returncode == 130
    assert len(list(tmp_path.glob("compiler.begun.*"))) == len(list(tmp_path.glob("compiler.ended.*")))
    assert list(tmp_path.glob("ops*/")) == []


def test_a_first_use_says_that_it_compiles(tmp_path):
    environment = {**os.environ, "CXX": "true", "ENGINE_BUILD_DIR": str(tmp_path)}
    command = [sys.executable, "-c", "from engine.ops import build; build._link = lambda *_: None; build.library()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert re.match(r"compiling \d+ files of the CPU ops", done.stderr)


def test_a_folder_in_which_nothing_can_be_built_is_named_by_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINE_BUILD_DIR", str(tmp_path / "file" / "ops"))
    with pytest.raises(build.BuildError, match=f"^ENGINE_BUILD_DIR: the folder {tmp_path}/file/ops cannot be made"):
        build.library()
    monkeypatch.setenv("ENGINE_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(build.BuildError, match=f"^ENGINE_BUILD_DIR: the folder {tmp_path} cannot be written to"):
        build.library()


@pytest.fixture
def fake_builds(tmp_path, monkeypatch):
    """Return a build folder, with builds of empty files that take no time."""
    monkeypatch.setenv("ENGINE_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(build, "sources", lambda into, isa: {})
    monkeypatch.setattr(build, "_link", lambda folder, objects: (folder / build.KERNELS).touch())
    return tmp_path


def test_a_build_removes_builds_unused_for_a_month_and_remains_of_killed_builds(fake_builds):
    now = time.time()
    for name, days in {f"ops-{16 * 'a'}": 31, f"ops-{16 * 'b'}": 29, "ops.partial-old": 1, "ops-mine": 99}.items():
        (fake_builds / name).mkdir()
        (fake_builds / name / "file").touch()
        os.utime(fake_builds / name, (now, now - days * 86400))
    folder = build.library().parent
    assert {path.name for path in fake_builds.iterdir()} == {folder.name, f"ops-{16 * 'b'}", "ops-mine", "ops.lock"}


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return the names of the objects that were compiled, on a machine with AVX2."""
    names = []

    def run(command):
        if "-c" in command:
            path = Path(command[command.index("-o") + 1])
            names.append(path.stem)
            path.touch()
        return ""

    build.build_key()  # with the real compiler
    monkeypatch.setenv("ENGINE_BUILD_DIR", str(tmp_path))
    monkeypatch.delenv("CPU_ISA", raising=False)
    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(instruction_sets, "best_isa", lambda cpuinfo: "avx2")
    monkeypatch.setattr(build, "_link", lambda folder, objects: (folder / build.KERNELS).touch())
    return names


OTHERS = {"amx", "avx512_bf16", "avx512", "portable"}


@pytest.mark.skipif(build.wanted_isa() is None, reason="there is one instruction set")
def test_a_first_use_compiles_for_one_instruction_set_and_later_builds_compile_the_others(compiled):
    build.compile_kernels(print)
    assert "avx2" in compiled and not set(compiled) & {*OTHERS, "paddle_ops"}
    compiled.clear()
    folder = build.library().parent
    assert (folder.name, compiled) == (f"ops-{build.build_key()}-avx2", ["paddle_ops"])
    compiled.clear()
    supported = build.library(isas="supported").parent
    assert (supported.name, set(compiled)) == (f"ops-{build.build_key()}-up-to-avx2", {"portable"})
    assert build.library().parent == supported
    compiled.clear()
    every = build.library(isas="all").parent
    assert (every.name, set(compiled)) == (f"ops-{build.build_key()}", OTHERS - {"portable"})
    assert build.library().parent == build.library(isas="supported").parent == every


@pytest.mark.skipif(build.wanted_isa() is None, reason="there is one instruction set")
def test_a_build_without_the_instruction_set_that_is_named_is_not_used(compiled, monkeypatch):
    build.library(isas="supported")
    monkeypatch.setenv("CPU_ISA", "avx512")
    assert build.library().parent.name == f"ops-{build.build_key()}-avx512"


@pytest.mark.skipif(build.wanted_isa() is None, reason="there is one instruction set")
def test_the_instruction_set_that_is_named_is_compiled(compiled, monkeypatch):
    monkeypatch.setenv("CPU_ISA", "portable")
    assert build.library().parent.name == f"ops-{build.build_key()}-portable"
    assert "portable" in compiled and "avx2" not in compiled


AVX512 = "avx2 fma avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("sse4_2", "portable"),
        ("avx2", "portable"),
        ("avx2 fma", "avx2"),
        (f"{AVX512}", "avx512"),
        (f"{AVX512} avx512_vnni avx512_bf16", "avx512_bf16"),
        (f"{AVX512} avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8", "amx"),
        ("avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", "portable"),
    ],
)
def test_the_best_instruction_set_is_known_before_anything_is_compiled(monkeypatch, flags, isa):
    monkeypatch.setattr(instruction_sets, "_may_use_tiles", lambda: True)
    assert instruction_sets.best_isa(f"processor\t: 0\nflags\t\t: fpu {flags} x\nbugs\t: none\n") == isa
    monkeypatch.setattr(instruction_sets, "_may_use_tiles", lambda: False)
    assert instruction_sets.best_isa(f"flags\t\t: {flags}\n") == ("avx512_bf16" if isa == "amx" else isa)


def test_it_is_the_one_that_the_kernels_choose(monkeypatch):
    monkeypatch.delenv("CPU_ISA", raising=False)
    assert build.wanted_isa() in (None, cpu.available_isas()[0])


def test_a_build_that_is_used_counts_as_used(fake_builds):
    folder = build.library().parent
    os.utime(folder, (0, 0))
    build.library()
    assert time.time() - folder.stat().st_mtime < 60
