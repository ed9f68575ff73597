"""Benchmark and storm themselves, short: the figures are worth nothing here, but they must go on printing them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_the_benchmark_measures_the_engine_and_the_server_and_ends_with_one_line_of_json(tmp_path):
    options = ["--shape", "tiny", "--cases", "2x8x4", "--streams", "2", "--repeats", "1", "--work-dir", tmp_path]
    command = [sys.executable, "-m", "benchmarks.bench", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    [offline], [http] = result["offline"], result["http"]
    assert (offline["requests"], offline["prompt_len"], offline["answer_len"], http["streams"]) == (2, 8, 4, 2)
    assert min(offline["prefill_tok_s"], offline["decode_tok_s"], http["output_tok_s"], http["ttft_p99_ms"]) > 0
    assert "offline: requests" in done.stdout and "HTTP: streams" in done.stdout


@pytest.mark.thorough
def test_a_storm_of_seconds_loses_nothing_and_ends_with_one_line_of_json():
    options = ["--seconds", "4", "--every", "2", "--clients", "4", "--answers", "10", "--stop", "gateway"]
    command = [sys.executable, "-m", "benchmarks.storm", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, report["broken"]) == (0, []), done.stdout
    assert report["requests"]["right"] > 20
    assert sum(effect["times"] for effect in report["effects"].values()) > 0
    assert {"engine", "tritonserver", "stub", "gateway", "health", "supervisor"} <= report["memory_mb"].keys()
    assert "GET ready  asked" in done.stdout
