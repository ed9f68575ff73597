"""Detection of a tritonserver that works with this Python, and its command line.

In a container the image's tritonserver is used, otherwise the binary in the installed nvidia-pytriton wheel, from which
nothing is imported. The stub, which runs model.py, embeds a Python: it takes its prefix from the first `python3` on the
PATH (so a virtual environment comes first there) and ignores PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.errors import SetupError
from engine.settings.config import Config
from engine.settings.processes import TRITON_PAGE, TRITON_SOCKET
from server_scripts.interpreter import VERSION, find_libpython, missing_libpython

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "nvidia-pytriton==0.7.0"  # installed without its dependencies: only the tritonserver inside is used
IMAGE_BINARY = Path("/opt/tritonserver/bin/tritonserver")
STUB = "triton_python_backend_stub"
BACKEND_UTILS = "triton_python_backend_utils.py"
EXIT_MARGIN_S = 5  # added to the drain timeout, for Triton to unload the model
SHM_BYTES = 16 << 20  # initial size and growth of the Python backend's shared memory, which carries prompts


class TritonError(SetupError):
    """There is no usable tritonserver; the message says what is missing."""


@dataclass(frozen=True)
class Tritonserver:
    """Paths of a tritonserver."""

    binary: Path
    backends: Path  # folder that contains python/
    stub: Path  # process that runs model.py
    libraries: tuple[Path, ...] = ()  # folders for LD_LIBRARY_PATH


def _version_of(package: str) -> str:
    import importlib.metadata  # imported late: it takes as long as the rest of this module

    return importlib.metadata.version(package)


def find_tritonserver() -> Tritonserver:
    """Return the tritonserver to use. Raise TritonError with the reason for each place that was checked."""
    reasons = []
    for find in (_of_image, _of_wheel):
        try:
            return find()
        except TritonError as error:
            reasons.append(str(error))
    raise TritonError("; ".join(reasons))


def _of_image() -> Tritonserver:
    on_path = shutil.which("tritonserver")
    binary = Path(on_path) if on_path else IMAGE_BINARY
    if not binary.exists():
        raise TritonError(f"no tritonserver on the PATH or at {IMAGE_BINARY}")
    backends = binary.resolve().parents[1] / "backends"
    stub = backends / "python" / STUB
    if not stub.exists():
        raise TritonError(f"{binary} has no Python backend at {stub}")
    linked = set(re.findall(rb"libpython(3\.\d+)\.so", stub.read_bytes()))
    if linked and VERSION.encode() not in linked:
        versions = ", ".join(sorted(item.decode() for item in linked))
        raise TritonError(f"the Python backend of {binary} is for Python {versions}, this is {VERSION}")
    return Tritonserver(binary, backends, stub)


def _of_wheel() -> Tritonserver:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise TritonError(f"the wheel with tritonserver is not installed: pip install --no-deps {WHEEL}")
    package = Path(spec.submodule_search_locations[0])
    folder = package / "tritonserver"
    stub = folder / "python_backend_stubs" / VERSION / STUB
    if not stub.exists():
        raise TritonError(f"nvidia-pytriton has no Python backend for Python {VERSION}")
    if missing := missing_libpython():
        raise TritonError(missing)
    libraries = (package.parent / "nvidia_pytriton.libs",)
    return Tritonserver(folder / "bin" / "tritonserver", folder / "backends", stub, libraries)


def prepare(found: Tritonserver, folder: Path, repository: Path) -> None:
    """Create the folder of links in which tritonserver runs: `backends` with the stub, `lib` with this Python's
    library, and `models`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    python_backend, lib = folder / "backends" / "python", folder / "lib"
    python_backend.mkdir(parents=True)
    lib.mkdir()
    (folder / "models").symlink_to(repository)
    for path in (found.backends / "python").iterdir():
        (python_backend / path.name).symlink_to(path)
    (python_backend / STUB).unlink(missing_ok=True)
    (python_backend / STUB).symlink_to(found.stub)
    if _needs_numpy_1(found.stub) and not _version_of("numpy").startswith("1."):
        (python_backend / BACKEND_UTILS).rename(python_backend / f"original_{BACKEND_UTILS}")
        (python_backend / BACKEND_UTILS).symlink_to(Path(__file__).with_name("backend_utils_numpy2.py"))
    if library := find_libpython():
        names = re.findall(rb"libpython3[-.\w]*\.so\.1\.0", found.stub.read_bytes())
        for name in {os.path.basename(library), *(name.decode() for name in names)}:
            (lib / name).symlink_to(library)  # the stub for 3.13 is linked to the wheel's copy by another name


def _needs_numpy_1(stub: Path) -> bool:
    """Return True if the stub was built with a pybind11 before 2.12, which knows only the layout of numpy 1."""
    return b"numpy._core" not in stub.read_bytes()


def environment(found: Tritonserver, folder: Path, environ: dict[str, str], watch_gpus: bool) -> dict[str, str]:
    """Return the environment of tritonserver."""
    paths = [str(folder / "lib"), *map(str, found.libraries), environ.get("LD_LIBRARY_PATH", "")]
    import_path = [str(ROOT), *(path for path in sys.path if path and path != str(ROOT))]
    hidden = {} if watch_gpus else {"CUDA_VISIBLE_DEVICES": ""}  # tritonserver computes nothing on the GPU
    return environ | {
        **hidden,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
        "LLM_SERVER_SYS_PATH": os.pathsep.join(import_path),
    }


def command(found: Tritonserver, config: Config, shm_prefix: str, watch_gpus: bool) -> list[str]:
    """Return the command line of tritonserver, to be run in the folder that `prepare` has made.

    Paths are relative because the Python backend passes them to a shell unquoted.
    """
    region = {"region-prefix-name": shm_prefix, "default-byte-size": SHM_BYTES, "growth-byte-size": SHM_BYTES}
    name, _, number = TRITON_SOCKET.partition(":")
    flags = {
        "model-repository": "models",
        "backend-directory": "backends",
        "exit-timeout-secs": math.ceil(config.drain_timeout_s) + EXIT_MARGIN_S,
        "strict-readiness": "true",
        "allow-http": "false",  # Triton loses stream events under load; the gateway serves HTTP
        "allow-grpc": "true",
        # Only this user's gateway has access: some requests crash tritonserver, others write to shared memory.
        "grpc-address": f"unix:{name}",
        "grpc-port": number,
        "allow-metrics": "true",
        # A thousand open connections would block this page for all clients, so the health process serves it instead.
        "metrics-address": f"unix:{TRITON_PAGE}",
        "metrics-port": 1,  # ignored for a Unix socket
        "allow-gpu-metrics": str(watch_gpus).lower(),
        "pinned-memory-pool-byte-size": 0,
        "log-verbose": 0,
    }
    given = [f"--{name}={value}" for name, value in flags.items()]
    given.append("--disable-auto-complete-config")  # config.pbtxt is complete; completing it would start another Python
    return [str(found.binary), *given, *(f"--backend-config=python,shm-{key}={value}" for key, value in region.items())]
