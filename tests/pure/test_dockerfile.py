"""The image is made as `make install` makes .venv, runs as nobody special, and says whether it is ready."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.settings.config import Config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "dockerfiles" / "Dockerfile.cpu"
TEXT = DOCKERFILE.read_text()


def instructions(name):
    joined = TEXT.replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed (requirements-test.txt)")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_image_is_pinned_to_a_supported_python():
    [image] = instructions("FROM")
    assert re.fullmatch(r"python:3\.(10|11|12|13)\.\d+-slim-bookworm", image)


def test_the_installation_is_the_one_of_the_makefile():
    assert any(line.endswith("make install") for line in instructions("RUN"))
    assert not any("pip install" in line for line in instructions("RUN"))


def test_the_server_runs_in_the_foreground_without_privileges():
    assert instructions("CMD")[-1] == '["start_server", "--foreground"]'
    assert instructions("USER") == ["1000"]


def test_what_the_server_writes_belongs_to_its_user():
    """A named volume takes the owner of the folder it covers; without the folder it is root's."""
    [made] = [line for line in instructions("RUN") if "useradd" in line]
    folders = made.partition("install --directory --owner=llm --group=llm ")[2].split()
    assert folders == [Config().model_dir, "/home/llm/.cache"]
    assert Config().export_cache_dir.startswith("~/.cache/")


def test_the_health_check_asks_the_ready_port():
    [check] = instructions("HEALTHCHECK")
    assert '["python", "-m", "server_scripts.probe"]' in check
    command = [sys.executable, "-m", "server_scripts.probe"]
    done = subprocess.run(command, cwd=ROOT, env={"HEALTH_HTTP_PORT": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused" in done.stdout


def test_every_port_is_exposed():
    config = Config()
    ports = {config.service_http_port, config.service_grpc_port, config.health_http_port, config.metrics_http_port}
    assert {int(port) for line in instructions("EXPOSE") for port in line.split()} == ports


def test_the_context_has_what_the_installation_needs_and_no_more():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert {".*", "build", "tests", "log"} <= set(ignored)
    for needed in (
        "engine",
        "gateway",
        "server_scripts",
        "model_repository",
        "demo_model",
        "requirements.txt",
        "Makefile",
    ):
        assert needed not in ignored
