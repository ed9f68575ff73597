"""A scheduler instance is ready when its decode instances are, and otherwise says for what it waits."""

from engine.settings.config import Config
from server_scripts.probe import ProbeError
from server_scripts.scheduler import SchedulerProbe


def test_the_state_of_a_scheduler_is_that_of_its_decode_instances(monkeypatch):
    probe = SchedulerProbe(Config())
    monkeypatch.setattr(probe, "check_ready", lambda: None)
    assert probe.state()["ready"] is True
    assert probe.num_open() == 0

    def fail():
        raise ProbeError("port 8110: connection refused")

    monkeypatch.setattr(probe, "check_ready", fail)
    state = probe.state()
    assert (state["ready"], state["reason"]) == (False, "waiting for a decode instance: port 8110: connection refused")
    assert probe.num_open() == 0  # so that it can be stopped
