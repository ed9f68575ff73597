"""Fixtures of the tests of the whole server: each file has a server with its SETTINGS, and clients of it."""

import openai
import pytest

from tests.server import running_server


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server"), getattr(request.module, "SETTINGS", {})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client
