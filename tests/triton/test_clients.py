"""Other people's clients, unmodified, against the whole server: LangChain, litellm, instructor, lm-eval."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.server import ROOT
from tests.triton.client_programs import PROGRAMS

PYTHON = ROOT / "build" / "clients" / "bin" / "python"
SETTINGS = {"BATCH_SIZE": "16", "TOOL_CALL_PARSER": "hermes"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make test-clients` installs them")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_other_peoples_library_finds_what_it_expects(server, tmp_path, name):
    command = [PYTHON, ROOT / "tests" / "triton" / "client_programs.py", name, server.http_url, tmp_path]
    env = {**OFFLINE, "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
