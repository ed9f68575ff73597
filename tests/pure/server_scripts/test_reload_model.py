"""Tests of reloading the model of a running server, with fake children: the commands that they get, and the result."""

import json
import os
import signal
import time
from dataclasses import asdict, replace

import pytest

from engine.errors import ConfigError
from engine.settings.config import Config
from engine.settings.processes import STOPPING_FILE
from engine.settings.served import SERVED_FILE, Served, ServedModel
from engine.settings.stopping import Stopping
from server_scripts.reload import REQUEST_FILE, WHY, ReloadRequest
from server_scripts.reload_client import ReloadError, follow, reload, running
from server_scripts.run_dir import Process, ServerState
from server_scripts.takeover import setting_fingerprints
from tests.pure.fake_server import ALL, READY, TIMEOUT_S, a_run_dir, fake_server
from tests.server import is_alive

pytestmark = pytest.mark.slow

BUSY = {"state": {**READY["state"], "num_open": 1}}


def want(server, engine="good", who="me"):
    """Ask for a model whose engine behaves as `engine` says."""
    server.run_dir.write(
        REQUEST_FILE, json.dumps(asdict(ReloadRequest(who, engine, f"a {engine} model", "its fingerprint")))
    )


def reloaded(server, who="me"):
    lines = []
    want(server, who=who)
    return follow(server.run_dir, server.state.supervisor, who, lines.append), lines


def pids_of(server):
    return {process.name: process.pid for process in server.state.processes}


def test_engine_and_tritonserver_are_started_anew_and_the_others_go_on(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        before, served = pids_of(server), ServedModel(server.run_dir.path)
        status, lines = reloaded(server)
        assert (status, lines[-1]) == (0, "a good model is ready")
        assert "ERROR" not in server.log  # an end that is wanted is no crash
        assert not is_alive(before["engine"]) and not is_alive(before["tritonserver"])
        assert {name for name, pid in pids_of(server).items() if before.get(name) == pid} == {"gateway-0", "health"}
        state, first = server.state, served.now()
        assert (state.phase, state.model, state.fingerprint) == ("ready", "a good model", "its fingerprint")
        assert first == Served(first.id, "a good model", graph_dir="good") and first.id
        assert not (server.run_dir.path / STOPPING_FILE).exists()
        assert reloaded(server, "another")[0] == 0
        assert served.now().id not in ("", first.id)
        server.wait_until_replaced("engine", server.kill("engine"))  # it is watched as any other


def test_open_requests_may_end_until_the_drain_timeout_and_new_ones_wait_meanwhile(tmp_path):
    with fake_server(tmp_path, ALL, drain_timeout_s=TIMEOUT_S) as server:
        server.wait_until_ready()
        server.answer(**BUSY)
        want(server)
        server.wait_until((server.run_dir.path / STOPPING_FILE).exists)
        announced = Stopping.of((server.run_dir.path / STOPPING_FILE).read_text())
        assert announced.refuse_at == announced.end_at > time.monotonic() + TIMEOUT_S / 2
        assert announced.why == WHY
        assert ServedModel(server.run_dir.path).now() == Served("", "fake", is_changing=True, graph_dir="good")
        num_asked = server.num_asked
        server.wait_until(lambda: server.num_asked > num_asked + 5)
        assert "engine ended" not in server.notes
        server.answer(**READY)
        assert follow(server.run_dir, server.state.supervisor, "me", lambda line: None) == 0
        assert not ServedModel(server.run_dir.path).now().is_changing


def test_a_model_that_never_ends_its_requests_is_ended_some_time_after_the_drain_timeout(tmp_path):
    with fake_server(tmp_path, ALL, drain_timeout_s=0.0) as server:
        server.wait_until_ready()
        server.answer(**BUSY)
        assert reloaded(server)[0] == 0


@pytest.mark.parametrize("why", ["failing", "answering no request"])
def test_a_model_that_does_not_become_ready_is_followed_by_the_one_before(tmp_path, why):
    with fake_server(tmp_path, ALL, check_for_s=0.0) as server:
        server.wait_until_ready()
        old = server.state
        is_ready = {**READY["state"], "ready": why != "failing"}
        server.answer(state=is_ready, model_error="it does not answer")
        want(server, why)
        server.wait_until(lambda: server.notes.count("engine started") >= 2)
        server.wait_until(lambda: "restoring" in server.log)
        server.answer(**READY)
        lines = []
        assert follow(server.run_dir, old.supervisor, "me", lines.append) == 1
        text = "\n".join(lines)
        assert ("the last words of a failing child" if why == "failing" else "it does not answer") in text
        assert lines[-1] == "fake is ready again"
        state = server.state
        assert (state.phase, state.model, state.fingerprint) == ("ready", "fake", old.fingerprint)
        assert ServedModel(server.run_dir.path).now() == Served("", "fake")
        server.wait_until(lambda: server.pid_now("tritonserver helper"))
        server.wait_until_replaced("engine", server.kill("engine"))


@pytest.mark.parametrize("phase", ["draining", "starting"])
def test_a_stop_in_the_middle_ends_all_and_tells_who_waits(tmp_path, phase):
    with fake_server(tmp_path, ALL, drain_timeout_s=TIMEOUT_S) as server:
        server.wait_until_ready()
        server.answer(**(BUSY if phase == "draining" else READY), model_error="not yet")
        want(server)
        running_as = "changing" if phase == "draining" else "starting"
        server.wait_until(lambda: server.state.phase == running_as)
        supervisor, pids = server.state.supervisor, pids_of(server)
        server.process.send_signal(signal.SIGTERM)
        assert follow(server.run_dir, supervisor, "me", lambda line: None) == 1
        server.answer(**READY)
        assert server.process.wait(TIMEOUT_S) == 0
        num_ready = 2 if phase == "draining" else 1  # the stop waits for what is open then
        assert server.log.count("INFO:supervisor:ready") == num_ready
        assert not any(map(is_alive, pids.values()))
        assert not (server.run_dir.path / SERVED_FILE).exists()


def test_waiting_for_a_server_that_has_died_fails(tmp_path):
    with fake_server(tmp_path, ALL) as server:
        server.wait_until_ready()
        dead = Process("supervisor", server.process.pid, 1)
        with pytest.raises(ReloadError, match="the server has ended meanwhile"):
            follow(server.run_dir, dead, "somebody else", lambda line: None)


def a_state(**known):
    me = Process.of("supervisor", os.getpid())
    return replace(
        ServerState("ready", me, 0.0, "m", "", {}, "", 5.0, settings=setting_fingerprints(Config())), **known
    )


def test_no_model_can_be_changed_where_no_server_is_ready(tmp_path):
    run_dir = a_run_dir(tmp_path)
    with pytest.raises(ReloadError, match="no server runs in RUN_DIR"):
        running(run_dir, Config())
    run_dir.write_state(a_state(supervisor=Process("supervisor", os.getpid(), 1)))
    with pytest.raises(ReloadError, match="no server runs in RUN_DIR"):
        running(run_dir, Config())
    run_dir.write_state(a_state(phase="starting"))
    with pytest.raises(ReloadError, match="the server is not ready, it is starting"):
        running(run_dir, Config())


def test_only_the_model_may_differ_and_no_secret_is_printed(tmp_path):
    run_dir = a_run_dir(tmp_path)
    run_dir.write_state(a_state())
    assert running(run_dir, Config(model_dir="another", served_model_name="b", api_key="s3cret")) == a_state()
    with pytest.raises(ConfigError, match=r"^BATCH_SIZE, FD_LOG_DIR have changed since the server was started"):
        running(run_dir, Config(batch_size=7, log_dir="elsewhere"))
    assert "API_KEY" not in setting_fingerprints(Config(api_key="s3cret"))


def test_a_model_on_several_machines_is_not_changed(tmp_path, monkeypatch):
    machines = {"MP_NNODE": "2", "MP_NUM": "2", "POD_IPS": "127.0.0.1,127.0.0.2", "HOST_IP": "127.0.0.1"}
    for name, text in {"RUN_DIR": str(tmp_path), **machines}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match="MP_NNODE is 2, --reload is for one machine"):
        reload("", print)
