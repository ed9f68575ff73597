"""`make wheel`: the wheel has all that the demo needs, and its version and dependencies have one source each."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import engine
from engine.ops import build
from server_scripts import triton

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("engine", "gateway", "server_scripts", "model_repository", "demo_model")
COMMANDS = {f"server_scripts/{name}" for name in ("start_server", "stop_server", "start_servers.sh")}
NOT_IN_THE_WHEEL = {*COMMANDS, "demo_model/README.md"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel of a copy of the tracked files, because setuptools writes to the folder that it builds from."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if name.startswith(tuple(f"{package}/" for package in PACKAGES)) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, capture_output=True)
    [path] = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_has_every_file_of_its_packages(wheel):
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = set(listed.stdout.splitlines()) - NOT_IN_THE_WHEEL
    assert {"engine/ops/cpu/kernels.cc", "gateway/web/index.html", "model_repository/model/config.pbtxt"} < expected
    assert expected - set(wheel.namelist()) == set()


def test_documented_commands_are_on_the_path_after_installation(wheel):
    [entries] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt")]
    names = set(re.findall(r"^([\w.]+) =", entries, re.M))
    assert names == {"start_server", "stop_server", "run_batch", "pd_ranktable_tools.py"}
    assert [name for name in wheel.namelist() if name.endswith(".data/scripts/start_servers.sh")]


def test_the_wheel_asks_for_what_requirements_txt_pins(wheel):
    [metadata] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    pinned = re.findall(r"^([\w-]+)[^=\n]*==", (ROOT / "requirements.txt").read_text(), re.M)
    assert set(pinned) == set(re.findall(r"^Requires-Dist: ([\w-]+)[^=\n]*==", metadata, re.M))
    assert f"\nVersion: {engine.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_the_newest_version_of_the_changelog_is_the_codes():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == engine.__version__


def test_a_missing_tritonserver_wheel_is_named_in_the_version_that_make_installs(monkeypatch):
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(triton.TritonError, match=f"pip install --no-deps {triton.WHEEL}"):
        triton.find_tritonserver()
    assert f"\nTRITONSERVER = {triton.WHEEL}\n" in (ROOT / "Makefile").read_text()
    assert f"--no-deps {triton.WHEEL}\n" in (ROOT / "docs/quickstart.md").read_text()


def test_an_installed_server_compiles_into_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("ENGINE_BUILD_DIR", raising=False)
    assert build.build_dir() == ROOT / "build"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "site-packages/engine/ops/build.py"))
    assert build.build_dir() == tmp_path / ".cache/llm-server/ops"
