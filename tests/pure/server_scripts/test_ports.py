"""Tests of ports: which are taken, by which process, and the error that the operator gets."""

import os
import socket
import subprocess
import sys

import pytest

from engine.address import connect_host, in_url
from engine.settings.config import Config
from server_scripts import ports
from tests.server import free_ports


@pytest.fixture
def taken():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def a_config(**fields):
    """Return a config of free ports, except those that are given."""
    names = ("health_http_port", "service_grpc_port", "metrics_http_port")
    numbers = dict(zip(names, free_ports(len(names)), strict=True))
    return Config(**{**numbers, "service_http_port": -1, "service_host": "127.0.0.1", **fields})


def test_a_taken_port_is_named_with_its_variable_and_owner(taken):
    [problem] = ports.problems(a_config(service_grpc_port=taken))
    assert problem.startswith(f"SERVICE_GRPC_PORT is {taken}, which is taken by ")
    assert problem.endswith(f"(pid {os.getpid()}); set SERVICE_GRPC_PORT to a free port")


def test_a_port_that_everybody_listens_on_is_taken_too(taken):
    assert ports.problems(a_config(service_host="0.0.0.0", metrics_http_port=taken))


def test_free_ports_are_no_problem():
    assert ports.problems(a_config()) == []


def test_a_host_that_is_not_here_is_one_problem():
    [problem] = ports.problems(a_config(service_host="192.0.2.1"))
    assert problem.startswith("SERVICE_HOST is '192.0.2.1', which is no address of this machine: ")


@pytest.mark.parametrize("host", ["..", "x" * 64 + ".local"])
def test_a_host_that_cannot_even_be_looked_up_is_a_problem_too(host):
    [problem] = ports.problems(a_config(service_host=host))
    assert problem.startswith(f"SERVICE_HOST is '{host}', which is no address of this machine: ")


def test_an_owner_whose_name_was_cut_within_a_character_is_named(tmp_path):
    code = "import ctypes, socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    code += "ctypes.CDLL(None).prctl(15, b'\\xd0' * 3); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        assert ports.owner_of(port) == f"\ufffd\ufffd\ufffd (pid {process.pid})"


def test_without_http_there_is_no_http_port():
    assert "SERVICE_HTTP_PORT" not in ports.ports_of(a_config())
    assert ports.ports_of(a_config(service_http_port=28115))["SERVICE_HTTP_PORT"] == ("127.0.0.1", 28115)


def test_the_port_of_the_blocks_for_other_replicas_is_checked_too(taken):
    [problem] = ports.problems(a_config(replicas="10.0.0.2:8811", replica_cache_port=taken))
    assert problem.startswith(f"REPLICA_CACHE_PORT is {taken}, which is taken by ")


def test_a_client_on_this_machine_connects_to_the_loopback():
    assert [connect_host(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]


@pytest.mark.parametrize(("host", "written"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("a.b", "a.b")])
def test_an_address_with_colons_stands_in_brackets_before_its_port(host, written):
    assert in_url(host) == written


def test_a_free_port_has_no_owner():
    assert ports.owner_of(1) == ""
