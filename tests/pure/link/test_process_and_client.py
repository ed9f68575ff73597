"""The engine's process and its client over real sockets: crashes, cancellations and refusals."""

import contextlib
import fcntl
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.core.types import NO_TOKEN, Sampling, StepOutput
from engine.errors import EngineUnavailable, InvalidRequest, Overloaded
from engine.link import client as client_module
from engine.link import messages
from engine.link.client import EngineClient
from engine.link.journal import JournalEntry, Submission
from server_scripts.child import Child, ChildSpec
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_engine import POISON, SlowExecutor
from tests.pure.counting_executor import CountingExecutor, answer, logprobs_of
from tests.pure.engine_helpers import (
    ROOT,
    Collector,
    PausedClock,
    a_client,
    a_free_address,
    a_loading_server,
    a_server,
    an_engine_process,
    connected,
    is_empty,
    submit,
)

pytestmark = pytest.mark.usefixtures("short_waits")


def test_every_request_gets_its_own_tokens_and_one_end():
    with connected(batch_size=5) as (_, client):
        listeners = [submit(client, [n, n + 1], n % 9 + 1, seed=n, temperature=n % 2) for n in range(30)]
        for listener in listeners:
            assert listener.wait() == "length"
            assert listener.token_ids == answer(listener.prompt, listener.sampling)
        assert client.num_open == 0
        assert is_empty(client)


def test_a_request_expires_only_while_nothing_of_it_is_computed():
    error = Overloaded("waited for {limit} s", limit=2)
    executor = SlowExecutor(256, 4, 0.1)  # so that the first runs for 20 s, unless it is made faster
    with connected(executor, batch_size=1, max_dec_len=500) as (_, client):
        running = submit(client, [5], 200)
        wait_until(lambda: running.token_ids)
        waiting, patient = submit(client, [6], 2), submit(client, [7], 2)
        for listener in (running, waiting):
            client.expire(listener.request_id, error)
        client.expire("unknown", error)
        ended = waiting.wait()
        executor.step_s = 0
        assert (type(ended), str(ended), ended.limit) == (Overloaded, "waited for 2 s", 2)
        assert (running.wait(), patient.wait()) == ("length", "length")
        assert is_empty(client)


def test_the_engine_gets_the_queue_position_of_a_request():
    with connected(SlowExecutor(256, 4, 0.02), batch_size=1, max_dec_len=500) as (_, client):
        first = submit(client, [5], 500)
        wait_until(lambda: first.token_ids)
        order = []
        for name, queue_position in (("usual", ("", 0)), ("late", ("a", 3)), ("urgent", ("", -1))):
            listener = Collector()
            listener.ends = Ends(name, order)
            submission = Submission(name, Sampling(1, temperature=0), listener)
            client.submit(JournalEntry.of([7], [submission], queue_position=queue_position))
        client.cancel(first.request_id)
        wait_until(lambda: len(order) == 3)
    assert order == ["urgent", "usual", "late"]


class Ends(list):
    """Notes in `order` who has ended."""

    def __init__(self, name, order):
        self._name, self._order = name, order

    def append(self, how):
        self._order.append(self._name)


def test_only_tokens_of_incomplete_answers_count_as_wasted():
    with connected(SlowExecutor(30_000, 4, 0.005), max_dec_len=100_000) as (_, client):
        for first, is_complete in ((5, True), (6, False)):
            listener = submit(client, [first], 100_000)  # would take longer than any wait of this test
            wait_until(lambda listener=listener: len(listener.token_ids) > 3)
            client.cancel(listener.request_id, is_complete)
            assert is_empty(client)
            assert (client.stats["num_wasted_tokens"] > 3) == (not is_complete)


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
    _, [fields] = messages.unpack(messages.pack("x", messages.pack_sampling(sampling)))
    assert messages.unpack_sampling(fields, messages.ModelBounds()) == sampling
    with connected() as (_, client):
        listener = submit(client, [5], 2, num_logprobs=2)
        listener.wait()
        assert listener.logprobs == [logprobs_of(each, 2) for each in (6, 7)]


def test_a_request_waits_for_an_engine_that_is_not_there_yet():
    address = a_free_address()
    with a_client(address) as client:
        listener = submit(client, [5], 2)
        assert client.silent_s == float("inf")
        with a_server(address=address):
            assert listener.wait() == "length"
            assert client.silent_s < float("inf")
            assert client.num_restarts == 0


@pytest.mark.slow
def test_a_pause_of_the_client_is_no_silence_of_the_engine_but_a_stopped_engine_is_silent(monkeypatch):
    clock = PausedClock()
    monkeypatch.setattr(client_module, "time", clock)
    address = a_free_address()
    with a_client(address) as client, an_engine_process(address) as engine:
        wait_until(lambda: client.silent_s < 1)
        longest = []
        answer = client._heartbeat
        monkeypatch.setattr(client, "_heartbeat", lambda: (answer(), longest.append(client.silent_s)))
        clock.lost_s = 3600
        wait_until(lambda: len(longest) > 20)
        assert max(longest) < clock.lost_s / 2
        engine.send_signal(signal.SIGSTOP)
        wait_until(lambda: client.silent_s > 1.2)
        engine.send_signal(signal.SIGCONT)
        wait_until(lambda: client.silent_s < 1)


@pytest.mark.slow
def test_sixteen_streams_survive_kills_of_the_engine():
    address = a_free_address()
    with a_client(address) as client:
        listeners = [submit(client, [n] * (n % 6 + 1), 60 + n, seed=n, temperature=n % 2) for n in range(16)]
        for number in range(2):
            least = 20 + sum(len(listener.token_ids) for listener in listeners)  # each step adds one or more
            with an_engine_process(address, max_steps=25):  # the shortest answer needs more than 2 x 25 steps
                wait_until(lambda number=number: client.num_restarts == number)
                wait_until(lambda least=least: sum(len(listener.token_ids) for listener in listeners) > least)
        assert not any(listener.ends for listener in listeners)
        with an_engine_process(address):
            for listener in listeners:
                assert listener.wait() == "length"
                assert listener.token_ids == answer(listener.prompt, listener.sampling)
            assert client.num_restarts == 2
            assert is_empty(client)


@pytest.mark.slow
def test_a_request_that_crashes_the_engine_is_found_and_ends_alone(tmp_path):
    address, suspect = a_free_address(), tmp_path / "suspect"
    child = Child(ChildSpec("engine", [], {}, tmp_path, max_crashes=2, suspect_file=suspect))
    with a_client(address, suspect_file=suspect) as client:
        listeners = [submit(client, [n], 60, seed=n, temperature=n % 2) for n in range(8)]
        culprit = submit(client, [5, POISON, 5], 60)
        listeners += [submit(client, [n], 60) for n in range(8)]
        num_crashes = 0
        while not culprit.ends:
            with an_engine_process(address) as engine:
                wait_until(lambda engine=engine: engine.poll() is not None or culprit.ends)
            if not culprit.ends:
                child.record_end(signal.SIGSEGV)
                assert child.restart_at is not None  # it is not given up
                suspect.unlink(missing_ok=True)  # with the next start
            num_crashes += 1
        with an_engine_process(address):
            assert all(listener.wait() == "length" for listener in listeners)
        assert all(listener.token_ids == answer(listener.prompt, listener.sampling) for listener in listeners)
        assert str(culprit.wait()) == "the engine crashes whenever it computes this request"
        assert culprit.token_ids == []
        assert num_crashes <= 4  # among others, on trial, alone; the last engine has only been met
        assert child.num_crashes == 0 and not suspect.exists()


@pytest.mark.slow
def test_no_request_is_blamed_for_engines_that_end_while_they_load_the_model(tmp_path):
    address, suspect = a_free_address(), tmp_path / "suspect"
    with a_client(address, suspect_file=suspect) as client:
        with an_engine_process(address, step_s=0.01):
            listeners = [submit(client, [n], 60) for n in range(3)]
            wait_until(lambda: all(listener.token_ids for listener in listeners))
        for number in range(1, 4):
            with a_loading_server(address):
                wait_until(lambda number=number: client.num_restarts == number and messages.STARTING in client.stats)
            assert not suspect.exists()
        with an_engine_process(address):
            assert [listener.wait() for listener in (*listeners, submit(client, [5], 1))] == ["length"] * 4
        assert all(listener.token_ids == answer(listener.prompt, listener.sampling) for listener in listeners)


def test_streams_survive_lost_connections_to_a_living_engine():
    with connected(SlowExecutor(200, 4, 0.0005)) as (server, client):

        def lose_connection():
            client._socket.disconnect(server.address)
            client._socket.connect(server.address)

        listeners = [submit(client, [n], 100, seed=n, temperature=n % 2) for n in range(6)]
        for least in (5, 20, 50):
            wait_until(lambda least=least: len(listeners[0].token_ids) >= least)
            client._command(lose_connection)
        for listener in listeners:
            assert listener.wait() == "length"
            assert listener.token_ids == answer(listener.prompt, listener.sampling)
        assert client.num_restarts == 0
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
    with connected(SlowExecutor(30_000, 4, 0.001)) as (_, client):
        listener = submit(client, [5], 100_000)  # would take longer than the patience of `is_empty`
        wait_until(lambda: listener.token_ids)
        client.cancel(listener.request_id)
        assert is_empty(client)
        heard = len(listener.token_ids)
        client.cancel(listener.request_id)
        assert is_empty(client)
        assert (len(listener.token_ids), listener.ends) == (heard, [])


def test_a_request_that_cannot_fit_is_refused_with_the_numbers():
    with connected(CountingExecutor(2, 4)) as (_, client):
        error = submit(client, [1] * 8, 2).wait()
        assert type(error) is InvalidRequest
        assert "need 3 KV blocks of 4 tokens, the server has 2" in str(error)
        assert submit(client, [1] * 8, 1).wait() == "length"


def test_beyond_the_waiting_queue_requests_are_refused_and_the_others_go_on():
    executor = SlowExecutor(64, 4, 0.1)
    with connected(executor, batch_size=2, max_cached_task_num=3) as (_, client):
        listeners = [submit(client, [n], 30) for n in range(12)]
        wait_until(lambda: any(listener.ends for listener in listeners))
        executor.step_s = 0
        refused = [ended for listener in listeners if type(ended := listener.wait()) is Overloaded]
        assert str(refused[0]) == "3 requests are waiting, at most MAX_CACHED_TASK_NUM(3) may"
        assert len(listeners) - len(refused) >= 5
        assert is_empty(client)


def test_an_engine_faster_than_its_client_keeps_no_ping_and_no_cancellation_waiting():
    class Slow(Collector):
        def tokens(self, *args):
            super().tokens(*args)
            time.sleep(0.001)

    with connected(CountingExecutor(30_000, 4)) as (server, client):
        slow, other = Slow(), submit(client, [6], 100_000)
        client.submit(JournalEntry.of([5], [Submission("slow", Sampling(100_000, temperature=0), slow)]))
        wait_until(lambda: len(slow.token_ids) > 20)
        client.cancel(other.request_id)
        wait_until(lambda: server.loop.stats()["num_dropped"] == 1)
        assert not slow.ends  # its tokens take longer than any wait of this test
        client.cancel("slow")


def test_a_request_to_which_the_model_gives_no_token_ends_alone():
    class Broken(CountingExecutor):
        def _choose(self, batch):
            output = super()._choose(batch)
            return StepOutput([[NO_TOKEN] if ids == [9] else ids for ids in output.token_ids], output.logprobs)

    with connected(Broken(64, 4)) as (_, client):
        broken, sound = submit(client, [5], 8), submit(client, [20], 8)
        assert "its logits are no numbers" in str(broken.wait())
        assert (broken.token_ids, broken.ends[0].kind) == ([6, 7, 8], "internal")
        assert sound.wait() == "length"
        assert is_empty(client)


def test_when_the_engine_is_given_up_every_request_gets_the_reason(tmp_path):
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


def test_a_submission_does_not_wait_for_the_next_heartbeat(monkeypatch):
    with connected() as (_, client):
        wait_until(lambda: client.stats)
        monkeypatch.setattr(client_module, "PING_INTERVAL_S", 3600)
        assert submit(client, [5], 2).wait() == "length"


@pytest.mark.slow
def test_more_submissions_than_the_pipe_holds_block_no_thread_and_leave_no_wake_up_behind():
    class Slow(Collector):
        def tokens(self, *args):
            entered.set()
            assert gate.wait(PATIENCE_S)
            super().tokens(*args)

    gate, entered = threading.Event(), threading.Event()
    with connected(max_cached_task_num=10_000) as (_, client):
        fcntl.fcntl(client._pipe[1], fcntl.F_SETPIPE_SZ, 4096)
        slow = Slow()
        client.submit(JournalEntry.of([5], [Submission("slow", Sampling(1), slow)]))
        assert entered.wait(PATIENCE_S)
        listeners = [submit(client, [5], 1, f"id {n}") for n in range(5000)]
        gate.set()
        assert [listener.wait() for listener in (slow, *listeners)] == ["length"] * 5001
        wait_until(lambda: not select.select([client._pipe[0]], [], [], 0)[0])


def test_closing_ends_what_is_open_and_refuses_what_comes():
    class Slow(Collector):
        def ended(self, error):
            time.sleep(0.05)
            super().ended(error)

    client = EngineClient(a_free_address())
    listener = Slow()
    listener.request_id = "slow"
    client.submit(JournalEntry.of([5], [Submission(listener.request_id, Sampling(1), listener)]))
    client.close()
    assert [type(error) for error in listener.ends] == [EngineUnavailable]
    with pytest.raises(EngineUnavailable, match="the server is stopping"):
        submit(client, [6])
    client.cancel(listener.request_id)
    client.close()


@pytest.mark.parametrize("is_there_yet", [True, False])
def test_a_submission_that_cannot_be_packed_is_refused_alone(is_there_yet):
    address = a_free_address()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(a_client(address))
        if is_there_yet:
            stack.enter_context(a_server(address=address))
            wait_until(lambda: client.stats)
        before, after = submit(client, [5], 3), Collector()
        wrong = [
            submit(client, [5], structured_output=("guided_regex", "\ud800")),
            submit(client, [2**70]),
            submit(client, [object()]),
        ]
        client.submit(JournalEntry.of([6], [Submission("after", Sampling(2), after)]))
        if not is_there_yet:
            stack.enter_context(a_server(address=address))
        assert [str(each.wait()) for each in wrong] == [
            f"internal error: {kind}" for kind in ("UnicodeEncodeError", "OverflowError", "TypeError")
        ]
        assert [before.wait(), after.wait()] == ["length", "length"]
        assert client.num_open == 0
        assert is_empty(client)


@pytest.mark.slow
def test_one_that_cannot_be_packed_does_not_hold_up_those_that_are_submitted_one_by_one_after_a_crash():
    address = a_free_address()
    with a_client(address) as client:
        with an_engine_process(address, step_s=0.01):
            listeners = [submit(client, [n], 40) for n in range(3)]
            wait_until(lambda: all(listener.token_ids for listener in listeners))
        wrong = submit(client, [2**70])
        with an_engine_process(address):
            assert str(wrong.wait()) == "internal error: OverflowError"
            assert [listener.wait() for listener in (*listeners, submit(client, [5], 1))] == ["length"] * 4


BROKEN = """
from engine.link.journal import JournalEntry, Submission
from tests.pure.engine_helpers import Collector, Sampling, connected, submit

class Broken(Collector):
    def tokens(self, *args):
        raise ZeroDivisionError

with connected() as (_, client):
    client.submit(JournalEntry.of([6], [Submission("broken", Sampling(5), Broken())]))
    client._thread.join()
    print("goes on")
"""


@pytest.mark.slow
def test_a_process_ends_with_its_way_to_the_engine_and_is_not_left_without():
    ended = subprocess.run([sys.executable, "-c", BROKEN], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "the connection to the engine has failed" in ended.stderr and "ZeroDivision" in ended.stderr
