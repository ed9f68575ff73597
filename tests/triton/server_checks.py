"""Checks that a whole server is unharmed after a test: its processes are the same, and its logs and answers contain no
internals.
"""

from __future__ import annotations

import contextlib

import grpc
from tritonclient.grpc import service_pb2_grpc

from tests.fuzz import INSIDE
from tests.patience import wait_until
from tests.server import running_server

PROCESSES = ("supervisor", "engine", "tritonserver", "stub", "gateway-0", "health")


@contextlib.contextmanager
def unbroken_server(folder, env):
    """Run a server. All of its processes must run until the end, and none may log a traceback."""
    with running_server(folder, env) as running:
        before = wait_until(lambda: pids(running))  # the supervisor notes the stub a moment later
        yield running
        assert pids(running) == before
        for path in running.log_dir.iterdir():
            assert "Traceback" not in path.read_text(errors="replace"), path


def pids(server):
    try:
        return [server.pid_of(name) for name in PROCESSES]
    except LookupError:
        return []


@contextlib.contextmanager
def a_channel(server):
    with grpc.insecure_channel(server.grpc_url, [("grpc.max_send_message_length", -1)]) as channel:
        yield channel


@contextlib.contextmanager
def a_stub(server):
    with a_channel(server) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def said(ask):
    """Return all that came back as one text, and check that it contains no internals."""
    try:
        text = "".join(map(str, ask()))
    except grpc.RpcError as error:
        text = f"{error.code()} {error.details()}"
    assert text, "there was no answer"
    assert [word for word in INSIDE if word in text] == []
    return text
