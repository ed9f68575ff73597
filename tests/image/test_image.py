"""Tests of the result of Dockerfile.cpu's steps, which must work like a container: `make image-steps` builds it and
runs these.
"""

import contextlib
import hashlib
import http.server
import json
import os
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
import requests

from download_model import DEFAULT_TAG
from engine.exporting.export import ExportOptions, export
from server_scripts.container import UID
from server_scripts.run_dir import children_of
from tests.image.steps import ROOT, Image
from tests.server import PORTS, free_ports

NAME = "an-org/a-model"
KEEP_OPEN = ["/bin/bash", "-c", "-ex", "start_server $model_name && tail -f /dev/null"]  # as documented


@pytest.fixture(scope="session")
def image():
    if not (folder := os.environ.get("IMAGE")):
        pytest.skip("needs the folder that `make image-steps` makes, in IMAGE")
    return Image.read(Path(folder))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    """Return the URL of a mirror that has the bundled model, exported."""
    folder = tmp_path_factory.mktemp("mirror")
    model = folder / DEFAULT_TAG / NAME / "model"
    export(ROOT / "demo_model", model, ExportOptions(), lambda step: None)
    files = [path for path in sorted(model.rglob("*")) if path.is_file()]
    sums = [f"{path.relative_to(model)}:{hashlib.md5(path.read_bytes()).hexdigest()}\n" for path in files]
    (model / "file_list.txt").write_text("".join(sums))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Container:
    """A command that runs in the image, with ports of its own and a folder of root's as /models."""

    def __init__(self, image, models, command, **env):
        ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.env = image.env | ports | {"SERVICE_HOST": "127.0.0.1", "DRAIN_DELAY": "0"} | env
        self.url = f"http://127.0.0.1:{ports['SERVICE_HTTP_PORT']}/v1/chat/completions"
        line = image.inside([*image.entrypoint, *(command or image.cmd)], (f"{models}:/models",))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(line, env=self.env, **pipes)

    @property
    def first_pid(self):
        [pid] = children_of(self.process.pid)
        return pid

    def until(self, text):
        """Read what it writes up to a line with this text."""
        said = []
        for line in self.process.stdout:
            said.append(line)
            if text in line:
                return
        raise AssertionError("".join(said))

    def execute(self, *command):
        """Run a command in the container, like `docker exec`."""
        enter = ["nsenter", "--target", str(self.first_pid), "--mount", "--pid", "--root", "--wd", *command]
        return subprocess.run(enter, env=self.env, capture_output=True, text=True)

    def end(self):
        """Return the exit status, after reading all that was written."""
        self.process.communicate()
        return self.process.returncode


@pytest.fixture
def container(image, tmp_path):
    """Return a function that starts a command in the image. A container that a test leaves running is killed."""
    models = tmp_path / "models"
    models.mkdir()
    with contextlib.ExitStack() as stack:

        def start(*command, **env):
            started = Container(image, models, list(command), **env)
            stack.callback(started.process.communicate)
            stack.callback(started.process.kill)
            started.models = models
            return started

        yield start


def descendants(pid):
    for child in children_of(pid):
        yield child
        yield from descendants(child)


def uid_of(pid):
    return Path(f"/proc/{pid}").stat().st_uid


def stop_in_the_middle(container):
    """Send SIGTERM, as `docker stop` does, after the first token of an answer. Return the whole answer."""
    body = {"text": "What is the capital of France?", "min_dec_len": 300, "max_dec_len": 300, "stream": True}
    with requests.post(container.url, json=body, stream=True) as response:
        lines = response.iter_lines()
        answers = [json.loads(next(lines))]
        os.kill(container.first_pid, signal.SIGTERM)
        answers += map(json.loads, lines)
    return answers


def assert_is_whole(answers):
    assert [answer["error_msg"] for answer in answers] == [""] * len(answers)
    assert answers[-1]["is_end"]
    assert answers[-1]["usage"]["completion_tokens"] == 300


def test_the_documented_command_fetches_serves_and_drains(container, mirror):
    running = container(*KEEP_OPEN, model_name=NAME, MODEL_MIRROR=mirror)
    running.until("is ready, pid")
    assert {path.stat().st_uid for path in (running.models, running.models / NAME / "config.json")} == {UID}
    assert uid_of(running.first_pid) == 0
    assert {uid_of(pid) for pid in descendants(running.first_pid)} == {UID}
    assert_is_whole(stop_in_the_middle(running))
    assert running.end() == 128 + signal.SIGTERM  # of the shell


def test_the_default_command_is_healthy_and_ends_with_0(container, image):
    running = container(MODEL_DIR="/opt/llm-server/demo_model")
    running.until("is ready, pid")
    assert running.execute(*image.healthcheck).returncode == 0
    assert_is_whole(stop_in_the_middle(running))
    assert running.end() == 0


def test_a_server_that_was_started_inside_drains_as_well(container):
    running = container("bash", "-c", "echo begun; exec bash", MODEL_DIR="/opt/llm-server/demo_model")
    running.until("begun")
    done = running.execute("start_server")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_is_whole(stop_in_the_middle(running))
    assert running.end() in (0, 128 + signal.SIGTERM)


def test_the_script_that_downloads_is_where_the_document_says(container, mirror):
    command = ["python", "/opt/output/download_model.py", "--model_name", NAME, "--dir", "/models"]
    running = container(*command, MODEL_MIRROR=mirror)
    running.until("complete")
    assert running.end() == 0
    assert (running.models / NAME / "config.json").exists()
