"""Tests of the interpretation of the server's answers: which process counts as healthy, and which has to be ended.
Answers and times are made up.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.settings.config import Config
from engine.wire import parse_request
from engine.wire.triton import encode_string
from server_scripts.child import Child, ChildSpec
from server_scripts.health import (
    ENGINE_SILENT_S,
    MAX_SILENT_PROBES,
    HealthMonitor,
    Observation,
    note_healthy,
    why_engine_must_end,
    why_triton_must_end,
)
from server_scripts.probe import Probe, ProbeError
from tests.pure.service_fakes import an_input_processor

CONFIG = Config(start_timeout_s=100.0, check_health_interval_s=30.0)


def a_child(name, started_at=1000.0, healthy_since=None):
    return Child(ChildSpec(name, [], {}, Path()), object(), started_at=started_at, healthy_since=healthy_since)


def an_answer(at, engine_silent_s=0.0):
    return Observation(at=at, state={"ready": True, "engine_silent_s": engine_silent_s})


def silence(at, num_failures):
    return Observation(at=at, num_failures=num_failures, error="no answer")


def test_an_answer_speaks_for_all_who_were_running_when_it_was_asked_for():
    engine, old, new, down = a_child("engine"), a_child("a"), a_child("b", started_at=1009.0), Child(a_child("c").spec)
    note_healthy(an_answer(1008.0, engine_silent_s=1.0), [engine], [old, new, down])
    assert [c.healthy_since for c in (engine, old, new, down)] == [1008.0, 1008.0, None, None]
    note_healthy(an_answer(1010.0), [engine], [old, new])
    assert [c.healthy_since for c in (engine, old, new)] == [1008.0, 1008.0, 1010.0]


def test_an_engine_that_the_model_heard_of_before_its_start_is_not_healthy_yet():
    engine = a_child("engine")
    note_healthy(an_answer(1008.0, engine_silent_s=9.0), [engine], [])
    assert engine.healthy_since is None


def test_of_several_engines_each_is_judged_by_itself():
    engines, triton = [a_child("engine"), a_child("engine-1")], a_child("tritonserver")
    state = {"ready": True, "engine_silent_s": 0.1, "engines": [(0.1, 31.0), (20.0, 0.0)]}
    seen = Observation(at=1008.0, state=state)
    note_healthy(seen, engines, [])
    assert [each.healthy_since for each in engines] == [1008.0, None]
    late = Observation(at=1200.0, state=state)
    engines[1].healthy_since = 1008.0
    reasons = [why_engine_must_end(late.of_engine(index), each, triton, CONFIG) for index, each in enumerate(engines)]
    assert reasons == ["has been computing one step for 31 s", "has been silent for 20 s"]


def test_silence_marks_no_process_healthy():
    triton = a_child("tritonserver")
    note_healthy(silence(1008.0, 1), [], [triton])
    assert triton.healthy_since is None


def test_a_tritonserver_that_was_healthy_may_be_silent_for_a_while():
    triton = a_child("tritonserver", healthy_since=1005.0)
    assert why_triton_must_end(silence(1008.0, MAX_SILENT_PROBES - 1), triton, CONFIG) == ""
    assert why_triton_must_end(silence(1009.0, MAX_SILENT_PROBES), triton, CONFIG) == (
        "was silent 3 times in a row: no answer"
    )


def test_a_tritonserver_that_loads_may_take_the_time_of_a_start():
    triton = a_child("tritonserver")
    assert why_triton_must_end(silence(1100.0, 900), triton, CONFIG) == ""
    assert why_triton_must_end(silence(1101.0, 900), triton, CONFIG) == (
        "has not been ready for 101 s since its start: no answer"
    )


@pytest.mark.parametrize(
    ("silent_s", "started_at", "healthy_since", "must_end"),
    [
        (ENGINE_SILENT_S, 1000.0, 1005.0, False),
        (ENGINE_SILENT_S + 0.5, 1000.0, 1005.0, True),
        (ENGINE_SILENT_S + 0.5, 1195.0, 1196.0, False),  # younger than the silence
        (100.0, 1000.0, None, False),  # loads
        (100.5, 1000.0, None, True),
        (1e9, 1000.0, 1005.0, False),  # this tritonserver has not met it, and is 5 s old
    ],
)
def test_an_engine_may_be_silent_for_a_while_or_while_it_loads(silent_s, started_at, healthy_since, must_end):
    engine, triton = a_child("engine", started_at, healthy_since), a_child("tritonserver", started_at=1195.0)
    assert bool(why_engine_must_end(an_answer(1200.0, silent_s), engine, triton, CONFIG)) == must_end


@pytest.mark.parametrize(("step_s", "must_end"), [(30.0, False), (30.5, True)])
def test_a_step_may_take_the_interval(step_s, must_end):
    engine, triton = a_child("engine", 1000.0, 1005.0), a_child("tritonserver")
    seen = Observation(at=1200.0, state={"ready": False, "engine_silent_s": 0.1, "engine_step_s": step_s})
    assert bool(why_engine_must_end(seen, engine, triton, CONFIG)) == must_end
    younger = a_child("engine", 1180.0, 1190.0)
    assert why_engine_must_end(seen, younger, triton, CONFIG) == ""  # the step was another engine's


class ScriptedProbe:
    """Says what stands in the list, one a turn."""

    def __init__(self, *states):
        self.states = list(states)
        self.num_checks = 0

    def state(self):
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    def check_all_ports(self):
        self.num_checks += 1
        if self.num_checks == 1:
            raise RuntimeError("the gateway is still starting")


def test_failures_are_counted_until_an_answer_and_ports_are_checked_until_they_have_answered_once():
    ready = {"ready": True}
    probe = ScriptedProbe(
        ValueError("one"), ValueError("two"), {"ready": False}, ready, ready, ready, ValueError("off")
    )
    monitor = HealthMonitor(probe, ask_every_s=0.0)
    seen = []
    while probe.states:
        monitor.ask()
        seen.append(monitor.latest)
    assert [o.num_failures for o in seen] == [1, 2, 0, 0, 0, 0, 1]
    assert [o.checked for o in seen] == [False, False, False, False, True, True, True]
    assert (probe.num_checks, seen[-1].error, seen[-1].check_error) == (2, "off", "")


def test_an_unreadable_answer_is_a_probe_error(monkeypatch):
    """A shutdown that waits for open requests must not fail, which would leave processes running."""
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.raw_output_contents.append(encode_string(b"\xc1 is no message"))
    stub = SimpleNamespace(ModelStreamInfer=lambda *_args, **_kwargs: [response])
    monkeypatch.setattr(service_pb2_grpc, "GRPCInferenceServiceStub", lambda _channel: stub)
    probe = Probe(CONFIG)
    with pytest.raises(ProbeError, match="an answer of 15 bytes is unreadable"):
        probe.state()
    assert probe.num_open() == 0


def test_the_request_of_a_probe_fits_the_smallest_limits(monkeypatch, tokenizer):
    monkeypatch.setattr(Probe, "state", lambda _probe: {"num_labels": 0})
    small = an_input_processor(tokenizer, lengths=(2, 1, 1))
    prompt = small.process(parse_request(Probe(CONFIG)._small_request()))
    assert (len(prompt.token_ids), prompt.sampling.max_new_tokens) == (1, 1)
