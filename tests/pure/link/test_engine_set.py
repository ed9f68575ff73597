"""Several engines behind the interface of one: placement, and answers that continue at another engine."""

import random
import threading
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from engine.core.types import Sampling
from engine.errors import EngineUnavailable
from engine.link.client import EngineClient
from engine.link.engine_set import EngineSet
from engine.link.journal import JournalEntry, Submission
from engine.link.messages import STARTING
from tests.patience import PATIENCE_S, wait_until
from tests.pure.counting_engine import POISON, SlowExecutor
from tests.pure.counting_executor import answer
from tests.pure.engine_helpers import Collector, a_free_address, a_server, an_engine_process, is_empty, submit

pytestmark = pytest.mark.usefixtures("short_waits")


@contextmanager
def a_set(*addresses, failed_files=(None, None)):
    """Return an EngineSet of engines that may come later."""

    def connect(address, failed_file, on_lost):
        return EngineClient(address, failed_file, None, on_lost)

    pairs = zip(addresses, failed_files, strict=True)
    engines = EngineSet([partial(connect, address, failed_file) for address, failed_file in pairs])
    try:
        yield engines
    finally:
        engines.close()


@contextmanager
def two_engines(**settings):
    """Return an EngineSet of two engines in this process that are up."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(a_server(SlowExecutor(256, 4, 0.005), max_dec_len=500, **settings)) for _ in range(2)
        ]
        engines = stack.enter_context(a_set(*(server.address for server in servers)))
        wait_until(lambda: all(engine.stats for engine in engines.engines))
        yield engines


def place_of(engines, listener):
    """Return the index of the engine in whose journal the request is."""
    return [bool(engine.journal.name_of(listener.request_id)) for engine in engines.engines].index(True)


def all_right(listeners):
    """Return whether every listener has heard exactly one end and the tokens of an undisturbed engine."""
    assert [listener.wait() for listener in listeners] == ["length"] * len(listeners)
    return all(listener.token_ids == answer(listener.prompt, listener.sampling) for listener in listeners)


def test_requests_spread_over_idle_engines_and_a_cached_prefix_attracts_its_next_request():
    with two_engines() as engines:
        prompts = [list(range(first, first + 200)) for first in (0, 1000)]
        begun = [submit(engines, prompt, 20) for prompt in prompts]
        places = [place_of(engines, each) for each in begun]
        assert sorted(places) == [0, 1]
        assert all_right(begun)
        for index in (1, 0, 0, 1, 1):
            again = submit(engines, [*prompts[index], 7], 5)
            assert place_of(engines, again) == places[index]
            again.wait()
        assert engines.stats["num_cached_tokens"] > 5 * 128
        salted = Submission("salted", Sampling(50), Collector())
        engines.submit(JournalEntry.of(prompts[places.index(1)], [salted], salt="other"))
        assert bool(engines.engines[0].journal.name_of("salted"))  # nothing of it is cached: the first one of equals


def test_a_busy_engine_gets_a_request_only_if_the_cached_part_is_worth_the_wait():
    with two_engines() as engines:
        prompt, places = list(range(100)), []
        submit(engines, prompt, 1).wait()
        for n in range(3):
            listener = submit(engines, [*prompt, n], 400)
            places.append(place_of(engines, listener))
            wait_until(lambda listener=listener: listener.token_ids)
        assert places == [0, 0, 1]  # 37 x 1 and 37 x 2 are less than 101, 37 x 3 is not


@pytest.mark.slow
def test_the_choices_of_a_request_stay_together_and_each_is_cancelled_where_it_is():
    with two_engines() as engines:
        submit(engines, [5], 400)
        listeners = [Collector() for _ in range(3)]
        sampling = Sampling(300, temperature=0)
        engines.submit(JournalEntry.of([6], [Submission(f"c{n}", sampling, each) for n, each in enumerate(listeners)]))
        assert [engine.num_open for engine in engines.engines] == [1, 3]
        engines.cancel("c1")
        assert [engine.num_open for engine in engines.engines] == [1, 2]
        assert [listeners[0].wait(), listeners[2].wait(), listeners[1].ends] == ["length", "length", []]


@pytest.mark.slow
def test_streams_of_an_engine_that_dies_continue_at_the_other_and_return_if_that_one_dies_too():
    addresses = [a_free_address(), a_free_address()]
    with a_set(*addresses) as engines, an_engine_process(addresses[1], step_s=0.04) as second:
        with an_engine_process(addresses[0], step_s=0.04):
            wait_until(lambda: all(engine.is_up for engine in engines.engines))
            listeners = [submit(engines, [n], 100, seed=n, temperature=n % 2) for n in range(10)]
            assert [engine.num_open for engine in engines.engines] == [5, 5]
            wait_until(lambda: all(len(each.token_ids) > 3 for each in listeners))
            before = engines.stats["num_generated_tokens"]
        with an_engine_process(addresses[0], step_s=0.04):
            wait_until(lambda: engines.engines[1].num_open == 10)
            assert engines.stats["num_generated_tokens"] >= before
            wait_until(lambda: all(len(each.token_ids) > 30 for each in listeners))
            second.kill()
            second.wait()
            with an_engine_process(addresses[1]):
                assert all_right(listeners)
                wait_until(lambda: (engines.num_restarts, engines.num_open) == (2, 0))
                assert all(is_empty(engine) for engine in engines.engines)


@pytest.mark.slow
def test_a_request_that_crashes_every_engine_ends_alone_wherever_it_is():
    addresses, over = [a_free_address(), a_free_address()], threading.Event()

    def restart(address):
        while not over.is_set():
            with an_engine_process(address) as engine:
                wait_until(lambda: engine.poll() is not None or over.is_set())

    threads = [threading.Thread(target=restart, args=[address]) for address in addresses]
    for thread in threads:
        thread.start()
    try:
        with a_set(*addresses) as engines:
            wait_until(lambda: all(engine.is_up for engine in engines.engines))
            listeners = [submit(engines, [n], 60, seed=n, temperature=n % 2) for n in range(6)]
            culprit = submit(engines, [5, POISON, 5], 60)
            listeners += [submit(engines, [n], 60) for n in range(6)]
            assert str(culprit.wait()) == "the engine crashes whenever it computes this request"
            assert all_right(listeners)
            assert engines.num_restarts <= 5  # among others at both engines, on trial, alone
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_requests_of_an_engine_that_is_given_up_go_to_the_other_until_that_one_is_given_up_too(tmp_path):
    addresses, files = [a_free_address(), a_free_address()], [tmp_path / "engine.failed", tmp_path / "engine-1.failed"]
    with a_set(*addresses, failed_files=files) as engines:
        waiting = [submit(engines, [n], 20) for n in range(4)]
        assert [engine.num_open for engine in engines.engines] == [2, 2]
        with a_server(address=addresses[1]):
            wait_until(lambda: engines.engines[1].is_up)
            files[0].write_text("the engine has crashed")
            assert all_right(waiting)
            assert (engines.failure(), all_right([submit(engines, [5])])) == (None, True)
        last = submit(engines, [7], 20)
        files[1].write_text("the engine-1 has crashed")
        assert (str(last.wait()), engines.failure()) == ("the engine-1 has crashed", "the engine has crashed")
        with pytest.raises(EngineUnavailable, match="the engine has crashed"):
            submit(engines, [6])


@pytest.mark.slow
def test_cancelling_while_an_engine_dies_leaves_nothing_behind():
    rng, addresses = random.Random(1), [a_free_address(), a_free_address()]
    with a_set(*addresses) as engines, an_engine_process(addresses[1], step_s=0.002):
        with an_engine_process(addresses[0], step_s=0.002):
            wait_until(lambda: all(engine.is_up for engine in engines.engines))
            listeners = [submit(engines, [n], 90) for n in range(20)]
            wait_until(lambda: listeners[0].token_ids)
        with an_engine_process(addresses[0]):
            left = rng.sample(listeners, 10)
            while engines.num_restarts == 0:
                if left:
                    engines.cancel(left.pop().request_id)
            for each in left:
                engines.cancel(each.request_id)
            assert all_right([each for each in listeners if each.ends or place_is_known(engines, each)])
            wait_until(lambda: engines.num_open == 0)
            assert all(is_empty(engine) for engine in engines.engines)


def place_is_known(engines, listener):
    return any(engine.journal.name_of(listener.request_id) for engine in engines.engines)


def test_closing_ends_what_is_open_at_all_engines():
    with a_set(a_free_address(), a_free_address()) as engines:
        listeners = [submit(engines, [n]) for n in range(4)]
        engines.close()
        assert [type(each.wait()) for each in listeners] == [EngineUnavailable] * 4
        with pytest.raises(EngineUnavailable, match="the server is stopping"):
            submit(engines, [5])


def test_statistics_are_sums_whose_counters_do_not_fall_when_an_engine_is_restarted():
    with a_set(a_free_address(), a_free_address()) as engines:
        first, second = engines.engines
        first.stats = {"num_steps": 100, "num_blocks": 8, "block_size": 4}
        second.stats = {"num_steps": 10, "num_blocks": 8, "block_size": 4}
        assert engines.stats == {"num_steps": 110, "num_blocks": 16, "block_size": 4}
        engines._on_lost(first)
        first.stats = {STARTING: "the model is being loaded"}
        assert engines.stats == {"num_steps": 110, "num_blocks": 8, "block_size": 4}
        first.stats = {"num_steps": 3, "num_blocks": 8, "block_size": 4}
        assert engines.stats == {"num_steps": 113, "num_blocks": 16, "block_size": 4}
