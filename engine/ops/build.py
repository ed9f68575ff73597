"""Compiles the CPU kernels and their Paddle wrapper: `python -m engine.ops.build`.

Both libraries lie in one folder named by a hash of all that made them. A folder under that name is
complete; processes that build at the same time wait for one another.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.errors import SetupError
from engine.file_lock import file_lock

SOURCES = Path(__file__).parent / "cpu"
KERNELS = "libllm_ops.so"
PADDLE_OPS = "libllm_paddle_ops.so"
WARNINGS = "warnings"  # what the compiler said; it lies beside the libraries with the objects, for the tests
PARTIAL = "ops.partial-"  # followed by anything: a build that is going on, or was killed
UNUSED_AFTER_S = 30 * 24 * 3600

X86 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*X86, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# g++ 12 warns of its own intrinsics (GCC bug 105593).
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
BF16 = ["-mavx512vnni", "-mavx512bf16"]
ISA_FLAGS = {
    "portable": [],
    "avx2": X86,
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, *BF16],
    "amx": [*AVX512, *BF16, "-DLLM_TILES"],
}
# No contraction: a*b + c must round alike in every loop the compiler makes of it.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-Wall", "-Wextra"]  # errors in the tests: a newer compiler may know new ones

Report = Callable[[str], None]

log = logging.getLogger(__name__)


class BuildError(SetupError):
    """The ops could not be compiled; the message says what is missing or what the compiler said."""


def build_dir() -> Path:
    default = Path(__file__).resolve().parents[2] / "build"
    return Path(os.environ.get("ENGINE_BUILD_DIR") or default)


def library(name: str = KERNELS, report: Report = log.warning) -> Path:
    """The path of an up-to-date library, compiled now if need be."""
    folder = build_dir() / f"ops-{build_key()}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"ENGINE_BUILD_DIR: the folder {folder.parent} cannot be made: {error.strerror}") from None
        if not os.access(folder.parent, os.W_OK):
            raise BuildError(f"ENGINE_BUILD_DIR: the folder {folder.parent} cannot be written to by this user")
        waits = "another process is compiling the ops, waiting for it"
        with file_lock(folder.parent / "ops.lock", lambda: report(waits)):
            if not folder.exists():
                _build(folder, report)
                _remove_unused(folder.parent)
    with contextlib.suppress(OSError):  # not ours to change
        os.utime(folder)  # it is in use
    path = folder / name
    if not path.exists():
        raise BuildError(f"{name} needs paddlepaddle, which is not installed")
    return path


@functools.cache
def build_key() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cc"), Path(__file__)]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_run([*compiler(), "--version"]).encode())
    digest.update(f"{platform.machine()} paddle {_paddle()}".encode())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"the C++ compiler {command[0]!r} is not on the PATH; install g++ 11 or newer, or set CXX")
    return command


def _paddle() -> tuple[str, Path] | None:
    """Version and folder of Paddle, found without the seconds that importing it takes."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    return importlib.metadata.version("paddlepaddle"), Path(spec.submodule_search_locations[0])


def _build(folder: Path, report: Report) -> None:
    started = time.monotonic()
    jobs = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder.parent) as made:
        objects = sources(Path(made))
        report(f"compiling {len(objects)} files of the CPU ops, {min(jobs, len(objects))} at a time")

        def compile_one(item: tuple[Path, list[str]]) -> str:
            begun = time.monotonic()
            said = _run([*compiler(), *FLAGS, *item[1], "-c", "-o", str(item[0])])
            log.debug("  %-20s %5.1f s", item[0].stem, time.monotonic() - begun)
            return said

        with ThreadPoolExecutor(jobs) as pool:
            (Path(made) / WARNINGS).write_text("".join(pool.map(compile_one, objects.items())))
        _link(Path(made), list(objects))
        os.chmod(made, 0o755)  # a temporary folder is private, this one is for all users
        os.rename(made, folder)
        Path(made).mkdir()  # for the context to remove
    report(f"compiled the CPU ops in {time.monotonic() - started:.1f} s: {folder}")


def _remove_unused(parent: Path) -> None:
    """Builds of other sources that nobody has used for long, and what killed builds left. Under the lock."""
    builds = parent.glob("ops-" + 16 * "[0-9a-f]")
    unused = [path for path in builds if path.lstat().st_mtime < time.time() - UNUSED_AFTER_S]
    for path in [*unused, *parent.glob(f"{PARTIAL}*")]:
        shutil.rmtree(path, ignore_errors=True)


def sources(into: Path) -> dict[Path, list[str]]:
    """Object file -> its own compiler arguments; the slowest first."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    objects = {}
    if paddle := _paddle():
        include = paddle[1] / "include"
        isystem = ["-isystem", str(include), "-isystem", str(include / "third_party")]
        defines = ["-DPADDLE_WITH_CUSTOM_KERNEL", "-DPADDLE_NO_PYTHON"]
        objects[into / "paddle_ops.o"] = [str(SOURCES / "paddle_ops.cc"), *isystem, *defines]
    for isa, flags in reversed(ISA_FLAGS.items()):
        if is_x86 or isa == "portable":
            objects[into / f"{isa}.o"] = [str(SOURCES / "kernels.cc"), *flags, f"-DLLM_ISA={isa}"]
    for name in ("runtime", "program", "sampler", "candidates", "team", "segment", "peers", "group"):
        objects[into / f"{name}.o"] = [str(SOURCES / f"{name}.cc"), *(["-DLLM_X86"] if is_x86 else [])]
    return objects


def _link(folder: Path, objects: list[Path]) -> None:
    link = [*compiler(), "-shared", "-pthread"]
    kernels = [str(path) for path in objects if path.stem != "paddle_ops"]
    _run([*link, "-o", str(folder / KERNELS), *kernels, f"-Wl,-soname,{KERNELS}"])
    if paddle := _paddle():
        core = paddle[1] / "base"
        needs = [f"-L{folder}", f"-l:{KERNELS}", f"-L{core}", "-Wl,--no-as-needed", "-l:libpaddle.so"]
        search = ["-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
        _run([*link, "-o", str(folder / PADDLE_OPS), str(folder / "paddle_ops.o"), *needs, *search])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    def report(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - a command for people

    logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its compilers would go on without it
    try:
        report(f"the CPU ops are ready: {library(report=report)}")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
