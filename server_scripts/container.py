"""First process of a container: prepares the folders, runs a command as the server's user, and drains on SIGTERM.

`python -I -m server_scripts.container COMMAND ...` runs COMMAND and exits with its status. As root it gives the folders
that the server writes to, if root owns them, to user 1000 and runs COMMAND as that user; otherwise it only runs it. On
SIGTERM (`docker stop`) it first stops a server of this container like `stop_server`, however it was started, and then
COMMAND.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UID = 1000
FOLDERS = ("MODEL_DIR", "FD_LOG_DIR")  # variables with the folders that the server writes to
HOME_FILES = (".ssh", ".profile", ".bashrc")  # sshd refuses logins to a home directory of another owner
COULD_NOT_RUN = 127  # exit status, as in a shell
STOP_SERVER = Path(sys.executable).with_name("stop_server")


def main(command: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, 127 if it cannot be run, or 2 without a command."""
    command = list(sys.argv[1:] if command is None else command)
    if not command:
        print("usage: python -I -m server_scripts.container COMMAND ...", file=sys.stderr)
        return 2
    users: list[dict[str, Any]] = [{}]
    if os.getuid() == 0:
        named = [Path(os.environ[name]) for name in FOLDERS if os.environ.get(name)]
        for path in [*named, Path.home() / ".cache"]:
            give(path)
        users.insert(0, {"user": UID, "group": UID, "extra_groups": []})
    return ContainerCommands(users).run(command)


def give(path: Path) -> None:
    """Let the server's user write in a folder: make it, or take over one of root's. Say why if it stays unwritable.

    A folder that holds a model is only read, and stays as it is. What lies in a folder keeps its owner.
    """
    if (path / "config.json").exists():
        return
    trouble = ""
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # the user may have put a link there
        try:
            found = os.fstat(folder)
            if found.st_uid == UID or found.st_mode & stat.S_IWOTH:
                return
            if found.st_uid != 0:
                trouble = f"it belongs to user {found.st_uid}: give it to user {UID}, or run with --user {found.st_uid}"
            elif any((path / name).exists() for name in HOME_FILES):
                trouble = "it looks like a home directory: mount a folder of its own"
            else:
                os.fchown(folder, UID, UID)
        finally:
            os.close(folder)
    except OSError as error:
        trouble = str(error.strerror)
    if trouble:
        print(f"container: user {UID} may not be able to write to {path}: {trouble}", file=sys.stderr)


class ContainerCommands:
    """Runs the command of a container and, after SIGTERM, `stop_server` for each of its users in turn."""

    def __init__(self, users: Sequence[dict[str, Any]]):
        """Take `users`, arguments of Popen, of which the first is that of the command."""
        self._users = users
        self._stops = [*users]
        self._command: subprocess.Popen[bytes] | None = None
        self._stop: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        """Return the exit status of the command. Reap every process that has lost its parent meanwhile."""
        signal.signal(signal.SIGTERM, lambda *_: self._begin_stop())
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends SIGINT to the command as well
        try:
            self._command = subprocess.Popen(command, **self._users[0])
        except OSError as error:
            print(f"container: {command[0]}: {error.strerror}", file=sys.stderr)
            return COULD_NOT_RUN
        while True:
            pid, status = os.wait()
            if pid == self._command.pid:
                return self._ended(self._command, status)
            if self._stop is not None and pid == self._stop.pid:
                self._ended(self._stop, status)
                self._next_stop()

    @staticmethod
    def _ended(process: subprocess.Popen[bytes], status: int) -> int:
        code = os.waitstatus_to_exitcode(status)
        process.returncode = code
        return code if code >= 0 else 128 - code

    def _begin_stop(self) -> None:
        if self._stop is None:
            self._next_stop()

    def _next_stop(self) -> None:
        while self._stops:
            try:
                self._stop = subprocess.Popen([STOP_SERVER], **self._stops.pop(0))
                return
            except OSError as error:
                print(f"container: {STOP_SERVER}: {error.strerror}", file=sys.stderr)
        if self._command is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._command.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
