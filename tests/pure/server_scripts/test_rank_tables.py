"""Rank tables: the tool writes the documents' files, and an instance takes its settings from them."""

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings import rank_tables
from engine.settings.config import Config
from engine.settings.disaggregation import PORT_OFFSETS
from engine.settings.foreign.rank_table import settings_of_tables
from server_scripts import pd_ranktable_tools as tool
from server_scripts.scheduler import check_instances
from tests.documents import GLOBAL_TABLE, LOCAL_TABLE
from tests.server import a_server, free_ports

ROOT = Path(__file__).resolve().parents[3]
GEN = "--mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server --save-dir"


def addressed(table, host, device_ip):
    """Return a documented table as a machine with these addresses has it."""
    text = json.dumps(table).replace("localhost", host)
    table = json.loads(text)
    for group in table.get("server_group_list", [table]):
        for device in (device for server in group["server_list"] for device in server.get("device", ())):
            device["device_ip"] = device_ip
    return table


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_IP", "10.0.0.18")
    assert tool.main([*GEN.split(), str(tmp_path)]) == 0
    return {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}


def environment(folder, spelling="local_ranktable_", part="67", port=8089, ports="8088,8089"):
    return {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / "global_ranktable_10.0.0.18.json"),
        "RANK_TABLE_FILE_PATH": str(folder / f"{spelling}10.0.0.18_{part}.json"),
        **{"NODE_PORTS": ports, "SERVICE_HTTP_PORT": str(port)},
    }


def test_generated_tables_are_those_of_the_document(tables):
    table = addressed(GLOBAL_TABLE, "10.0.0.18", "10.0.0.18")
    assert tables["global_ranktable_10.0.0.18.json"] == table
    assert tables["local_ranktable_10.0.0.18_67.json"] == addressed(LOCAL_TABLE, "10.0.0.18", "10.0.0.18")
    groups = [group["server_list"] for group in table["server_group_list"]]
    locals_ = [tables[f"local_ranktable_10.0.0.18_{part}.json"] for part in ("host", "45", "67")]
    assert [each["server_list"] for each in locals_] == groups
    assert len(tables) == 4


def test_the_address_of_the_rdma_interface_is_the_devices_if_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "mlx5_0/device/net/lo").mkdir(parents=True)
    monkeypatch.setattr(tool, "RDMA_DEVICES", tmp_path)
    assert tool.rdma_address() == "127.0.0.1"
    (tmp_path / "mlx5_0/device/net/lo").rename(tmp_path / "mlx5_0/device/net/none")
    assert tool.rdma_address() == ""


def test_merged_tables_keep_the_order_of_the_machines(tables, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_IP", "10.0.0.9")
    assert tool.main(f"--mode gen --decode-server-list 0 1 --save-dir {tmp_path}".split()) == 0
    paths = [tmp_path / f"global_ranktable_{host}.json" for host in ("10.0.0.18", "10.0.0.9")]
    assert tool.main(["--mode", "merge", "--global-ranktable-list", *map(str, paths), "--save-dir", str(tmp_path)]) == 0
    merged = rank_tables.read_global("", str(tmp_path / "global_ranktable_merge.json"))
    assert [(each.role, each.host, each.device_ids) for each in merged] == [
        ("scheduler", "10.0.0.18", ()),
        ("prefill", "10.0.0.18", ("4", "5")),
        *(
            ("decode", host, ids)
            for host, ids in (("10.0.0.18", ("6", "7")), ("10.0.0.9", ("0",)), ("10.0.0.9", ("1",)))
        ),
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("gen --prefill-server-list 4,5 --decode-server-list 5,6", "device 5 of 10.0.0.18 twice"),
        ("gen --prefill-server-list 4,x", "'4,x', it must be device ids with commas"),
        ("gen", "needs --prefill-server-list, --decode-server-list or --api-server"),
        ("merge --global-ranktable-list {0} {0}", "has 2 schedulers, 10.0.0.18 and 10.0.0.18"),
        ("merge --global-ranktable-list none.json", "'none.json', which cannot be read"),
        ("gen --prefill-server-list 4 --save-dir /proc/none", "--save-dir: /proc/none: No such file or directory"),
    ],
)
def test_a_wrong_table_is_refused_with_the_reason(tables, tmp_path, capsys, arguments, problem):
    path = tmp_path / "global_ranktable_10.0.0.18.json"
    assert tool.main(["--mode", *arguments.format(path).split()]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"part": "45", "port": 8088, "ports": "8089,8088"},
            "prefill instance .* has port 8089, but its --port is 8088",
        ),
        ({"ports": "8088"}, "it must have one port for each of 2 instances"),
        ({"ports": "8089,8089"}, "port 8089 twice on 10.0.0.18"),
        ({"part": "host", "port": 8088}, "the scheduler's own --port 8088"),
        ({"part": "89"}, "local_rank_table_10.0.0.18_89.json', which cannot be read"),
        ({"MP_NUM": "4"}, "MP_NUM is 4, the rank tables give the decode instance 10.0.0.18, devices 6,7 2"),
        (
            {"SERVICE_GRPC_PORT": "9112"},
            "SERVICE_GRPC_PORT is 9112, the rank tables give the decode instance .* 8189",
        ),
        ({"NODE_PORTS": ""}, "GLOBAL_RANK_TABLE_FILE_PATH is set, so NODE_PORTS must be set as well"),
    ],
)
def test_an_error_in_the_tables_of_an_instance_is_found_at_start(tables, tmp_path, changes, problem):
    variables = {name: value for name, value in changes.items() if name.isupper()}
    arguments = {name: value for name, value in changes.items() if name not in variables}
    with pytest.raises(ConfigError, match=problem):
        settings_of_tables(environment(tmp_path, **arguments) | variables)


@pytest.mark.parametrize(
    ("part", "port", "expected"),
    [
        ("host", 9000, {"SPLITWISE_ROLE": "scheduler", "REPLICAS": "10.0.0.18:8189"}),
        ("45", 8088, {"SPLITWISE_ROLE": "prefill", "MP_NUM": "2"}),
        ("67", 8089, {"SPLITWISE_ROLE": "decode", "PREFILL_INSTANCES": "10.0.0.18:8488", "REPLICAS": "10.0.0.18:8189"}),
    ],
)
def test_tables_give_the_role_of_an_instance_and_the_addresses_of_the_others(tables, tmp_path, part, port, expected):
    for spelling in ("local_ranktable_", "local_rank_table_"):
        environ = environment(tmp_path, spelling, part, port)
        assert settings_of_tables(environ).items() >= expected.items()
        Config.from_env(environ | settings_of_tables(environ))


def test_a_scheduler_notices_that_instances_listen_on_each_others_ports(tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_IP", "127.0.0.1")
    options = f"--mode gen --prefill-server-list 4 --decode-server-list 6 --api-server --save-dir {tmp_path}"
    assert tool.main(options.split()) == 0
    with contextlib.ExitStack() as opened:
        prefill, decode = free_ports(2)
        for port in (prefill, prefill + PORT_OFFSETS["engine_worker_queue_port"], decode):
            opened.enter_context(socket.create_server(("127.0.0.1", port)))
        variables = {
            "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "global_ranktable_127.0.0.1.json"),
            "RANK_TABLE_FILE_PATH": str(tmp_path / "local_ranktable_127.0.0.1_host.json"),
        }
        check_instances({**variables, "NODE_PORTS": f"{prefill},{decode}"})
        with pytest.raises(ConfigError, match=f"prefill instance .* has port {decode}, but a decode instance listens"):
            check_instances({**variables, "NODE_PORTS": f"{decode},{prefill}"})
    check_instances({**variables, "NODE_PORTS": f"{decode},{prefill}"})  # what does not run cannot be checked


def test_stop_server_with_the_run_directory_of_an_instance_needs_no_table(tables, tmp_path):
    """`start_server` prints such a command, and the shell may have only some of the variables."""
    variables = {"GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "global_ranktable_10.0.0.18.json")}
    server = a_server(tmp_path / "server", variables)
    done = server.command("stop_server")
    assert (done.returncode, done.stderr) == (0, "")
    del server.env["RUN_DIR"]
    assert "so RANK_TABLE_FILE_PATH must be set as well" in server.command("stop_server").stderr


def test_start_servers_refuses_a_wrong_order_of_ports_within_a_second(tables, tmp_path):
    script = ROOT / "server_scripts/start_servers.sh"
    options = ["--model=M", "--tensor-parallel-size=2", "--max-model-len=4096", "--host=0.0.0.0", "--port=8089"]
    variables = environment(tmp_path, ports="8089,8088")
    del variables["SERVICE_HTTP_PORT"]
    before = os.times()
    command = ["sh", script, *options]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "start_server: NODE_PORTS is '8089,8088', where the decode instance" in done.stderr
    after = os.times()  # CPU time, because the machine may be busy
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1
