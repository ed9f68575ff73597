"""Check that this machine can run the server, before anything is downloaded: `python3 server_scripts/interpreter.py`.

It uses only the standard library, and syntax that an old Python 3 accepts.
"""

import glob
import os
import platform
import shlex
import shutil
import sys
import sysconfig

VERSIONS = ("3.10", "3.11", "3.12", "3.13")  # versions for which Paddle and tritonserver's Python backend are built
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLDEST_GLIBC = (2, 35)


def find_libpython() -> "str | None":
    """Return the path of the running Python's shared library, or None.

    Triton's stub is linked to it, even if this interpreter is not.
    """
    folders = [sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")]
    folders += [*glob.glob("/usr/lib/*-linux-gnu"), "/usr/lib64", "/usr/local/lib", "/usr/lib"]
    paths = (os.path.join(folder, f"libpython{VERSION}.so.1.0") for folder in folders if folder)
    return next(filter(os.path.exists, paths), None)


def missing_libpython() -> str:
    """Return instructions to install the shared library, or "" if it is not missing."""
    if find_libpython() or VERSION == "3.13":  # the tritonserver wheel contains the library for 3.13
        return ""
    return (
        f"{sys.executable} has no shared library libpython{VERSION}.so.1.0; tritonserver's Python backend needs it.\n"
        f"  Debian, Ubuntu: sudo apt-get install libpython{VERSION}\n"
        f"  Fedora, RHEL:   sudo dnf install python{VERSION}-libs\n"
        f"  pyenv:          PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {VERSION}\n"
        "  or take another Python: make PYTHON=/path/to/python3"
    )


def problems() -> "list[str]":
    """Return a sentence for each problem of this machine."""
    if VERSION not in VERSIONS:
        return [
            f"{sys.executable} is Python {platform.python_version()}, the server needs {', '.join(VERSIONS[:-1])} or "
            f"{VERSIONS[-1]}; name one: make PYTHON=python3.12"
        ]
    found = []
    if sys.platform != "linux" or platform.machine() != "x86_64":
        found.append(f"this is {sys.platform} on {platform.machine()}, the server needs Linux on x86_64")
    libc, libc_version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, libc_version.split(".")[:2])) < OLDEST_GLIBC:
        found.append(f"the C library is {libc} {libc_version}, tritonserver needs glibc 2.35 or newer")
    try:
        import ensurepip  # noqa: F401 - Debian ships it apart
        import venv  # noqa: F401
    except ImportError:
        found.append(
            f"this Python cannot make virtual environments; Debian, Ubuntu: sudo apt-get install python{VERSION}-venv"
        )
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        found.append(f"no C++ compiler ({compiler}) on the PATH; Debian, Ubuntu: sudo apt-get install g++")
    return found + list(filter(None, [missing_libpython()]))


if __name__ == "__main__":
    lines = problems()
    for line in lines:
        sys.stderr.write(f"error: {line}\n")
    sys.exit(1 if lines else 0)
