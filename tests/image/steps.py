"""Executes the steps of a Dockerfile in a folder, without Docker: `python -m tests.image.steps DOCKERFILE FOLDER`.

Debian's packages stand for the base image: mmdebstrap makes FOLDER/root of the release that FROM names and its Python.
RUN, COPY, ENV and WORKDIR are executed there, in namespaces of their own; FOLDER/image.json has what `docker run` would
take from the image. Needs root, mmdebstrap and a Debian host, whose package sources are used.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
BASE_PACKAGES = "python3-dev,python3-venv,ca-certificates"  # the image of Python has headers and a shared library, too
# Files of the host that a step or a container sees, as with `docker build --network=host`; IMAGE_BINDS names more.
BINDS = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs")
PASSED = re.compile(r"(PIP|SSL|REQUESTS|CURL)_\w+|\w+_proxy", re.I)  # variables, to packages only
# $1: the root, $2: the working directory, $3: files to bind, then the command
ENTER = """
mount --rbind /dev "$1/dev" && mount -t tmpfs -o size=1g shm "$1/dev/shm" && mount -t proc proc "$1/proc" || exit 125
for pair in $3; do
  from=${pair%%:*}; to=$1${pair#*:}
  if [ -d "$from" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}"; [ -e "$to" ] || touch "$to"; fi
  mount --bind "$from" "$to" || exit 125
done
root=$1 cwd=$2; shift 3
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$cwd" "$@"
"""


@dataclass
class Image:
    """State of an image after some instructions of a Dockerfile."""

    root: str
    env: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Image:
        return cls(**json.loads((folder / "image.json").read_text()))

    def inside(self, command: list[str], binds: tuple[str, ...] = ()) -> list[str]:
        """Return the command line that runs a command in the image, as the first process of a namespace.

        `binds` are `from:to`, or a path that is the same on both sides.
        """
        given = [*BINDS, *os.environ.get("IMAGE_BINDS", "").split(), *binds]
        pairs = " ".join(
            bind if ":" in bind else f"{bind}:{bind}" for bind in given if Path(bind.split(":")[0]).exists()
        )
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        return [*unshare, "sh", "-c", ENTER, "sh", self.root, self.workdir, pairs, *command]


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each instruction."""
    lines = (line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            yield name, text.strip()


def execute(image: Image, name: str, text: str) -> None:
    """Raise CalledProcessError when a step fails."""
    if name == "FROM":
        _make_base(Path(image.root), text)
    elif name == "RUN":
        env = image.env | {key: value for key, value in os.environ.items() if PASSED.fullmatch(key)}
        subprocess.run(image.inside(["/bin/sh", "-c", text]), env=env, check=True)
    elif name == "COPY":
        assert text == ". .", f"COPY {text} is not known here"
        _copy_context(Path(image.root + image.workdir))
    elif name == "WORKDIR":
        image.workdir = text
        Path(image.root + text).mkdir(parents=True, exist_ok=True)
    elif name == "ENV":
        for pair in shlex.split(text):
            key, _, value = pair.partition("=")
            image.env[key] = re.sub(r"\$(\w+)", lambda found: image.env.get(found[1], ""), value)
    elif name in ("ENTRYPOINT", "CMD"):
        setattr(image, name.lower(), json.loads(text))
    elif name == "HEALTHCHECK":
        image.healthcheck = json.loads(text.partition("CMD")[2])
    else:
        assert name == "EXPOSE", f"{name} is not known here"


def _make_base(root: Path, base: str) -> None:
    found = re.fullmatch(r"python:3[\d.]*-slim-(\w+)|nvcr\.io/nvidia/tritonserver:.*", base)
    sources = "".join(Path(path).read_text() + "\n" for path in SOURCES if Path(path).exists())
    if not found or not sources:
        raise SystemExit(f"the base {base} cannot be made here: those of dockerfiles/ can, on a Debian host")
    release = found[1] or "bookworm"  # in place of NVIDIA's Ubuntu, which has more than is needed
    command = ["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", release, str(root), "-"]
    subprocess.run(command, input=sources, text=True, check=True)


def _copy_context(target: Path) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def skip(folder: str, names: list[str]) -> list[str]:
        patterns = [pattern.removeprefix("**/") for pattern in ignored if Path(folder) == ROOT or "**/" in pattern]
        return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    shutil.copytree(ROOT, target, ignore=skip, symlinks=True, dirs_exist_ok=True)


def main(dockerfile: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    image = Image(str((folder / "root").resolve()))
    for name, text in instructions(dockerfile):
        sys.stdout.write(f"== {name} {' '.join(text.split())}\n")
        sys.stdout.flush()
        execute(image, name, text)
    (folder / "image.json").write_text(json.dumps(asdict(image), indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
