"""The first process of a container: whose the folders are, as whom the command runs, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server_scripts.container import UID, give

ROOT = Path(__file__).resolve().parents[3]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, as the first process of a container has it")


def contained(folder, *command, **popen):
    """Run the first process of a container, with folders of its own, and with root's rights only if the test has
    them.
    """
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "FD_LOG_DIR": str(folder / "home/log")}
    env |= {"MODEL_DIR": str(folder / "models"), "RUN_DIR": str(folder / "run")}
    first = [sys.executable, "-I", "-m", "server_scripts.container", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"} | popen
    return subprocess.Popen(first, env=env, **pipes)


def outcome_of(folder, *command, given=None):
    """Return the exit status, and what was written."""
    with contained(folder, *command, stdin=subprocess.PIPE) as process:
        said = process.communicate(given)[0]
    return process.returncode, said


@pytest.fixture
def folder(tmp_path):
    """Return a folder that user 1000 can reach."""
    for path in (tmp_path, *tmp_path.parents[:3]):
        if path.stat().st_uid == os.getuid() and path != Path("/tmp"):
            path.chmod(0o755)
    return tmp_path


def test_the_exit_status_is_that_of_the_command(folder):
    assert outcome_of(folder, "sh", "-c", "exit 7") == (7, "")
    assert outcome_of(folder, "sh", "-c", "kill -9 $$") == (137, "")
    assert outcome_of(folder, "/no/such") == (127, "container: /no/such: No such file or directory\n")
    assert outcome_of(folder)[0] == 2


def test_the_command_has_the_input_and_the_signals_of_a_shell(folder):
    assert outcome_of(folder, "cat", given="through\n") == (0, "through\n")
    command = ["sh", "-c", "grep -E '^Sig(Ign|Blk)' /proc/self/status"]
    directly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert outcome_of(folder, *command) == (0, directly)  # the process that runs the tests may ignore or block some


@needs_root
def test_the_command_runs_without_privileges_in_folders_that_it_can_write_to(folder):
    (folder / "models").mkdir()
    (folder / "models/of-before").mkdir()
    script = 'id -u; id -G; for d in "$MODEL_DIR" "$HOME/.cache" "$FD_LOG_DIR"; do touch "$d/new" && echo "$d"; done'
    given = [str(folder / name) for name in ("models", "home/.cache", "home/log")]
    assert outcome_of(folder, "sh", "-c", script)[1].splitlines() == [str(UID), str(UID), *given]
    assert (folder / "models/of-before").stat().st_uid == 0


@needs_root
@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda path: (path / "config.json").touch(), ""),  # a model, which is only read
        (lambda path: path.chmod(0o777), ""),
        (lambda path: (path / ".ssh").mkdir(), "it looks like a home directory: mount a folder of its own"),
        (
            lambda path: os.chown(path, 1234, 1234),
            "it belongs to user 1234: give it to user 1000, or run with --user 1234",
        ),
    ],
    ids=["model", "writable by all", "home", "another's"],
)
def test_a_folder_that_is_not_ours_to_take_keeps_its_owner(prepare, said, folder, capsys):
    path = folder / "models"
    path.mkdir()
    prepare(path)
    before = path.stat().st_uid
    give(path)
    assert path.stat().st_uid == before
    message = f"container: user {UID} may not be able to write to {path}: {said}\n" if said else ""
    assert capsys.readouterr().err == message


@needs_root
def test_a_link_in_place_of_a_folder_is_not_followed(folder, capsys):
    (folder / "of-root").mkdir()
    (folder / "log").symlink_to(folder / "of-root")
    give(folder / "log")
    assert (folder / "of-root").stat().st_uid == 0
    assert "may not be able to write" in capsys.readouterr().err


def test_a_sigterm_stops_a_server_and_then_the_command(folder):
    command = "echo started; trap 'echo asked to end; exit 3' TERM; while :; do read -r line; done"
    with contained(folder, "bash", "-c", command, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)  # of a terminal, which the command has got as well
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read().splitlines()
    assert any(line.startswith("stop_server: no server was running") for line in said)
    assert (said[-1], process.returncode) == ("asked to end", 3)


def test_processes_that_have_lost_their_parent_are_reaped(folder):
    """A container has no other process for that: the first process of a namespace inherits them."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"] + ["--map-root-user"] * (os.getuid() != 0)
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("needs a process namespace")
    seen = 'p=$HOME/.cache/pid; (sh -c "echo \\$\\$ >$p" &); until [ -s "$p" ]; do :; done'
    script = f"mkdir -p $HOME/.cache; {seen}; while [ -e /proc/$(cat $p) ]; do :; done; echo reaped"
    first = [sys.executable, "-I", "-m", "server_scripts.container", "bash", "-c", script]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home")}
    done = subprocess.run([*unshare, *first], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "reaped\n"), done.stderr
