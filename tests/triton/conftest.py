"""Fixtures of the tests of the whole server: each file has a server with its SETTINGS, and clients of it."""

from pathlib import Path

import openai
import pytest

from tests.server import running_server

# The files that take longest. When these come last, one of two workers waits for the other.
LONGEST = (
    "test_survival",
    "test_replicas",
    "test_reload",
    "test_machines",
    "test_server",
    "test_ports_under_load",
    "test_start_and_stop",
    "test_disaggregation",
    "test_fuzz",
    "test_server_refusals",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run the longest files first."""
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.path).stem, len(place)))


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server"), getattr(request.module, "SETTINGS", {})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client
