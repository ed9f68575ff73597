"""Limits of API keys over two servers of one model on one host."""

import contextlib
import http.client
import json
import time

import pytest

from tests.patience import PATIENCE_S, in_background, wait_until
from tests.server import running_replicas

KEYS = {"alice": {"key": "alices", "max_requests": 2}, "bob": {"key": "bobs", "tokens_per_minute": 1000}}
LONG = {"text": "Count.", "min_dec_len": 3000, "max_dec_len": 3000, "temperature": 0}
TOO_MANY_OPEN = "2 requests of alice are open, at most 2 may be"
NUM_ATTEMPTS = 100  # of requests of few tokens, which do not use up the limit themselves


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    (folder / "keys.json").write_text(json.dumps(KEYS))
    settings = {"CPU_THREADS": "1", "DRAIN_TIMEOUT": "0", "MAX_DEC_LEN": "3000"}
    settings |= {"API_KEYS": str(folder / "keys.json"), "API_KEY": "operators"}
    with running_replicas(folder, settings) as both:
        front, other = both
        wait_until(lambda: f"replica {other.grpc_url} answers" in (front.log_dir / "http_server.log").read_text())
        yield both


def ask(server, path, body, key):
    """Return status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["SERVICE_HTTP_PORT"], timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def refusals(server, key):
    """Yield the texts of the refusals of NUM_ATTEMPTS short requests. What the servers know of each other is up to a
    second old, so that the first ones can be admitted, or refused with a number that was right before.
    """
    for _ in range(NUM_ATTEMPTS):
        status, text = ask(server, "/v1/chat/completions", {"text": "Hi", "max_dec_len": 1}, key)
        assert status in (200, 429), text
        if status == 429:
            yield json.loads(text)["error_msg"]
        time.sleep(0.1)


def test_tokens_that_one_server_has_computed_count_at_the_other_one(servers):
    assert ask(servers[0], "/v1/chat/completions", LONG, "bobs")[0] == 200
    for server in servers:
        assert "bob has used " in next(refusals(server, "bobs"))


def test_open_requests_count_whichever_servers_have_them(servers):
    bodies = [{**LONG, "req_id": f"open {i}"} for i in range(2)]
    for _ in range(NUM_ATTEMPTS):
        open_ones = [in_background(ask, servers[0], "/v1/chat/completions", body, "alices") for body in bodies]
        are_refused = [TOO_MANY_OPEN in refusals(server, "alices") for server in servers]
        aborts = [ask(servers[0], "/v1/abort", {"req_id": each["req_id"]}, "operators") for each in bodies]
        for each in open_ones:
            each.result(PATIENCE_S)
        if all(json.loads(text)["aborted"] for _, text in aborts):
            assert are_refused == [True, True]
            return
    raise AssertionError("the long answers had always ended")
