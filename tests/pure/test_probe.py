"""What a probe asks of the engine, past tritonserver, at the end of a server."""

import threading

import pytest
import zmq

from engine.link import messages
from engine.settings.config import Config
from server_scripts.probe import Probe


@pytest.fixture
def engine():
    """Answers one ping with the stats that the test puts in."""
    stats = {}
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def answer():
        if socket.poll(10_000):
            client, payload = socket.recv_multipart()
            assert messages.unpack(payload) == (messages.PING, [])
            socket.send_multipart([client, messages.pack(messages.PONG, "epoch", stats)])

    thread = threading.Thread(target=answer)
    thread.start()
    yield port, stats
    thread.join()
    context.destroy()


@pytest.mark.parametrize(("num_running", "num_waiting", "busy"), [(0, 0, False), (1, 0, True), (0, 2, True)])
def test_an_engine_is_busy_while_requests_run_or_wait(engine, num_running, num_waiting, busy):
    port, stats = engine
    stats |= {"num_running": num_running, "num_waiting": num_waiting}
    assert Probe(Config(inter_proc_port=port)).engine_is_busy() == busy


def test_an_engine_that_is_gone_is_not_busy():
    assert not Probe(Config(inter_proc_port=1)).engine_is_busy()
