"""The whole server with several engines: DATA_PARALLEL_SIZE=2, and an engine that dies."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patience import wait_until
from tests.server import is_alive, is_clean, pids_of, running_server, state_of
from tests.triton.asking import facts, get, health_of, post, settled, wait_until_idle
from tests.triton.test_server_ranks import ask

NUM_STREAMS = 8
NUM_ATTEMPTS = 5  # on a busy machine answers may have ended before they are aborted
SETTINGS = {"DATA_PARALLEL_SIZE": "2", "CPU_THREADS": "1", "MAX_DEC_LEN": "4000"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the answers of a server with one engine."""
    with running_server(tmp_path_factory.mktemp("one"), {"CPU_THREADS": "1"}) as server:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            return list(pool.map(lambda number: ask(server, number), range(NUM_STREAMS)))


@pytest.fixture(scope="module")
def server(undisturbed, tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("two"), SETTINGS) as running:
        yield running


def values_of(server, family):
    """Return the values of a family of metrics by their labels."""
    _, page = get(server.ports["SERVICE_HTTP_PORT"], "/metrics")
    found = re.findall(rf"^{family}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def num_open(server):
    return sum(values_of(server, "llm_engine_requests_open").values())


def num_generated(server):
    return values_of(server, "llm_generated_tokens_total")[""]


def test_two_engines_give_the_answers_of_one_and_metrics_are_their_sums(server, undisturbed):
    before = settled(num_generated, server)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        assert list(pool.map(lambda number: ask(server, number), range(NUM_STREAMS))) == undisturbed
    assert values_of(server, "llm_engine_up") == {'engine="0"': 1, 'engine="1"': 1}
    assert settled(num_generated, server) - before == sum(map(len, undisturbed))
    assert values_of(server, "inference_server_metrics")['max_batch_size="max_batch_size"'] == 100


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["engine", "engine-1"])
def test_streams_of_an_engine_that_dies_continue_at_the_other(server, undisturbed, name):
    restarts, begun = facts(server)["num_restarts"], threading.Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        disturbed = [pool.submit(ask, server, number, begun) for number in range(NUM_STREAMS)]
        begun.wait(60)
        os.kill(server.pid_of(name), signal.SIGKILL)
        assert health_of(server, "ready")[0] == 200
        assert [future.result() for future in disturbed] == undisturbed
    wait_until(lambda: facts(server)["num_restarts"] == restarts + 1)
    wait_until(lambda: set(values_of(server, "llm_engine_up").values()) == {1})
    wait_until_idle(server)


def test_the_choices_of_a_request_come_from_one_engine_and_a_request_is_aborted_wherever_it_is(server):
    body = {"text": "List 3 countries.", "temperature": 1, "infer_seed": 3, "n": 2, "max_dec_len": 20}
    status, answer = post(server, "/v1/chat/completions", body)
    assert (status, answer["error_code"]) == (200, 0)
    for attempt in range(NUM_ATTEMPTS):
        names = [f"to abort {attempt}-{number}" for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            long = {"text": "Tell me", "ignore_eos": True, "max_dec_len": 4000}
            asked = [pool.submit(post, server, "/v1/chat/completions", {**long, "req_id": name}) for name in names]
            wait_until(lambda asked=asked: num_open(server) == 4 or any(each.done() for each in asked))
            have_some = all(values_of(server, "llm_engine_requests_open").values())
            aborted = [post(server, "/v1/abort", {"req_id": name})[1]["aborted"] for name in names]
            assert [answer.result()[0] for answer in asked] == [499 if was_open else 200 for was_open in aborted]
        if have_some and all(aborted):
            break
    else:
        raise AssertionError("some answers had ended before they were aborted in every attempt")
    wait_until_idle(server)


def test_an_end_leaves_nothing_of_all_engines(server):
    """The last test of this file, as it ends the server of the others."""
    state = state_of(server)
    assert {"engine", "engine-1"} <= {process.name for process in state.processes}
    assert all(map(is_alive, pids_of(state)))
    assert server.command("stop_server").returncode == 0
    assert is_clean(server, state)
