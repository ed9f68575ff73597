"""The engine's process and its client over real sockets: crashes, cancellations and refusals."""

import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine import client as client_module
from engine import messages, process
from engine.client import EngineClient
from engine.config import Config
from engine.errors import EngineUnavailable, InvalidRequest, Overloaded
from engine.loop import Loop
from engine.types import Sampling
from tests.pure.counting_engine import SlowExecutor
from tests.pure.counting_executor import CountingExecutor, answer, logprobs_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 10


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(process, "IDLE_WAIT_MS", 5)
    monkeypatch.setattr(client_module, "PING_INTERVAL_S", 0.01)


class Collector:
    """A listener that remembers."""

    def __init__(self):
        self.token_ids, self.logprobs, self.ends = [], [], []  # ends: a finish reason or an error
        self.is_over = threading.Event()

    def token(self, token_id, logprobs, finish_reason):
        self.token_ids.append(token_id)
        self.logprobs.append(logprobs)
        if finish_reason:
            self._end(finish_reason)

    def ended(self, error):
        self._end(error)

    def _end(self, how):
        self.ends.append(how)
        self.is_over.set()

    def wait(self):
        """How it ended."""
        assert self.is_over.wait(PATIENCE_S), "the request has not ended"
        [how] = self.ends
        return how


@contextmanager
def a_server(executor=None, address="tcp://127.0.0.1:*", **settings):
    executor = executor or CountingExecutor(64, 4)
    server = process.Server(Loop(executor, executor.block_size, Config(**settings)), address)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@contextmanager
def a_client(address, failed_file=None):
    client = EngineClient(address, failed_file)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def connected(executor=None, **settings):
    with a_server(executor, **settings) as server, a_client(server.address) as client:
        yield server, client


def submit(client, prompt, max_new_tokens=8, request_id=None, **sampling):
    listener = Collector()
    listener.prompt = list(prompt)
    listener.sampling = Sampling(max_new_tokens, **{"temperature": 0, **sampling})
    listener.request_id = request_id or f"id {id(listener)}"
    client.submit(listener.request_id, listener.prompt, listener.sampling, listener)
    return listener


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.002)


def is_empty(client):
    """By what the engine says after everything that it was told before this call."""
    for _ in range(2):  # the first answer may be to an earlier question
        before = client.stats
        wait_until(lambda before=before: client.stats is not before)
    return [client.stats[name] for name in ("num_running", "num_waiting", "num_blocks_held")] == [0, 0, 0]


def a_free_address():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def an_engine_process(address, step_s=0.003):
    command = [sys.executable, "-m", "tests.pure.counting_engine", address, str(step_s)]
    engine = subprocess.Popen(command, cwd=ROOT)
    try:
        yield engine
    finally:
        engine.kill()
        engine.wait()


def test_every_request_gets_its_own_tokens_and_one_end():
    with connected(batch_size=5) as (_, client):
        listeners = [submit(client, [n, n + 1], n % 9 + 1, seed=n, temperature=n % 2) for n in range(30)]
        for listener in listeners:
            assert listener.wait() == "length"
            assert listener.token_ids == answer(listener.prompt, listener.sampling)
        assert client.num_open == 0
        assert is_empty(client)


def test_sampling_and_logprobs_survive_the_way_there_and_back():
    sampling = Sampling(
        max_new_tokens=3,
        min_new_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        seed=2**64 - 1,
        stop_token_ids=(7, 8),
        bad_words=((1, 2), (3,)),
        logit_bias=((5, -1.5),),
        num_logprobs=2,
    )
    assert (
        messages.unpack_sampling(messages.unpack(messages.pack("x", messages.pack_sampling(sampling)))[1][0])
        == sampling
    )
    with connected() as (_, client):
        listener = submit(client, [5], 2, num_logprobs=2)
        listener.wait()
        request = type("Asked", (), {"sampling": sampling})
        assert listener.logprobs == [logprobs_of(6, request), logprobs_of(7, request)]


def test_a_request_waits_for_an_engine_that_is_not_there_yet():
    address = a_free_address()
    with a_client(address) as client:
        listener = submit(client, [5], 2)
        assert client.silent_s == float("inf")
        with a_server(address=address):
            assert listener.wait() == "length"
            assert client.silent_s < PATIENCE_S
            assert client.num_restarts == 0


def test_sixteen_streams_survive_kills_of_the_engine():
    address = a_free_address()
    with a_client(address) as client:
        listeners = [submit(client, [n] * (n % 6 + 1), 60 + n, seed=n, temperature=n % 2) for n in range(16)]
        for least in (5, 20):
            with an_engine_process(address):
                wait_until(lambda least=least: sum(len(item.token_ids) >= least for item in listeners) >= 12)
                assert any(not listener.ends for listener in listeners)
        with an_engine_process(address, step_s=0):
            for listener in listeners:
                assert listener.wait() == "length"
                assert listener.token_ids == answer(listener.prompt, listener.sampling)
            assert client.num_restarts == 2
            assert is_empty(client)


def test_cancelling_100_requests_at_any_moment_leaves_nothing_behind():
    rng = random.Random(0)
    with connected(SlowExecutor(20, 4, 0.0005), batch_size=10, max_cached_task_num=1000) as (_, client):
        kept = [submit(client, [n], 40) for n in range(5)]
        left = []
        for n in range(100):
            left.append(submit(client, [n] * rng.randint(1, 30), 40))
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.003)
            if rng.random() < 0.6:
                client.cancel(left.pop(rng.randrange(len(left))).request_id)
        for listener in left:
            client.cancel(listener.request_id)
        for listener in kept:
            assert listener.wait() == "length"
            assert listener.token_ids == answer(listener.prompt, listener.sampling)
        assert client.num_open == 0
        assert is_empty(client)


def test_a_cancelled_request_frees_its_blocks_at_once_and_hears_nothing_more():
    with connected(SlowExecutor(64, 4, 0.001)) as (_, client):
        listener = submit(client, [5], 200)
        wait_until(lambda: listener.token_ids)
        client.cancel(listener.request_id)
        assert is_empty(client)
        heard = len(listener.token_ids)
        client.cancel(listener.request_id)
        assert is_empty(client)
        assert (len(listener.token_ids), listener.ends) == (heard, [])
        assert heard < 200


def test_what_cannot_fit_is_refused_with_the_numbers():
    with connected(CountingExecutor(2, 4)) as (_, client):
        error = submit(client, [1] * 8, 2).wait()
        assert type(error) is InvalidRequest
        assert "need 3 KV blocks of 4 tokens, the server has 2" in str(error)
        assert submit(client, [1] * 8, 1).wait() == "length"


def test_beyond_the_waiting_queue_requests_are_refused_and_the_others_go_on():
    with connected(SlowExecutor(64, 4, 0.001), batch_size=2, max_cached_task_num=3) as (_, client):
        listeners = [submit(client, [n], 30) for n in range(12)]
        refused = [ended for listener in listeners if type(ended := listener.wait()) is Overloaded]
        assert str(refused[0]) == "cached task num (3) exceeds the limit (3)"
        assert len(listeners) - len(refused) >= 5
        assert is_empty(client)


def test_when_the_engine_is_given_up_everybody_is_told_why(tmp_path):
    failed_file = tmp_path / "engine.failed"
    with a_client(a_free_address(), failed_file) as client:
        listener = submit(client, [5])
        assert client.failure() is None
        failed_file.write_text("the engine has crashed 3 times in a row\n")
        error = listener.wait()
        assert type(error) is EngineUnavailable
        assert str(error) == client.failure() == "the engine has crashed 3 times in a row"
        with pytest.raises(EngineUnavailable, match="crashed 3 times"):
            submit(client, [6])


def test_closing_ends_what_is_open_and_refuses_what_comes():
    client = EngineClient(a_free_address())
    listener = submit(client, [5])
    client.close()
    assert type(listener.wait()) is EngineUnavailable
    with pytest.raises(EngineUnavailable, match="the server is stopping"):
        submit(client, [6])
    client.cancel(listener.request_id)
    client.close()


def test_a_listener_that_fails_ends_everybody_and_hides_nothing():
    class Broken(Collector):
        def token(self, *args):
            raise ZeroDivisionError

    with connected(SlowExecutor(64, 4, 0.001)) as (_, client):
        other = submit(client, [5], 200)
        client.submit("broken", [6], Sampling(5), Broken())
        assert "the way to the engine is broken" in str(other.wait())
        assert "the way to the engine is broken" in client.failure()
        with pytest.raises(EngineUnavailable, match="broken"):
            submit(client, [6])


@contextmanager
def a_raw_client(address):
    """A client by hand: `ask` sends a message, `hear` gives the next that comes, by kind and fields."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger, raw.rcvtimeo = 0, PATIENCE_S * 1000
        raw.connect(address)
        yield lambda *message: raw.send(messages.pack(*message)), lambda: messages.unpack(raw.recv())


def a_submission(epoch, request_id, max_new_tokens=500):
    sampling = messages.pack_sampling(Sampling(max_new_tokens, temperature=0))
    return messages.SUBMIT, epoch, request_id, [5], 1, sampling, False


def test_a_silent_client_loses_its_requests_and_is_told_if_it_was_only_slow(monkeypatch):
    with connected(SlowExecutor(200, 4, 0.001)) as (server, client), a_raw_client(server.address) as (ask, hear):
        monkeypatch.setattr(process, "CLIENT_TIMEOUT_S", 0.1)
        ask(*a_submission(server.epoch, "silent"))
        talking = submit(client, [7], 200)
        while (message := hear())[0] == messages.TOKENS:
            pass
        kind, fields = message
        assert (kind, fields[1:3]) == (messages.REFUSED, ["silent", "engine_unavailable"])
        assert talking.wait() == "length"
        assert is_empty(client)


def test_what_was_meant_for_another_engine_process_is_ignored():
    with a_server() as server, a_raw_client(server.address) as (ask, hear):
        ask(*a_submission("an epoch of the past", "a"))
        ask(messages.PING)
        kind, (epoch, stats) = hear()
        assert (kind, epoch) == (messages.PONG, server.epoch)
        assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_an_id_that_is_open_is_refused_and_the_first_goes_on():
    with a_server() as server, a_raw_client(server.address) as (ask, hear):
        ask(*a_submission(server.epoch, "a", 3))
        ask(*a_submission(server.epoch, "a", 3))
        heard = [hear() for _ in range(4)]
        assert [fields[1:3] for kind, fields in heard if kind == messages.REFUSED] == [["a", "duplicate_request"]]
        assert [fields[1][0][1] for kind, fields in heard if kind == messages.TOKENS] == [6, 7, 8]
