"""The whole server with several ranks on one machine: MP_NUM=2, and ranks that die and hang."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from server_scripts.run_dir import children_of
from tests.server import running_server
from tests.triton.test_server import facts, post, stream_lines, wait_until_idle

NUM_STREAMS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    env = {"MP_NUM": "2", "CPU_THREADS": "1", "CHECK_HEALTH_INTERVAL": "3"}
    with running_server(tmp_path_factory.mktemp("ranks"), env, stop_within="20") as running:
        yield running


def ask(server, number):
    """A long seeded answer, as the ids of its tokens."""
    body = {"text": "List 3 countries.", "req_id": f"{number}-{time.monotonic_ns()}", "max_dec_len": 400}
    body |= {"ignore_eos": True, "infer_seed": number, "temperature": number % 2, "stream": True}
    *_, last = stream_lines(server, body)
    assert last["error_code"] == 0, last
    return last["tokens_all_ids"]


@pytest.fixture(scope="module")
def undisturbed(server):
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: ask(server, number), range(NUM_STREAMS)))


def test_two_ranks_answer(server):
    status, answer = post(server, "/v1/chat/completions", {"text": "What is the capital of France?", "temperature": 0})
    assert status == 200
    assert "Paris" in answer["result"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_fails_costs_a_pause_and_not_a_token(server, undisturbed, number):
    """One that dies takes its group down at once; one that hangs is noticed after CHECK_HEALTH_INTERVAL."""
    restarts = facts(server)["num_restarts"]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        disturbed = [pool.submit(ask, server, number) for number in range(NUM_STREAMS)]
        deadline = time.monotonic() + 60
        while facts(server)["num_running"] < NUM_STREAMS and time.monotonic() < deadline:
            pass
        [rank] = children_of(server.pid_of("engine"))
        os.kill(rank, number)
        assert [future.result() for future in disturbed] == undisturbed
    assert facts(server)["num_restarts"] == restarts + 1
    wait_until_idle(server)
