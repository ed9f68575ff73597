"""Ranks on the GPUs of two hosts, which are process trees of this one: the tokens of one host, and one end for all.
With the interpreter the CPU is every rank's device."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.errors import HostLost  # noqa: E402
from engine.executors.distributed.hosts import comparable_settings  # noqa: E402
from engine.settings.config import Config  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402
from tests.cuda.test_executor import golden_cases  # noqa: E402
from tests.cuda.test_ranks import ranks_of  # noqa: E402
from tests.server import free_ports  # noqa: E402

PATIENCE_S = 120
LENGTHS, COUNT = ([7, 130], 3) if IS_INTERPRETED else ([1, 7, 63, 64, 65, 130, 200], 64)
# Between GPUs of one host NCCL uses NVLink. Without that, it takes the way that it has between hosts.
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@contextmanager
def two_hosts(graph_dir, num_ranks, environ=(), settings=()):
    """Start both hosts with half of the ranks, and of the GPUs, each. `settings` are fields of the second one."""
    [port], processes, size = free_ports(1), [], num_ranks // 2
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3").split(",")
    prompts = [prompt for prompt, _ in golden_cases("qwen2", LENGTHS).values()]
    for host in (1, 0):
        gpus = ",".join(visible[host * size : host * size + size])
        command = [sys.executable, "-m", "tests.cuda.host_process", graph_dir, host, port, num_ranks]
        command += [json.dumps([*prompts, COUNT]), json.dumps(dict(settings) if host else {})]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, **dict(environ)}
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(list(map(str, command)), cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        yield processes[::-1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def answers_of(master):
    for line in master.stdout:
        if line.startswith("[["):
            return json.loads(line)
    pytest.fail(master.stderr.read())


@pytest.mark.skipif(IS_INTERPRETED, reason="takes a minute with the interpreter")
@pytest.mark.parametrize("environ", [{}, OVER_SOCKETS], ids=["nvlink", "sockets"])
def test_two_hosts_have_the_tokens_of_one(exported, two_devices, environ):
    cases = golden_cases("qwen2", LENGTHS)
    with two_hosts(exported("qwen2", num_ranks=2), 2, environ) as (master, _):
        assert answers_of(master) == [tokens[:COUNT] for _, tokens in cases.values()]


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 1), (2, 0), (4, 1)], indirect=["num_ranks"])
def test_a_rank_that_dies_ends_both_hosts_in_the_middle_of_their_answers(exported, num_ranks, victim):
    """The supervisors of both then start the engines again. Of four ranks, the victim is the second one of a host."""
    if IS_INTERPRETED and (num_ranks, victim) == (2, 0):
        pytest.skip("takes a minute with the interpreter")
    cases = golden_cases("qwen2", LENGTHS)
    with two_hosts(exported("qwen2", num_ranks=num_ranks), num_ranks) as both:
        assert answers_of(both[0]) == [tokens[:COUNT] for _, tokens in cases.values()]
        pid = both[victim].pid
        os.kill(ranks_of(pid)[0] if num_ranks == 4 else pid, signal.SIGKILL)
        assert both[1 - victim].wait(PATIENCE_S) == HostLost.exit_status
        assert both[victim].wait(PATIENCE_S) == (1 if num_ranks == 4 else -signal.SIGKILL)


def test_a_host_whose_steps_would_have_other_sizes_is_refused_by_name(exported, two_devices):
    settings = {"cudagraph_capture_sizes": "1,2"}
    with two_hosts(exported("qwen2", num_ranks=2), 2, settings=settings) as (_, follower):
        assert follower.wait(PATIENCE_S) == 1
        log = follower.stderr.read()
    assert "127.0.0.1, which serves, refuses 127.0.0.2: CUDAGRAPH_CAPTURE_SIZES is '1,2' there, '1,2,4' here" in log


def test_hosts_with_other_devices_or_versions_are_different(exported, monkeypatch):
    graph_dir, machines = exported("qwen2", num_ranks=2), {"mp_num": 2, "mp_nnode": 2, "pod_ips": "127.0.0.1,10.0.0.2"}
    on_gpu, on_cpu = (comparable_settings(graph_dir, Config(device=device, **machines)) for device in ("gpu", "cpu"))
    assert (on_gpu["DEVICE"], on_cpu["DEVICE"]) == ("gpu", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert comparable_settings(graph_dir, Config(device="gpu", **machines))["the version of NCCL"] == "2.27.5"
