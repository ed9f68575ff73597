"""A supervisor that is killed leaves a server that goes on; the next one makes it its own. With fake children."""

import contextlib
import os
import signal

import pytest

from engine.settings.config import Config
from server_scripts.run_dir import Process, ServerState
from server_scripts.takeover import find_orphans, fingerprint
from tests.pure.fake_server import ALL, TIMEOUT_S, a_run_dir, fake_server, kill_supervisor
from tests.server import is_alive

pytestmark = pytest.mark.slow  # processes are started


def pids_of(server):
    return {process.name: process.pid for process in server.state.processes}


def test_all_go_on_and_the_next_supervisor_makes_them_its_own(tmp_path):
    with fake_server(tmp_path, ALL) as first:
        first.wait_until_ready()
        before = pids_of(first)
        kill_supervisor(first)
        assert all(map(is_alive, before.values()))
        with fake_server(tmp_path, ALL) as second:
            second.wait_until(lambda: second.state.supervisor.pid == second.process.pid)
            second.wait_until(lambda: second.log.count("INFO:supervisor:ready") > 1)
            assert pids_of(second) == before
            assert second.notes.count("engine started") == 1
            for name, count in (("engine", 2), ("gateway-0", 2), ("engine", 3)):
                second.wait_until_replaced(name, second.kill(name))
                # One that is killed or asked to end before it has noted its start would note neither.
                second.wait_until(lambda name=name, count=count: second.notes.count(f"{name} started") == count)
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(TIMEOUT_S) == 0
            ended = [line for line in second.notes if line.endswith("ended")]
            assert ended[0] == "gateway-0 ended"
            assert set(ended[1:]) == {"engine ended", "health ended"}
            assert not any(map(is_alive, before.values()))
            assert second.state is None


@pytest.mark.parametrize("name", ["health", "tritonserver helper"])
def test_only_processes_that_have_died_meanwhile_are_started_again(tmp_path, name):
    with fake_server(tmp_path, ALL) as first:
        first.wait_until_ready()
        before = pids_of(first)
        kill_supervisor(first)
        os.kill(before[name], signal.SIGKILL)
        with fake_server(tmp_path, ALL) as second:
            owner = name.removesuffix(" helper")
            second.wait_until(lambda: pids_of(second).get(owner) not in (None, before[owner]))
            second.wait_until(lambda: "tritonserver helper" in pids_of(second))
            kept = before.keys() - {"tritonserver", "tritonserver helper"} - {name}
            assert {each: pids_of(second)[each] for each in kept} == {each: before[each] for each in kept}


def test_a_supervisor_that_has_taken_over_may_be_killed_again(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(fake_server(tmp_path, ALL))]
        servers[0].wait_until_ready()
        before = pids_of(servers[0])
        for _ in range(2):
            kill_supervisor(servers[-1])
            servers.append(stack.enter_context(fake_server(tmp_path, ALL)))
            servers[-1].wait_until(lambda: servers[-1].state.supervisor.pid == servers[-1].process.pid)
            assert pids_of(servers[-1]) == before
        assert all(map(is_alive, before.values()))


@pytest.mark.parametrize(
    ("phase", "is_left"), [("ready", True), ("starting", False), ("changing", False), ("stopping", False)]
)
def test_only_what_was_ready_and_lives_is_worth_taking_over(tmp_path, phase, is_left):
    run_dir = a_run_dir(tmp_path)
    me = Process.of("engine", os.getpid())
    dead = Process("supervisor", me.pid, me.start_time - 1)
    run_dir.write_state(ServerState(phase, dead, 0.0, "m", "", {}, "", 5.0, [me]))
    assert (find_orphans(run_dir) is not None) == is_left
    run_dir.write_state(ServerState(phase, dead, 0.0, "m", "", {}, "", 5.0, [dead]))
    assert find_orphans(run_dir) is None


def test_a_fingerprint_tells_settings_and_models_apart_and_no_secret(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        (tmp_path / name / "config.json").write_text("{}")
    config, folder = Config(api_key="s3cret"), tmp_path / "a"
    mine = fingerprint(config, folder, "m")
    assert mine == fingerprint(Config(api_key="s3cret"), folder, "m")
    assert "s3cret" not in mine
    others = [fingerprint(Config(api_key="s3cret", batch_size=7), folder, "m"), fingerprint(Config(), folder, "m")]
    others += [fingerprint(config, tmp_path / "b", "m"), fingerprint(config, folder, "n")]
    (folder / "config.json").write_text('{"other": "weights"}')
    others.append(fingerprint(config, folder, "m"))
    assert len({mine, *others}) == 6
