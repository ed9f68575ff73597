"""The engine's process seen from its socket and from its supervisor."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgpack
import pytest
import zmq

from engine.core.loop import Loop
from engine.core.types import Sampling
from engine.link import client as client_module
from engine.link import messages
from engine.link import server as server_module
from engine.settings.config import Config
from tests.pure.counting_engine import SlowExecutor
from tests.pure.counting_executor import CountingExecutor
from tests.pure.engine_helpers import ROOT, a_client, a_free_address, a_server, connected, is_empty, submit
from tests.pure.service_fakes import PATIENCE_S


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_WAIT_MS", 5)
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.01)


@contextmanager
def a_raw_client(address):
    """A client by hand: `ask` sends a message, `hear` gives the next that comes, by kind and fields; and its epoch."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.rcvtimeo = 0, PATIENCE_S * 1000
        raw.connect(address)

        def ask(*message):
            raw.send(messages.pack(*message))

        def hear():
            return messages.unpack(raw.recv())

        ask(messages.PING)
        _, (epoch, _) = hear()
        yield ask, hear, epoch


def a_submission(epoch, request_id, max_new_tokens=500):
    sampling = messages.pack_sampling(Sampling(max_new_tokens, temperature=0))
    return messages.SUBMIT, epoch, [5], [[request_id, sampling, []]], False, "", ("", 0)


def test_a_silent_client_loses_its_requests_and_is_told_if_it_was_only_slow(monkeypatch):
    with (
        connected(SlowExecutor(3000, 4, 0.001)) as (server, client),
        a_raw_client(server.address) as (ask, hear, epoch),
    ):
        monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 0.5)
        ask(*a_submission(epoch, "silent", 10_000))
        talking = submit(client, [7], 600)
        while (message := hear())[0] == messages.TOKENS:
            pass
        kind, fields = message
        assert (kind, fields[1:3]) == (messages.REFUSED, ["silent", "engine_unavailable"])
        assert talking.wait() == "length"
        assert is_empty(client)


def test_an_idle_engine_sleeps_until_it_is_spoken_to(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_WAIT_MS", PATIENCE_S * 1000)
    loop = Loop(CountingExecutor(64, 4), 64, Config())
    steps = []
    monkeypatch.setattr(loop, "turn", lambda: steps.append(1) or [])
    server = server_module.Server("tcp://127.0.0.1:*")
    thread = threading.Thread(target=server.run, args=[loop])
    thread.start()
    with a_raw_client(server.address) as (ask, hear, _):
        for _ in range(5):
            ask(messages.PING)
            assert hear()[0] == messages.PONG
        server.close()
        ask(messages.PING)
        thread.join(PATIENCE_S)
    assert len(steps) <= 7  # one more for the ping with which the client has learnt its epoch
    assert loop.executor.is_closed


class PausedExecutor(SlowExecutor):
    """For whose process an hour passes during one step, as when a container is paused and goes on."""

    def finish(self):
        if len(self.batches) == 3:
            server_module.time.lost_s += 3600
        super().finish()


class PausedClock:
    lost_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.lost_s


def test_a_pause_of_the_engine_is_no_silence_of_its_clients(monkeypatch):
    monkeypatch.setattr(server_module, "time", PausedClock())
    with a_server(PausedExecutor(200, 4, 0.001)) as server, a_raw_client(server.address) as (ask, hear, epoch):
        ask(*a_submission(epoch, "a", 20))  # and no word more
        heard = [hear() for _ in range(20)]
        assert {kind for kind, _ in heard} == {messages.TOKENS}
        assert server_module.time.lost_s == 3600


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"GET / HTTP/1.1"], [b"\xc1"], [msgpack.packb(5)], [msgpack.packb(())], [b"a", b"b", b"c"]]
    + [[msgpack.packb((kind,))] for kind in (messages.SUBMIT, messages.CANCEL, "word", None)],
)
def test_a_message_that_is_none_of_ours_harms_nobody(parts):
    with a_server() as server, a_raw_client(server.address) as (ask, hear, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(server.address)
            stranger.send_multipart(parts)
            stranger.send(messages.pack(messages.PING))
            stranger.rcvtimeo = PATIENCE_S * 1000
            assert messages.unpack(stranger.recv())[0] == messages.PONG  # so the message before has been read
        ask(messages.PING)
        assert hear()[0] == messages.PONG


def test_what_was_meant_for_another_engine_process_is_ignored():
    with a_server() as server, a_raw_client(server.address) as (ask, hear, epoch):
        ask(*a_submission("an epoch of the past", "a"))
        ask(messages.PING)
        kind, (of_the_answer, stats) = hear()
        assert (kind, of_the_answer) == (messages.PONG, epoch)
        assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_an_id_that_is_open_is_refused_and_the_first_goes_on():
    with a_server(SlowExecutor(64, 4, 0.01)) as server, a_raw_client(server.address) as (ask, hear, epoch):
        ask(*a_submission(epoch, "a", 20))
        ask(*a_submission(epoch, "a", 20))
        heard = [hear() for _ in range(21)]
        assert [fields[1:3] for kind, fields in heard if kind == messages.REFUSED] == [["a", "duplicate_request"]]
        assert [fields[1][0][1] for kind, fields in heard if kind == messages.TOKENS] == [(n,) for n in range(6, 26)]


@pytest.fixture
def start():
    """Starts `python -m engine.process` with these variables; ended at the latest with the test."""
    engines = []

    def start(address, **variables):
        environ = {**os.environ, "INTER_PROC_PORT": address.rpartition(":")[2], **variables}
        command = [sys.executable, "-m", "tests.pure.counting_engine"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        engines.append(subprocess.Popen(command, cwd=ROOT, env=environ, **pipes))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
        engine.communicate()


@pytest.mark.parametrize(
    ("number", "variables"),
    [(signal.SIGTERM, {"MODEL_DIR": "/graph"}), (signal.SIGINT, {"MODEL_DIR": "/model", "GRAPH_DIR": "/graph"})],
)
def test_a_signal_ends_the_process_in_order(start, number, variables):
    address = a_free_address()
    engine = start(address, USE_WARMUP="1", **variables)
    with a_client(address) as client:
        assert submit(client, [5], 3).wait() == "length"
        engine.send_signal(number)
        out, err = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0
    assert out == "reads /graph\nwarms up: True\n"
    assert "ready: 40 blocks of 4 tokens" in err
    assert "stopped" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"BATCH_SIZE": "many"}, "BATCH_SIZE is 'many'"), ({}, "which cannot be used: Address already in use")],
)
def test_a_wrong_setting_ends_the_process_with_one_sentence(start, variables, message):
    with a_server() as server:
        engine = start(server.address, **variables)
        _, err = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 1
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_folder_without_a_model_ends_the_process_with_one_sentence(tmp_path):
    environ = {**os.environ, "MODEL_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.process"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"{tmp_path}/config.json is missing")
    assert "Traceback" not in done.stderr
