"""The end of a server in time that is not real: who is asked when, who is waited for, and who is killed."""

import math
import signal
from types import SimpleNamespace

import pytest

from engine.settings.config import Config
from engine.settings.processes import STOPPING_FILE
from engine.settings.stopping import Stopping
from server_scripts import shutdown
from server_scripts.shutdown import ENGINE_STOP_S, STOP_MARGIN_S, STOP_WHILE_STARTING_S, UNLOAD_S

DELAY_S, DRAIN_S = 1.0, 30.0
NEVER = math.inf


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeChild:
    """Ends so many seconds after SIGTERM, and `dies_after` SIGKILL."""

    def __init__(self, server, name, takes_s, dies_after=0.0):
        self.spec = SimpleNamespace(name=name)
        self.process = object()
        self._server, self._takes_s, self._dies_after, self._ends_at = server, takes_s, dies_after, NEVER

    def signal(self, number):
        if self.process:
            assert number == signal.SIGTERM
            self._server.note(f"{self.spec.name} asked")
            self._ends_at = self._server.clock.now + self._takes_s

    def kill(self):
        if self.process:
            self._server.note(f"{self.spec.name} killed")
            self._ends_at = self._server.clock.now + self._dies_after

    def reap(self):
        if self.process and self._server.clock.now >= self._ends_at:
            self._server.note(f"{self.spec.name} ended")
            self.process = None


class FakeServer:
    """The part of a Supervisor that a shutdown needs. `notes` has the events, and after how many seconds they
    happened.
    """

    def __init__(self, clock, takes_s, phase="ready", busy_s=0.0, held_s=None, dies_after=0.0, **settings):  # noqa: PLR0913
        self.clock = clock
        self.notes = {}
        self.children = [FakeChild(self, name, seconds, dies_after) for name, seconds in takes_s.items()]
        probe = SimpleNamespace(
            num_open=lambda: int(self.clock.now - self._started < busy_s),
            num_blocks_held=lambda: int(self.clock.now - self._started < held_s),
        )
        if held_s is not None:
            settings |= {"replicas": "10.0.0.2:8811", "replica_cache_port": 8700}
        self.monitor = SimpleNamespace(stop=lambda: self.note("monitor stopped"), probe=probe)
        self.state = SimpleNamespace(phase=phase)
        self.config = Config(drain_timeout_s=DRAIN_S, drain_delay_s=DELAY_S, **settings)
        self.announced = {}
        clean_up = lambda: self.note("cleaned up")  # noqa: E731
        self.run_dir = SimpleNamespace(clean_up=clean_up, write=self.announced.__setitem__)
        self.sleep = clock.sleep
        self.every_turn = lambda: None
        self.insists_at = NEVER
        self._started = clock.now

    def note(self, text):
        assert text not in self.notes
        self.notes[text] = self.clock.now - self._started

    def set_phase(self, phase):
        self.state.phase = phase

    def reap(self):
        for child in self.children:
            child.reap()

    @property
    def num_stop_signals(self):
        return 2 if self.clock.now - self._started >= self.insists_at else 1


@pytest.fixture
def stop(monkeypatch):
    """Shut down a server whose children end a given number of seconds after they were asked to."""
    clock = Clock()
    monkeypatch.setattr(shutdown, "time", clock)
    monkeypatch.setattr(shutdown, "Process", SimpleNamespace(of=lambda name, pid: None))

    def stop(gateway=0.1, tritonserver=2.0, engine=0.1, insists_at=NEVER, adopted=(), **options):
        monkeypatch.setattr(shutdown, "children_of", lambda pid: adopted)
        takes_s = {"engine": engine, "tritonserver": tritonserver, "gateway-0": gateway, "health": 0.1}
        server = FakeServer(clock, takes_s, **options)
        server.insists_at = insists_at
        shutdown.shut_down(server)
        assert server.state.phase == "stopping"
        assert list(server.notes)[0] == "monitor stopped"
        [(name, text)] = server.announced.items()
        assert name == STOPPING_FILE
        server.notes["announced"] = Stopping.of(text).refuse_at - server._started
        return server.notes

    return stop


def killed(notes):
    return {name.split()[0] for name in notes if name.endswith("killed")}


def test_an_idle_server_ends_within_half_a_second_of_the_drain_delay(stop):
    notes = stop()
    assert notes["gateway-0 ended"] <= notes["tritonserver killed"] < DELAY_S + 0.3
    assert notes["tritonserver killed"] == notes["engine asked"] == notes["health asked"]
    assert notes["cleaned up"] < DELAY_S + 0.5
    assert killed(notes) == {"tritonserver"}


def test_with_tracing_tritonserver_unloads_the_model_which_sends_its_last_spans(stop):
    notes = stop(otlp_endpoint="http://127.0.0.1:4318")
    assert notes["gateway-0 ended"] <= notes["tritonserver asked"] < DELAY_S + 0.3
    assert notes["tritonserver ended"] <= notes["engine asked"] < notes["tritonserver ended"] + 0.2
    assert notes["engine ended"] <= notes["cleaned up"] < notes["engine ended"] + 0.2
    assert killed(notes) == set()


def test_readiness_turns_off_before_anything_is_refused(stop):
    """The announcement says when requests will be refused; the model is not ready from the moment of the
    announcement.
    """
    notes = stop()
    assert notes["announced"] == DELAY_S
    assert notes["gateway-0 asked"] == pytest.approx(DELAY_S, abs=0.1)


@pytest.mark.parametrize("busy_s", [12.0, DRAIN_S + 5.0])
def test_tritonserver_ends_when_nothing_is_open_in_it(stop, busy_s):
    notes = stop(gateway=10.0, busy_s=busy_s)
    assert notes["gateway-0 ended"] == pytest.approx(DELAY_S + 10.0, abs=0.1)
    assert notes["tritonserver killed"] == pytest.approx(busy_s, abs=0.3)
    assert killed(notes) == {"tritonserver"}


@pytest.mark.parametrize(("held_s", "ends_at"), [(0.0, DELAY_S + 1.5), (9.0, 9.0), (NEVER, DELAY_S + DRAIN_S)])
def test_tritonserver_and_the_engine_stay_while_other_replicas_pull_blocks(stop, held_s, ends_at):
    notes = stop(held_s=held_s)
    latest = ends_at + STOP_MARGIN_S + 0.3 if held_s == NEVER else ends_at + 0.4
    assert ends_at <= notes["tritonserver killed"] <= notes["engine asked"] < latest


def test_a_gateway_that_does_not_end_is_killed_when_the_time_is_over(stop):
    notes = stop(gateway=NEVER)
    assert notes["gateway-0 killed"] == pytest.approx(DELAY_S + DRAIN_S + STOP_MARGIN_S + 2.0, abs=0.2)
    assert killed(notes) == {"gateway-0"}


def test_a_tritonserver_with_open_requests_may_unload_its_model_before_it_is_killed(stop):
    notes = stop(tritonserver=NEVER, busy_s=NEVER)
    assert notes["tritonserver asked"] == pytest.approx(DELAY_S + DRAIN_S + STOP_MARGIN_S, abs=0.3)
    assert notes["tritonserver killed"] == pytest.approx(notes["tritonserver asked"] + UNLOAD_S, abs=0.3)
    assert killed(notes) == {"tritonserver"}


def test_an_engine_that_does_not_end_is_killed(stop):
    notes = stop(engine=NEVER)
    assert notes["engine killed"] - notes["engine asked"] == pytest.approx(ENGINE_STOP_S, abs=0.1)


def test_a_server_that_was_still_starting_has_nothing_to_drain(stop):
    notes = stop(gateway=NEVER, tritonserver=NEVER, busy_s=NEVER, phase="starting")
    assert notes["announced"] == 0
    assert notes["tritonserver killed"] == pytest.approx(STOP_WHILE_STARTING_S + UNLOAD_S, abs=0.2)


@pytest.mark.parametrize("insists_at", [0.0, 7.0])
def test_a_second_signal_kills_what_is_still_there(stop, insists_at):
    notes = stop(gateway=NEVER, tritonserver=NEVER, engine=NEVER, busy_s=NEVER, insists_at=insists_at)
    assert killed(notes) == {"gateway-0", "tritonserver", "engine", "health"}
    assert notes["cleaned up"] == pytest.approx(insists_at, abs=0.2)


def test_not_even_what_cannot_be_killed_makes_it_longer_than_stop_server_waits(stop):
    stubborn = {"gateway": NEVER, "tritonserver": NEVER, "engine": NEVER, "dies_after": NEVER}
    notes = stop(**stubborn, busy_s=NEVER, adopted=[4711])
    assert notes["cleaned up"] == pytest.approx(shutdown.stop_timeout_s(Config(drain_timeout_s=DRAIN_S)), abs=1)
