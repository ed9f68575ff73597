"""Tests of the default number of threads of the CPU ops."""

import os

import pytest

from engine.executors.cpus import num_cpus

VERSIONS = {
    "cgroup 2": lambda quota, period: {"cpu.max": f"{'max' if quota < 0 else quota} {period}\n"},
    "cgroup 1": lambda quota, period: {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": f"{period}\n"},
}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [(200_000, 100_000, 2), (150_000, 100_000, 2), (10_000, 100_000, 1), (1_600_000, 100_000, 8), (-1, 100_000, 8)],
)
def test_a_containers_quota_limits_the_threads(version, quota, period, expected, tmp_path):
    for name, content in VERSIONS[version](quota, period).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert num_cpus(tmp_path) == expected


def test_without_a_container_the_threads_are_the_cores(tmp_path):
    assert num_cpus(tmp_path) == 8
