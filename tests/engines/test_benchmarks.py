"""Benchmarks that need no server, short: the figures are worth nothing here, but they must go on printing them."""

import json
import subprocess
import sys

import pytest

from tests.server import ROOT


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("overhead", []),
        ("decode", [*"--shape tiny-moe --quant-types none --batches 2 --rounds 1 --work-dir".split(), "{tmp}"]),
        ("speculation", [*"--shape tiny --methods ngram --requests 2 --rounds 1 --work-dir".split(), "{tmp}"]),
        ("shared_prefixes", ["--answer-len", "4", "--work-dir", "{tmp}"]),
        ("draft_model", ["--requests", "2", "--rounds", "1"]),
        ("cpu_drafts", ["mtp", "--shape", "tiny-glm-moe", "--requests", "2", "--rounds", "1", "--answer-len", "32"]),
    ],
)
def test_it_measures_and_ends_with_one_line_of_json(tmp_path, name, options):
    command = [sys.executable, "-m", f"benchmarks.{name}", *(each.format(tmp=tmp_path) for each in options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rows"]
