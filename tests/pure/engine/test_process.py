"""The engine's process seen from its socket and from its supervisor."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import msgpack
import pytest
import zmq

from engine.core.loop import EngineLoop
from engine.core.types import Sampling
from engine.executors import make_executor
from engine.exporting.manifest import Manifest
from engine.link import messages
from engine.link import server as server_module
from engine.settings.config import Config
from engine.settings.processes import ENGINE_PROGRESS_FILE, EXPERT_USAGE_FILE
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_engine import SlowExecutor
from tests.pure.counting_executor import CountingExecutor
from tests.pure.engine_helpers import ROOT, PausedClock, a_client, a_free_address, a_server, connected, is_empty, submit

pytestmark = pytest.mark.usefixtures("short_waits")


@contextmanager
def a_raw_client(address):
    """Return the functions of a client without the library, and its epoch: `ask` sends a message, `hear` returns the
    next received one by kind and fields.
    """
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
    return messages.SUBMIT, epoch, [5], [[request_id, sampling, []]], False, "", ("", 0), [], ""


@pytest.mark.slow
def test_a_silent_client_loses_its_requests_and_is_notified_if_it_was_only_slow(monkeypatch):
    with connected(SlowExecutor(3000, 4, 0.001)) as (server, client):
        assert is_empty(client)  # the engine has heard of it first, so that the silent client is its successor
        with a_raw_client(server.address) as (ask, hear, epoch):
            monkeypatch.setattr(server_module, "SUCCEEDED_TIMEOUT_S", PATIENCE_S)  # that of the client that talks
            monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 0.5)
            ask(*a_submission(epoch, "silent", 10_000))
            talking = submit(client, [7], 600)
            while (message := hear())[0] == messages.TOKENS:
                pass
            kind, fields = message
            assert (kind, fields[1:3]) == (messages.REFUSED, ("silent", "engine_unavailable"))
            monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", PATIENCE_S)  # now of the only client, which talks
            assert talking.wait() == "length"
            assert is_empty(client)


def test_requests_of_a_client_that_has_a_successor_leave_their_places_soon(monkeypatch):
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 10 * PATIENCE_S)
    monkeypatch.setattr(server_module, "SUCCEEDED_TIMEOUT_S", 0.2)
    with (
        a_server(SlowExecutor(20_000, 4, 0.001), batch_size=1) as server,
        a_raw_client(server.address) as (ask, hear, epoch),
    ):
        ask(*a_submission(epoch, "of the dead", 70_000))
        assert hear()[0] == messages.TOKENS
        with a_client(server.address) as successor:
            assert submit(successor, [7], 6).wait() == "length"


def test_an_idle_engine_sleeps_until_it_is_spoken_to(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_WAIT_MS", PATIENCE_S * 1000)
    loop = EngineLoop(CountingExecutor(64, 4), 64, Config())
    steps = []
    monkeypatch.setattr(loop, "step", lambda: steps.append(1) or [])
    server = server_module.Server(a_free_address())
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


class PausedExecutor(SlowExecutor):
    """Executor for whose process an hour passes during one step, as when a container is paused and continues."""

    def finish(self):
        if len(self.batches) == 3:
            server_module.time.lost_s += 3600
        super().finish()


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
def test_a_foreign_message_harms_no_request(parts):
    with a_server() as server, a_raw_client(server.address) as (ask, hear, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(server.address)
            stranger.send_multipart(parts)
            stranger.send(messages.pack(messages.PING))
            stranger.rcvtimeo = PATIENCE_S * 1000
            assert messages.unpack(stranger.recv())[0] == messages.PONG  # so the message before has been read
        ask(messages.PING)
        assert hear()[0] == messages.PONG


ODD = [
    None,
    True,
    -1,
    2**31,
    2**63,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "word",
    b"\xff",
    [],
    [[]],
    {},
    {"a": 1},
]


def oddly(rng, value):
    """Return the value with one error in it."""
    if not isinstance(value, list) or not value or rng.random() < 0.1:
        return rng.choice(ODD)
    place, changed = rng.randrange(len(value)), list(value)
    what = rng.random()
    if what < 0.1:
        del changed[place]
    elif what < 0.2:
        changed.insert(place, rng.choice(ODD))
    else:
        changed[place] = oddly(rng, changed[place])
    return changed


@pytest.mark.slow
def test_no_message_however_odd_ends_the_engine_or_harms_another_request(exported):
    """Thousands of nearly correct messages are sent to an engine with a real model."""
    config = Config(block_bs=8, batch_size=4, cpu_threads=1)
    manifest = Manifest.read(exported("qwen2", block_size=16))
    executor = make_executor(exported("qwen2", block_size=16), config)
    executor.allocate(40)
    rng = random.Random(0)
    bounds = messages.ModelBounds(manifest.vocab_size, manifest.max_seq_len)
    server = server_module.Server(a_free_address())
    thread = threading.Thread(target=server.run, args=[EngineLoop(executor, 40, config), bounds])
    thread.start()
    sampling = Sampling(3, stop_token_ids=(1,), bad_words=((2, 3), (4,)), logit_bias=((5, 1.5), (6, -100.0)))
    try:
        with a_raw_client(server.address) as (ask, hear, epoch), a_client(server.address) as client:
            expected = submit(client, [5, 6], 20)
            assert expected.wait() == "length"
            for number in range(4000):
                answers = [
                    [f"{number}-{index}", list(messages.pack_sampling(sampling)), [7][:index]] for index in (0, 1)
                ]
                spans = [[1, 2, b"hash", [1, 1, 2], b"pixels"]]
                whole = [messages.SUBMIT, epoch, [5, 6, 7], answers, False, "salt", ["owner", 0], spans, "host:1"]
                if number % 8 == 0:
                    whole = [messages.CANCEL, epoch, f"{number - 3}-0", False]
                if number % 8 == 1:
                    whole = [messages.EXPIRE, epoch, f"{number - 3}-0", "timeout", "late", {"limit": 1}]
                whole = oddly(rng, whole)
                if not isinstance(whole, list) or whole[1:2] != [epoch]:
                    whole = [whole, epoch]
                ask(*whole)
                if number % 500 == 0:
                    assert (listener := submit(client, [5, 6], 20)).wait() == "length"
                    assert listener.token_ids == expected.token_ids
            assert submit(client, [5, 6], 20).wait() == "length"
            assert is_empty(client)
            assert client.num_restarts == 0
            assert client.stats["num_steps"] > 100  # not all of them were refused
    finally:
        server.close()
        thread.join()


def test_a_submission_with_unknown_ids_or_excessive_lengths_is_refused():
    bounds = messages.ModelBounds(vocab_size=10, max_len=8)

    def submission(prompt, sampling, token_ids=(), cached_at=""):
        answers = [["a", messages.pack_sampling(sampling), token_ids]]
        packed = messages.pack("", "epoch", prompt, answers, False, "", ["", 0], [], cached_at)
        _, fields = messages.unpack(packed)
        return messages.unpack_submission(fields, bounds)

    [request], replay = submission([9, 9], Sampling(7, stop_token_ids=(9,)), [1])
    assert (request.token_ids, request.prompt_len, replay) == ([9, 9, 1], 2, False)
    for wrong in (
        ([9, 10], Sampling(7)),
        ([], Sampling(7)),
        ([9, 9], Sampling(8)),
        ([9], Sampling(1), [1]),
        ([9], Sampling(2), [10]),
        ([9], Sampling(2, stop_token_ids=(10,))),
        ([9], Sampling(2, bad_words=((1, 10),))),
        ([9], Sampling(2, logit_bias=((10, 1.0),))),
        ([9], Sampling(2, num_logprobs=21)),
        ([9], Sampling(2, temperature=float("nan"))),
        ([9], Sampling(2), (), "no address"),
    ):
        with pytest.raises(ValueError, match="a message with a wrong"):
            submission(*wrong)


def test_a_message_larger_than_any_of_ours_is_not_taken():
    with a_server(max_message_bytes=1000) as server, a_raw_client(server.address) as (ask, hear, epoch):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(server.address)
            stranger.send(messages.pack(messages.PING, b"x" * 1000))
            stranger.send(messages.pack(messages.PING))
            assert not stranger.poll(300)
        ask(*a_submission(epoch, "a", 2))
        assert hear()[0] == messages.TOKENS


@pytest.mark.slow
@pytest.mark.no_cover  # other tests reach the same lines with fewer bytes
def test_the_engine_takes_longer_messages_than_a_client_may_send():
    """The request has the longest prompt, most of which are images, nearly complete answers, and as many sampling
    options as possible."""
    config = Config(max_seq_len=3000, max_dec_len=500)
    id_, words = 2**31 - 2, tuple((2**31 - 2,) * 1025 for _ in range(128))
    sampling = Sampling(500, stop_token_ids=(id_,) * 1100, bad_words=words, logit_bias=((id_, 99.5),) * 1024)
    answers = [["x" * 35, messages.pack_sampling(sampling), [id_] * 499] for _ in range(16)]
    sizes = [(1, 1)] * 15 + [(5, 597)]  # of the images in tokens, in prompts of 3000 tokens
    images = [
        (id_, rows * columns, b"h" * 16, (1, rows, columns), bytes(3 * 32**2 * rows * columns))
        for rows, columns in sizes
    ]
    assert len(messages.pack(messages.SUBMIT, "x" * 50, [id_] * 3000, answers, True, images)) < messages.most_bytes(
        config
    )


def test_the_engine_answers_while_a_long_step_runs_and_says_for_how_long_it_has():
    may_end = threading.Event()

    class Executor(CountingExecutor):
        def finish(self):
            assert may_end.wait(PATIENCE_S)
            super().finish()

    with connected(Executor(64, 4)) as (_, client):
        may_end.set()
        assert submit(client, [5], 20).wait() == "length"
        may_end.clear()
        listener = submit(client, [5], 1)
        try:  # the limit is small because all steps before took no time
            wait_until(lambda: client.stats["step_age_s"] > client.stats["step_limit_s"] > 0)
            before = client.stats
            wait_until(lambda: client.stats is not before)
            assert listener.ends == []
        finally:
            may_end.set()
        assert listener.wait() == "length"
        wait_until(lambda: client.stats["step_age_s"] == 0)


def test_messages_for_another_engine_process_are_ignored():
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
        assert [fields[1:3] for kind, fields in heard if kind == messages.REFUSED] == [("a", "duplicate_request")]
        assert [fields[1][0][1] for kind, fields in heard if kind == messages.TOKENS] == [(n,) for n in range(6, 26)]


@pytest.fixture
def start():
    """Return a function that starts `python -m engine.process` with these variables. The process ends with the test at
    the latest.
    """
    engines = []

    def start(run_dir, **variables):
        environ = {**os.environ, "RUN_DIR": str(run_dir), **variables}
        command = [sys.executable, "-m", "tests.pure.counting_engine"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        engines.append(subprocess.Popen(command, cwd=ROOT, env=environ, **pipes))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
        engine.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "variables"),
    [(signal.SIGTERM, {"MODEL_DIR": "/graph"}), (signal.SIGINT, {"MODEL_DIR": "/model", "GRAPH_DIR": "/graph"})],
)
def test_a_signal_ends_the_process_in_order(start, number, variables, tmp_path):
    engine = start(tmp_path, USE_WARMUP="1", **variables)
    with a_client(f"ipc://{tmp_path}/engine.sock") as client:
        assert submit(client, [5], 3).wait() == "length"
        engine.send_signal(number)
        out, err = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 0
    assert out == "reads /graph\nwarms up: True\n"
    assert "ready: 40 blocks of 4 tokens" in err
    assert "stopped" in err.splitlines()[-1]
    assert (tmp_path / ENGINE_PROGRESS_FILE).exists()


@pytest.mark.slow
def test_the_usage_of_experts_is_written_at_the_end(exported, tmp_path):
    graph_dir = exported("qwen3_moe", block_size=16)
    environ = {**os.environ, "GRAPH_DIR": str(graph_dir), "RUN_DIR": str(tmp_path), "CPU_THREADS": "1", "BLOCK_BS": "8"}
    engine = subprocess.Popen([sys.executable, "-m", "engine.process"], cwd=ROOT, env=environ)
    try:
        with a_client(f"ipc://{tmp_path}/engine.sock") as client:
            for first in range(6):
                assert submit(client, [first, *range(1, 299)] * 3, 2).wait() == "length"
            num_choices = client.stats["num_expert_choices"]
            engine.terminate()
            assert engine.wait(PATIENCE_S) == 0
    finally:
        engine.kill()
        engine.wait()
    written = json.loads((tmp_path / EXPERT_USAGE_FILE).read_text())
    assert written["model"] == graph_dir.name
    counts = list(written["layers"].values())
    assert sum(map(sum, counts)) >= num_choices > 10_000
    assert len(counts) == 2  # the layer between them has an MLP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"BATCH_SIZE": "many"}, "BATCH_SIZE is 'many'"),
        ({"RUN_DIR": "/no/such/folder"}, "RUN_DIR is '/no/such/folder', the engine cannot listen in it: No such file"),
        (
            {"RUN_DIR": "/tmp/" + 100 * "x"},
            "sockets in it need a path of at most",
        ),
    ],
)
def test_a_wrong_setting_ends_the_process_with_one_sentence(start, variables, message, tmp_path):
    engine = start(tmp_path, **variables)
    _, err = engine.communicate(timeout=PATIENCE_S)
    assert engine.returncode == 1
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_folder_without_a_model_ends_the_process_with_one_sentence(tmp_path):
    environ = {**os.environ, "MODEL_DIR": str(tmp_path), "RUN_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.process"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"{tmp_path}/config.json is missing")
    assert "Traceback" not in done.stderr
