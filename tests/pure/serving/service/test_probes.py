"""Tests of requests about the service itself, which do not wait for answers of the model."""

import threading

import pytest

from engine import wire
from engine.serving import service as service_module
from engine.serving.input_processor import InputProcessor
from tests.patience import PATIENCE_S
from tests.pure.service_fakes import FakeEngine, FakeSender, a_payload, answer_to


def test_a_probe_tells_the_state_without_a_token(service, engine):
    state = answer_to(service, probe=True)
    assert (state["ready"], state["reason"], state["is_end"]) == (True, "", 1)
    assert (state["num_running"], state["num_blocks_held"], state["num_open"]) == (1, 2, 0)
    assert (state["model_len"], state["max_seq_len"], state["max_dec_len"]) == (100, 80, 50)
    assert engine.prompts == {}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("reason", "given up", "given up"),
        ("silent_s", float("inf"), "the engine is starting"),
        ("silent_s", 3.0, "the engine has been silent for 3 s"),
        ("stats", {"step_age_s": 8.0, "step_limit_s": 7.0}, "the engine has been computing one step for 8 s"),
        ("stats", {"step_age_s": 8.0, "step_limit_s": 0.1}, "the engine has been computing one step for 8 s"),
        ("stats", {"step_age_s": 61.0, "step_limit_s": 90.0}, "the engine has been computing one step for 61 s"),
        ("stats", {"step_age_s": 61.0}, "the engine has been computing one step for 61 s"),
    ],
)
def test_a_probe_tells_why_the_model_is_not_ready(service, engine, field, value, reason):
    setattr(engine, field, value)
    state = answer_to(service, probe=True)
    assert (state["ready"], state["reason"]) == (False, reason)


def test_a_start_waits_for_all_engines_and_then_one_is_enough(service, engine, monkeypatch):
    other = FakeEngine()
    other.silent_s = float("inf")
    monkeypatch.setattr(FakeEngine, "engines", [engine, other])
    assert answer_to(service, probe=True)["reason"] == "the engine is starting"
    other.silent_s = 0.0
    assert answer_to(service, probe=True)["ready"]
    engine.silent_s = 3.0
    state = answer_to(service, probe=True)
    assert (state["ready"], state["engines"]) == (True, [[3.0, 0.0], [0.0, 0.0]])
    other.reason = "given up"
    assert answer_to(service, probe=True)["reason"] == "the engine has been silent for 3 s"


def test_a_start_does_not_wait_for_an_engine_that_is_given_up(service, engine, monkeypatch):
    other = FakeEngine()
    other.reason = "given up"
    monkeypatch.setattr(FakeEngine, "engines", [other, engine])
    assert answer_to(service, probe=True)["ready"]


@pytest.mark.parametrize(
    ("silent_s", "stats"),
    [
        (1.5, {}),
        (0.1, {"step_age_s": 4.0, "step_limit_s": 0.1}),  # other processes may have had the cores
        (0.1, {"step_age_s": 30.0, "step_limit_s": 40.0}),  # a long one, as it was to be expected
        (0.1, {"step_age_s": 50.0, "step_limit_s": 0.0}),  # the first one ever
    ],
)
def test_a_long_step_is_no_reason_not_to_be_ready(service, engine, silent_s, stats):
    engine.silent_s, engine.stats = silent_s, stats
    assert answer_to(service, probe=True)["ready"]


@pytest.fixture
def busy_intake(service, monkeypatch):
    """Keep every intake thread busy with a slow request. Return a function that ends these requests."""
    gate, entered = threading.Event(), threading.Semaphore(0)
    read = InputProcessor.process
    monkeypatch.setattr(
        InputProcessor,
        "process",
        lambda self, request: (entered.release(), gate.wait(PATIENCE_S), read(self, request))[2],
    )
    for number in range(service_module.NUM_PARSER_THREADS):
        service.ask([number], f"long {number}")
        assert entered.acquire(timeout=PATIENCE_S)
    yield gate
    gate.set()
    for number in range(service_module.NUM_PARSER_THREADS):
        service.client.give([number], b"a", "length")


def test_a_probe_waits_for_no_request_that_is_read(service, busy_intake):
    sender = FakeSender()
    service.submit(wire.PROBE_PAYLOAD, sender)
    assert sender.is_over and sender.final["ready"] is True


def test_an_abort_waits_for_no_request_that_is_read_and_is_taken_in_by_a_full_server(service, engine, busy_intake):
    engine.stats["num_waiting_tokens"] = 1 << 40
    assert answer_to(service, abort="unknown")["aborted"] is False
    engine.stats["num_waiting_tokens"] = 0
    sender = FakeSender()
    service.submit(a_payload(text='so much of "abort"' + " more" * wire.request.MAX_URGENT_BYTES), sender)
    assert not sender.is_over  # a long text waits for its turn, whatever it speaks of
    sender.cancelled = True


def test_a_request_whose_client_left_before_it_was_read_is_not_read(service, engine, busy_intake):
    sender = FakeSender()
    sender.cancelled = True
    service.submit(b"[{ no json", sender)
    busy_intake.set()
    assert sender.final["error_type"] == "cancelled"


def test_requests_that_wait_to_be_read_count_as_waiting(make, engine, monkeypatch):
    gate, entered = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(service_module, "NUM_PARSER_THREADS", 1)
    service = make(max_running=1, max_waiting=2)
    monkeypatch.setattr(
        service_module.wire, "only_object", lambda payload: (entered.release(), gate.wait(PATIENCE_S), {})[2]
    )
    first = service.ask([1], "first")
    assert entered.acquire(timeout=PATIENCE_S)
    waiting = [service.ask([n], f"waits {n}") for n in range(3)]
    refused = service.ask([9], "refused")
    is_over = refused.is_over  # at once, not when its turn comes
    gate.set()
    assert (is_over, refused.final["error_code"], refused.final["error_type"]) == (True, 429, "overloaded")
    assert {sender.final["error_code"] for sender in (first, *waiting)} == {400}


def test_metrics_are_returned_with_a_probe_that_asks_for_them(service):
    assert answer_to(service, probe=True)["metrics"] is None
    metrics = answer_to(service, probe="metrics")["metrics"]
    assert ["llm_requests_running", "gauge", "Requests in the batch", [], 1, ""] in metrics
