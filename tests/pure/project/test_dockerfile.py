"""The images are made as `make install` makes .venv, run as user 1000, and say whether they are ready."""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from engine.settings.config import Config

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["cpu", "cuda"])
def dockerfile(request):
    return ROOT / "dockerfiles" / f"Dockerfile.{request.param}"


@pytest.fixture
def instructions(dockerfile):
    return partial(instructions_of, dockerfile)


def instructions_of(dockerfile, name):
    joined = dockerfile.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_hadolint_has_nothing_to_say(dockerfile):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed (requirements-test.txt)")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("cpu", r"python:3\.(10|11|12|13)\.\d+-slim-bookworm"),
        ("cuda", r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3"),  # Python 3.12
    ],
)
def test_the_base_image_is_pinned_to_one_with_a_supported_python(name, image):
    assert re.fullmatch(image, *instructions_of(ROOT / "dockerfiles" / f"Dockerfile.{name}", "FROM"))


def test_shared_memory_is_larger_than_by_dockers_default():
    assert "--gpus all --shm-size 1g" in (ROOT / "dockerfiles/Dockerfile.cuda").read_text()


def test_the_installation_is_the_one_of_the_makefile(instructions):
    assert any("make install" in line for line in instructions("RUN"))
    assert not any("pip install" in line for line in instructions("RUN"))


def test_the_server_runs_in_the_foreground_behind_the_process_that_drops_privileges(instructions):
    assert instructions("CMD")[-1] == '["start_server", "--foreground"]'
    assert instructions("ENTRYPOINT") == ['["python", "-I", "-m", "server_scripts.container"]']
    assert instructions("USER") == []  # root, for the folders; server_scripts/container.py


def test_commands_of_root_import_nothing_from_the_folder_that_the_server_writes_to(instructions):
    [workdir] = instructions("WORKDIR")[1:]
    assert workdir == "/home/llm"
    for line in [*instructions("ENTRYPOINT"), *instructions("HEALTHCHECK")]:
        assert '["python", "-I", ' in line


def test_the_names_of_the_predecessors_documents_exist(instructions):
    """The names are `docker build -f ./dockerfiles/Dockerfile_serving_cuda124_cudnn9` and
    /opt/output/download_model.py.
    """
    alias = ROOT / "dockerfiles/Dockerfile_serving_cuda124_cudnn9"
    assert alias.resolve() == ROOT / "dockerfiles/Dockerfile.cuda"
    linked = "ln --symbolic /opt/llm-server/download_model.py /opt/output/download_model.py"
    assert any(linked in line for line in instructions("RUN"))
    assert instructions("WORKDIR")[0] == "/opt/llm-server"


def test_folders_that_the_server_writes_to_belong_to_its_user(instructions):
    """A named volume takes the owner of the folder that it covers; without the folder it belongs to root."""
    [made] = [line for line in instructions("RUN") if "install --directory" in line]
    folders = re.split(r"install --directory --owner=\w+ --group=\w+ ", made)[1].split()
    assert {Config().model_dir, "/home/llm/.cache"} <= set(folders)
    assert Config().export_cache_dir.startswith("~/.cache/")


def test_the_health_check_asks_the_ready_port(instructions):
    [check] = instructions("HEALTHCHECK")
    assert '["python", "-I", "-m", "server_scripts.probe"]' in check
    command = [sys.executable, "-I", "-m", "server_scripts.probe"]
    done = subprocess.run(command, cwd="/", env={"HEALTH_HTTP_PORT": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused" in done.stdout


def test_every_port_is_exposed(instructions):
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
