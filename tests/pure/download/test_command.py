"""download_model.py as a command: exit status, and one line when it fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from download_model import download
from tests.pure.download.models import CHECKPOINT, NAME, STATIC, files_in, weights_url
from tests.pure.model_server import Fault

ROOT = Path(__file__).parents[3]


def run_command(*args: str, **settings: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", str(ROOT / "download_model.py"), *args]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_command_downloads_from_the_hub(server, hub, tmp_path):
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), HF_ENDPOINT=server.url)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert files_in(tmp_path / "models" / NAME) == CHECKPOINT


def test_the_command_downloads_from_a_mirror_chosen_by_the_environment(server, mirror, tmp_path):
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), MODEL_MIRROR=mirror.mirror)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert files_in(tmp_path / "models" / NAME) == STATIC


def test_a_failed_command_says_why_in_one_line_and_is_not_zero(server, mirror, tmp_path):
    del server.contents[weights_url()]
    ran = run_command("-m", NAME, "-d", str(tmp_path / "models"), MODEL_MIRROR=mirror.mirror)
    assert ran.returncode == 1
    assert ran.stderr == "download_model.py: rank_0/model.pdiparams: HTTP 404 Not Found\n"


@pytest.mark.slow
def test_an_interrupted_command_ends_at_once_and_goes_on_the_next_time(server, mirror, tmp_path):
    server.faults[weights_url()] = [Fault(cut_after=100_000), Fault(is_silent=True)]
    command = [sys.executable, str(ROOT / "download_model.py"), "-m", NAME, "-d", str(tmp_path)]
    settings = os.environ | {"MODEL_MIRROR": mirror.mirror}
    with subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True) as running:
        assert server.has_fallen_silent.wait(60)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == "download_model.py: interrupted; run the same command again to continue\n"
    assert files_in(download(NAME, tmp_path, mirror).model_dir) == STATIC
    assert server.ranges_of(weights_url()) == [None, "bytes=100000-", "bytes=100000-"]


def test_an_unknown_argument_is_one_line_too():
    ran = run_command("--nnodes", "two")
    assert ran.returncode == 2
    assert ran.stderr == "download_model.py: argument -n/--nnodes: invalid int value: 'two'\n"
