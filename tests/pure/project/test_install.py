"""Tests of the basis of `make install`: pinned packages for every Python, and clear errors if something is missing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from server_scripts import interpreter

ROOT = Path(__file__).resolve().parents[3]
PINNED = re.compile(r'[A-Za-z0-9-]+(\[[a-z]+\])?==[0-9.]+(; python_version (<|>=) "3\.\d+")?')


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-test.txt", "requirements-docs.txt"])
def test_every_requirement_is_pinned_and_has_a_reason(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        requirement, _, _ = line.partition("#")
        assert PINNED.fullmatch(requirement.strip()), line


def test_every_installed_package_is_pinned():
    """The versions are those of requirements*.txt, also after one of these files was changed."""
    locked = set(re.findall(r"^([\w-]+==[\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("requirements.txt", "requirements-test.txt", "requirements-docs.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.sub(r"\[\w+\]", "", line).split("#")[0].split(";")[0].strip() in locked


def test_every_python_gets_exactly_one_numpy():
    markers = re.findall(
        r'^numpy==\S+; python_version (<|>=) "(3\.\d+)"', (ROOT / "requirements.txt").read_text(), re.M
    )
    assert sorted(markers) == [("<", "3.13"), (">=", "3.13")]


def test_this_machine_can_run_the_server():
    command = [sys.executable, ROOT / "server_scripts" / "interpreter.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("version", ["3.9", "3.14"])
def test_another_python_is_refused_with_the_ones_that_do(monkeypatch, version):
    monkeypatch.setattr(interpreter, "VERSION", version)
    [problem] = interpreter.problems()
    assert "the server needs 3.10, 3.11, 3.12 or 3.13; name one: make PYTHON=" in problem


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    [problem] = interpreter.problems()
    assert problem.startswith("no C++ compiler (no-such-compiler) on the PATH")


def test_a_missing_shared_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(interpreter, "find_libpython", lambda: None)
    monkeypatch.setattr(interpreter, "VERSION", "3.11")
    assert "apt-get install libpython3.11" in interpreter.missing_libpython()
    monkeypatch.setattr(interpreter, "VERSION", "3.13")  # the wheel brings one
    assert interpreter.missing_libpython() == ""


@pytest.mark.parametrize("target", ["install", "clean"])
def test_make_deletes_no_folder_that_is_no_virtual_environment(tmp_path, target):
    for name in ("Makefile", "server_scripts", "requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "mine").touch()
    command = ["make", target, f"VENV={venv}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"error: {venv} exists and is no virtual environment" in done.stderr
    assert (venv / "mine").exists()


def test_make_names_what_is_missing_before_it_downloads_anything(tmp_path):
    command = ["make", "install", f"VENV={tmp_path}/venv", "PYTHON=no-such-python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: no no-such-python on the PATH" in done.stderr
    assert not (tmp_path / "venv").exists()
