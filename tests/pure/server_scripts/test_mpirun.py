"""start_server as mpirun starts it, and on machines that are started one after another."""

from types import SimpleNamespace

import pytest

from engine.settings.config import Config
from server_scripts import serve
from tests.server import a_server

pytestmark = pytest.mark.slow  # processes are started

TWO_HOSTS = {"MP_NNODE": "2", "MP_NUM": "2", "POD_IPS": "127.0.0.1,127.0.0.2", "HOST_IP": "127.0.0.1"}


def started_by_mpirun(num: int, num_here: int) -> dict[str, str]:
    """Return what mpirun sets for the first of `num` commands, of which `num_here` are on this machine."""
    counts = {"SIZE": num, "LOCAL_SIZE": num_here, "LOCAL_RANK": 0}
    return {f"OMPI_COMM_WORLD_{name}": str(count) for name, count in counts.items()}


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (started_by_mpirun(4, 4), "4 times on this machine"),
        (TWO_HOSTS | started_by_mpirun(4, 2), "2 times on this machine"),
        (TWO_HOSTS | started_by_mpirun(1, 1), "on 1 machines, but MP_NNODE is 2"),
    ],
)
def test_a_missing_hostfile_is_named(env, problem, tmp_path):
    server = a_server(tmp_path, env)
    done = server.command("start_server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"start_server: mpirun has started this command {problem}; give mpirun a file")
    assert done.stderr.count("\n") == 1
    server.env["OMPI_COMM_WORLD_LOCAL_RANK"] = "1"  # the others leave the error to the first one of a machine
    done = server.command("start_server")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_variables_that_another_machine_lacks_are_noted(tmp_path):
    server = a_server(tmp_path, {**started_by_mpirun(2, 1), "MODEL_DIR": str(tmp_path / "model")})
    assert "mpirun has started this command on 2 machines, but MP_NNODE is 1" in server.command("start_server").stdout
    server.env["REPLICAS"] = "127.0.0.1:8811,127.0.0.2:8811"
    assert "mpirun" not in server.command("start_server").stdout


@pytest.mark.parametrize(("waits", "expected"), [(True, ["ready"]), (False, ["starting"])])
def test_the_master_can_return_while_it_waits_for_the_other_machines(waits, expected, tmp_path, monkeypatch):
    texts = {"mp_nnode": 2, "mp_num": 2, "pod_ips": "127.0.0.1,127.0.0.2", "host_ip": "127.0.0.1"}
    config = Config(**texts, log_dir=str(tmp_path), start_waits_for_machines=waits)
    returned, reported = [], []
    supervisor = SimpleNamespace(config=config, run_dir=SimpleNamespace(path=tmp_path), num_stop_signals=1)
    supervisor.adopt_and_listen = lambda: None
    supervisor.named = lambda name: SimpleNamespace(spec=SimpleNamespace(log_path=tmp_path / "none"))

    def bring_up(tell):
        for state in (None, {"reason": "the engine is starting: waits for 127.0.0.2"}, {"ready": True}):
            supervisor.seen = SimpleNamespace(state=state)
            supervisor.state = serve.new_state(config, "m", "ready" if state and "ready" in state else "starting")
            tell()

    supervisor.bring_up = bring_up
    monkeypatch.setattr(serve, "shut_down", lambda supervisor: None)
    assert serve.run_until_stopped(supervisor, reported.append, lambda: returned.append(supervisor.state.phase)) == 0
    assert returned == expected
    assert ("goes on waiting" in "".join(reported)) == (not waits)


def test_missing_prefill_instances_are_noted():
    config = Config(splitwise_role="decode", innode_prefill_ports="7013,7023")
    for num_connected, note in ((0, "note: 0 of 2"), (1, "note: 1 of 2"), (2, "")):
        seen = SimpleNamespace(state={"num_prefill_instances": num_connected})
        found = serve.missing_instances(SimpleNamespace(config=config, seen=seen))
        assert found.startswith(note) and bool(found) == bool(note)
    assert not serve.missing_instances(SimpleNamespace(config=Config(), seen=SimpleNamespace(state={"ready": True})))
