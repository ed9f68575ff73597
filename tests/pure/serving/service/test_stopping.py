"""The end of a service: announced or at once, waited for or not, every open request has its own."""

import threading
import time
from types import SimpleNamespace

import pytest

from engine.serving import readiness as readiness_module
from engine.serving import service as service_module
from engine.settings.stopping import Stopping
from tests.patience import PATIENCE_S, wait_until
from tests.pure.service_fakes import FakeSender, a_payload, answer_to


def announce(path, stopping):
    """Write the announcement atomically, as the supervisor does."""
    partial = path.with_suffix(".partial")
    partial.write_text(stopping.text())
    partial.replace(path)


def test_an_announced_end_turns_readiness_off_then_refuses_then_ends_what_is_open(make, engine, tmp_path, monkeypatch):
    path, now_s = tmp_path / "stopping", [100.0]
    monkeypatch.setattr(readiness_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    service = make(stopping_file=path, drain_s=1.0)
    open_one = service.ask([1], "open")
    engine.listener_of([1])
    announce(path, Stopping(refuse_at=110.0))
    wait_until(lambda: service.not_ready_reason() == "the server is stopping")
    before = service.ask([2], "before")
    engine.give([2], b"b", "length")
    assert before.final["tokens_all"] == "b"
    now_s[0] = 110.9
    wait_until(lambda: service._readiness.is_draining)
    assert service.ask([3], "after").final["error_msg"] == "the server is stopping"
    time.sleep(0.02)  # it is asked all the time whether the time is up
    assert not open_one.is_over
    now_s[0] = 111.0
    assert (open_one.final["error_code"], open_one.final["error_msg"]) == (503, "the server is stopping")
    assert len(engine.cancelled) == 1
    assert answer_to(service, probe=True)["reason"] == "the server is stopping"


def test_an_announced_end_may_say_why_and_when_what_is_open_is_ended(make, engine, tmp_path, monkeypatch):
    path, now_s = tmp_path / "stopping", [100.0]
    monkeypatch.setattr(readiness_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    service = make(stopping_file=path, drain_s=1.0)
    announce(path, Stopping(110.0, "another model comes", 115.0))
    wait_until(lambda: service.not_ready_reason() == "another model comes")
    open_one, short_one = service.ask([1], "open"), service.ask([2], "short")
    engine.give([2], b"b", "length")
    assert short_one.final["tokens_all"] == "b"
    now_s[0] = 114.9  # later than `drain_s` after its beginning
    wait_until(lambda: service._readiness.is_draining)
    time.sleep(0.02)  # it is asked all the time whether the time is up
    assert not open_one.is_over
    now_s[0] = 115.0
    assert open_one.final["error_msg"] == "another model comes"
    assert service.ask([3], "late").final["error_msg"] == "another model comes"


def test_a_stop_waits_for_open_requests_and_refuses_new_ones(service, engine):
    open_one = service.ask([1], "open")
    engine.listener_of([1])
    stopping = threading.Thread(target=service.close, args=[PATIENCE_S])
    stopping.start()
    wait_until(lambda: service.not_ready_reason() == "the server is stopping")
    late = service.ask([2], "late")
    assert (late.final["error_code"], late.final["error_msg"]) == (503, "the server is stopping")
    engine.give([1], b"ab", "length")
    stopping.join(PATIENCE_S)
    assert open_one.final["tokens_all"] == "ab"


def test_a_stop_that_has_waited_long_enough_ends_what_is_open(service, engine):
    senders = [service.ask([n], str(n)) for n in range(20)]
    for n in range(20):
        engine.listener_of([n])
    service.close(drain_s=0.01)
    assert {sender.final["error_msg"] for sender in senders} == {"the server is stopping"}
    assert service.not_ready_reason() == "the server is stopping"


@pytest.mark.parametrize("finish_reason", [None, "length"])
def test_a_stream_that_takes_nothing_does_not_keep_the_server(make, engine, finish_reason, monkeypatch):
    monkeypatch.setattr(service_module, "FINAL_RESPONSES_S", 0.1)
    service, gate = make(checked=False), threading.Event()
    sender = FakeSender(lambda fields, final: gate.wait(PATIENCE_S))
    service.submit(a_payload(req_id="a", input_ids=[1]), sender)
    engine.give([1], b"a", finish_reason)
    service.close(drain_s=0.01)
    assert sender.sent == []  # it is still being sent
    gate.set()
