"""The documented command of a container serves, and ends its requests when the container is stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import requests

from tests.server import ROOT, a_server

COMMAND = ["bash", "-c", "-ex", "start_server $model_name && tail -f /dev/null"]
FIRST = """
import sys
from server_scripts.container import ContainerCommands
sys.exit(ContainerCommands([{}]).run(sys.argv[1:]))
"""


@pytest.fixture
def server(tmp_path):
    """Return the settings of the container. Its start_server is that of this environment."""
    server = a_server(tmp_path, {"model_name": str(ROOT / "demo_model")})
    server.env["PATH"] = f"{ROOT / 'server_scripts'}:{server.env['PATH']}"
    yield server
    server.command("stop_server", "0")


def test_docker_stop_waits_for_the_requests_of_a_server_that_a_shell_has_started(server):
    command = [sys.executable, "-c", FIRST, *COMMAND]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=server.env, cwd=ROOT, **pipes) as first:
        assert any("is ready, pid" in line for line in first.stdout)
        body = {"text": "What is the capital of France?", "min_dec_len": 300, "max_dec_len": 300, "stream": True}
        with requests.post(f"{server.http_url}/v1/chat/completions", json=body, stream=True) as response:
            lines = response.iter_lines()
            answers = [json.loads(next(lines))]
            first.send_signal(signal.SIGTERM)
            answers += map(json.loads, lines)
        first.wait()
    with contextlib.suppress(ProcessLookupError):  # what the shell has left, which in a container ends with process 1
        os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 128 + signal.SIGTERM  # of the shell
    assert answers[-1]["usage"]["completion_tokens"] == 300
    assert {answer["error_msg"] for answer in answers} == {""}
    assert not server.run_dir.joinpath("state.json").exists()
