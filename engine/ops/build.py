"""Compile the CPU kernels and their Paddle wrapper: `python -m engine.ops.build`.

Both libraries lie in one folder named by a hash of all that made them. A folder under that name is
complete; processes that build at the same time wait for one another.

There are builds with the kernels of one instruction set, which a first use makes, and builds with several, which the
command makes and which are preferred: with all, for images and other machines, or with those that this machine can run.
All take the objects that have been compiled before.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.errors import SetupError
from engine.file_lock import file_lock
from engine.ops import generated, instruction_sets
from engine.ops.instruction_sets import COMPILER_FLAGS, supported_isas, wanted_isa

SOURCES = Path(__file__).parent / "cpu"
KERNELS = "libllm_ops.so"
PADDLE_OPS = "libllm_paddle_ops.so"
WRAPPER = "paddle_ops"  # the object of it that is compiled with Paddle's headers
WARNINGS = "warnings"  # what the compiler said; it lies beside the libraries with the objects, for the tests
OBJECTS = "objects"  # folders of what has been compiled, which later builds take
PARTIAL = "ops.partial-"  # followed by anything: a build that is going on, or was killed
UNUSED_AFTER_S = 30 * 24 * 3600

# No contraction: a*b + c must round alike in every loop the compiler makes of it.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += ["-fno-math-errno", "-Wall", "-Wextra"]  # errors in the tests: a newer compiler may know new ones

Report = Callable[[str], None]

log = logging.getLogger(__name__)


class BuildError(SetupError):
    """The ops could not be compiled; the message says what is missing or what the compiler said."""


def build_dir() -> Path:
    """Return the folder of all builds: ENGINE_BUILD_DIR, else `build` in a clone of the repository, else, where the
    package was installed from a wheel, a folder in the user's cache."""
    if configured := os.environ.get("ENGINE_BUILD_DIR"):
        return Path(configured)
    root = Path(__file__).resolve().parents[2]
    return root / "build" if (root / "Makefile").exists() else Path("~/.cache/llm-server/ops").expanduser()


def library(name: str = KERNELS, report: Report = log.warning, isas: str = "") -> Path:
    """Return the path of an up-to-date library, compiled now if need be: for `all` instruction sets or the `supported`
    ones, as `isas` says; otherwise any build for the one that CPU_ISA names or the best one of this machine."""
    wanted, supported, every = wanted_isa(), supported_isas(), build_dir() / f"ops-{build_key()}"
    builds: dict[Path, Collection[str]] = {every: list(COMPILER_FLAGS)}
    if supported and isas != "all":
        builds[every.with_name(f"{every.name}-up-to-{supported[-1]}")] = supported
    if wanted and not isas:
        builds[every.with_name(f"{every.name}-{wanted}")] = [wanted]
    made = (path for path, contained in builds.items() if path.exists() and wanted in (None, *contained))
    folder = next(made, list(builds)[-1])
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"ENGINE_BUILD_DIR: the folder {folder.parent} cannot be made: {error.strerror}") from None
        if not os.access(folder.parent, os.W_OK):
            raise BuildError(f"ENGINE_BUILD_DIR: the folder {folder.parent} cannot be written to by this user")
        with _lock(report):
            if not folder.exists():
                _build(folder, builds[folder], report)
                _remove_unused(folder.parent)
    with contextlib.suppress(OSError):  # not ours to change
        os.utime(folder)  # it is in use
    path = folder / name
    if not path.exists():
        raise BuildError(f"{name} needs paddlepaddle, which is not installed")
    return path


def _lock(report: Report) -> contextlib.AbstractContextManager[None]:
    waits = "another process is compiling the ops, waiting for it"
    return file_lock(build_dir() / "ops.lock", lambda: report(waits))


@functools.cache
def build_key() -> str:
    return hashlib.sha256(f"{source_key()} paddle {_paddle()}".encode()).hexdigest()[:16]


@functools.cache
def source_key() -> str:
    """Return the hash of what makes the kernels."""
    digest = hashlib.sha256()
    scripts = [Path(__file__), Path(instruction_sets.__file__)]
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cc"), *scripts]):
        digest.update(path.name.encode() + path.read_bytes())
    for name, text in generated.files().items():
        digest.update(name.encode() + text.encode())
    digest.update(_run([*compiler(), "--version"]).encode())
    digest.update(platform.machine().encode())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise BuildError(f"the C++ compiler {command[0]!r} is not on the PATH; install g++ 11 or newer, or set CXX")
    return command


def _paddle() -> tuple[str, Path] | None:
    """Return version and folder of Paddle, found without the seconds that importing it takes."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    return importlib.metadata.version("paddlepaddle"), Path(spec.submodule_search_locations[0])


def compile_kernels(report: Report) -> None:
    """Compile what does not need Paddle, for a later build to take."""
    with _lock(report), tempfile.TemporaryDirectory(prefix=PARTIAL, dir=build_dir()) as made:
        objects = sources(Path(made), [isa] if (isa := wanted_isa()) else COMPILER_FLAGS)
        _compile({path: command for path, command in objects.items() if path.stem != WRAPPER}, report)


def _build(folder: Path, isas: Collection[str], report: Report) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder.parent) as made:
        objects = sources(Path(made), isas)
        (Path(made) / WARNINGS).write_text(_compile(objects, report))
        _link(Path(made), list(objects))
        os.chmod(made, 0o755)  # a temporary folder is private, this one is for all users
        os.rename(made, folder)
        Path(made).mkdir()  # for the context to remove
    report(f"compiled the CPU ops in {time.monotonic() - started:.1f} s: {folder}")


def _compile(objects: dict[Path, list[str]], report: Report) -> str:
    """Make the object files, or take them from earlier builds. Return what the compiler said."""
    known = build_dir() / f"{OBJECTS}-{source_key()}"
    # The wrapper depends on the version of Paddle as well.
    kept = {path: known / (f"{WRAPPER}-{build_key()}.o" if path.stem == WRAPPER else path.name) for path in objects}
    missing = [path for path in objects if not kept[path].exists()]
    jobs = min(os.cpu_count() or 1, len(missing))
    with contextlib.suppress(FileNotFoundError):
        os.utime(known)  # it is in use
    if missing:
        known.mkdir(exist_ok=True)
        report(f"compiling {len(missing)} files of the CPU ops, {jobs} at a time")

    def make(path: Path) -> str:
        said = kept[path].with_suffix(f".{WARNINGS}")
        if path in missing:
            begun = time.monotonic()
            text = _run([*compiler(), *FLAGS, *objects[path], "-c", "-o", str(path)])
            log.debug("  %-20s %5.1f s", path.stem, time.monotonic() - begun)
            said.write_text(text)
            shutil.copyfile(path, partial := kept[path].with_suffix(".partial"))
            partial.rename(kept[path])
        else:
            shutil.copyfile(kept[path], path)
        return said.read_text()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return "".join(pool.map(make, objects))


def _remove_unused(parent: Path) -> None:
    """Remove builds of other sources that have not been used for long, and what interrupted builds have left. The
    caller holds the lock.
    """
    key = 16 * "[0-9a-f]"
    builds = [path for name in (f"ops-{key}", f"ops-{key}-*", f"{OBJECTS}-{key}") for path in parent.glob(name)]
    unused = [path for path in builds if path.lstat().st_mtime < time.time() - UNUSED_AFTER_S]
    for path in [*unused, *parent.glob(f"{PARTIAL}*")]:
        shutil.rmtree(path, ignore_errors=True)


def sources(into: Path, isas: Collection[str] = tuple(COMPILER_FLAGS)) -> dict[Path, list[str]]:
    """Return the compiler arguments of each object file, the slowest first, with the kernels of the instruction sets
    `isas`. Write the generated headers into `into`."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    objects = {}
    for name, text in generated.files().items():
        (into / name).write_text(text)
    if paddle := _paddle():
        include = paddle[1] / "include"
        isystem = ["-isystem", str(include), "-isystem", str(include / "third_party")]
        defines = ["-DPADDLE_WITH_CUSTOM_KERNEL", "-DPADDLE_NO_PYTHON"]
        objects[into / f"{WRAPPER}.o"] = [str(SOURCES / "paddle_ops.cc"), *isystem, *defines]
    for name, flags in reversed(COMPILER_FLAGS.items()):
        if (is_x86 or name == "portable") and name in isas:
            objects[into / f"{name}.o"] = [str(SOURCES / "kernels.cc"), *flags, f"-DLLM_ISA={name}"]
    for name in (
        "runtime",
        "calls",
        "program",
        "sampler",
        "candidates",
        "thread_pool",
        "shared_memory",
        "peers",
        "group",
    ):
        objects[into / f"{name}.o"] = [str(SOURCES / f"{name}.cc"), *(["-DLLM_X86"] if is_x86 else [])]
    return {path: [*arguments, "-I", str(into), "-I", str(SOURCES)] for path, arguments in objects.items()}


def _link(folder: Path, objects: list[Path]) -> None:
    link = [*compiler(), "-shared", "-pthread"]
    kernels = [str(path) for path in objects if path.stem != WRAPPER]
    _run([*link, "-o", str(folder / KERNELS), *kernels, f"-Wl,-soname,{KERNELS}"])
    if paddle := _paddle():
        core = paddle[1] / "base"
        needs = [f"-L{folder}", f"-l:{KERNELS}", f"-L{core}", "-Wl,--no-as-needed", "-l:libpaddle.so"]
        search = ["-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
        _run([*link, "-o", str(folder / PADDLE_OPS), str(folder / f"{WRAPPER}.o"), *needs, *search])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{done.stderr}")
    return done.stdout + done.stderr


def main() -> int:
    def report(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - a command for people

    parser = argparse.ArgumentParser(prog="python -m engine.ops.build", description="Compile the CPU ops.")
    parser.add_argument(
        "--kernels", action="store_true", help="for this machine's instruction set only, without Paddle's wrapper"
    )
    parser.add_argument("--supported", action="store_true", help="only for instruction sets that this machine can run")
    given = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its compilers would go on without it
    try:
        if given.kernels:
            build_dir().mkdir(parents=True, exist_ok=True)
            compile_kernels(report)
        else:
            isas = "supported" if given.supported else "all"
            report(f"the CPU ops are ready: {library(report=report, isas=isas)}")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
