"""The whole server with several ranks on one machine: MP_NUM=2, and ranks that die and hang."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.storm.server import is_fork_server
from server_scripts.run_dir import children_of
from tests.patience import wait_until
from tests.server import is_alive, running_server
from tests.triton.asking import facts, post, wait_until_idle

NUM_STREAMS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    env = {"MP_NUM": "2", "CPU_THREADS": "1", "CHECK_HEALTH_INTERVAL": "3"}
    with running_server(tmp_path_factory.mktemp("ranks"), env, stop_within="20") as running:
        yield running


def ask(server, number, begun=None):
    """Return the token ids of a long seeded answer. `begun` is a barrier where the request waits for the others once it
    has begun.
    """
    body = {"text": "List 3 countries.", "req_id": f"{number}-{time.monotonic_ns()}", "max_dec_len": 400}
    body |= {"ignore_eos": True, "infer_seed": number, "temperature": number % 2, "stream": True}
    request = urllib.request.Request(f"{server.http_url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [response.readline()]
        if begun:
            begun.wait(60)
        lines += response
    last = json.loads(lines[-1])
    assert last["error_code"] == 0, last
    return last["tokens_all_ids"]


@pytest.fixture(scope="module")
def undisturbed(server):
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: ask(server, number), range(NUM_STREAMS)))


def rank_pid(server):
    """Return the process id of the second rank. The engine's other child is the fork server of grammar workers."""
    [pid] = [pid for pid in children_of(server.pid_of("engine")) if not is_fork_server(pid)]
    return pid


def test_two_ranks_answer(server):
    status, answer = post(server, "/v1/chat/completions", {"text": "What is the capital of France?", "temperature": 0})
    assert status == 200
    assert "Paris" in answer["result"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_fails_costs_a_pause_and_not_a_token(server, undisturbed, number):
    """A rank that dies takes its group down at once; one that hangs is noticed after CHECK_HEALTH_INTERVAL."""
    restarts = facts(server)["num_restarts"]
    begun = threading.Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        disturbed = [pool.submit(ask, server, number, begun) for number in range(NUM_STREAMS)]
        begun.wait(60)
        rank = rank_pid(server)
        os.kill(rank, number)
        assert [future.result() for future in disturbed] == undisturbed
    wait_until(lambda: facts(server)["num_restarts"] == restarts + 1)  # some may have ended before the rank did
    wait_until_idle(server)


@pytest.mark.thorough
def test_a_rank_that_is_stopped_while_nothing_runs_is_noticed(server, undisturbed):
    """The supervisor notices it, because the engine would only do so when it has something to compute."""
    restarts, rank = facts(server)["num_restarts"], rank_pid(server)
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: not is_alive(rank))  # after MAX_STOPPED_S
    assert ask(server, 0) == undisturbed[0]
    assert facts(server)["num_restarts"] == restarts + 1
