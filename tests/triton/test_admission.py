"""Keys, priorities, aborts and metrics through a real server with two gateway workers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re

import pytest

from tests.patience import PATIENCE_S, in_background, wait_until
from tests.server import paused, running_server

KEYS = {
    "alice": {"key": "alices", "max_requests": 2},
    "bob": {"key": "bobs", "tokens_per_minute": 60},
}
LONG = {"text": "Count.", "max_dec_len": 3900, "min_dec_len": 3900, "temperature": 1, "seed": 5}
ALICES_OPEN = 'llm_key_requests_open{key="alice"}'
ALICES_REFUSED = 'llm_key_refused_total{key="alice"}'
BOBS_TOKENS = 'llm_key_generated_tokens_total{key="bob"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("admission")
    (folder / "keys.json").write_text(json.dumps(KEYS))
    env = {"BATCH_SIZE": "1", "PUSH_MODE_HTTP_WORKERS": "2", "MAX_DEC_LEN": "4000"}
    env |= {"API_KEYS": str(folder / "keys.json"), "API_KEY": "operators", "QUEUE_TIMEOUT": "100"}
    with running_server(folder, env) as running:
        yield running


def ask(server, path, body=None, key="operators"):
    """Return status, headers and text, over a connection of its own, which any worker may take."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["SERVICE_HTTP_PORT"], timeout=120)
    with contextlib.closing(connection):
        payload = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def metric(server, name):
    found = re.search(rf"^{re.escape(name)} (\S+)$", ask(server, "/metrics")[2], re.M)
    return float(found[1]) if found else 0.0


def begin(server, body, key):
    """Ask in the background."""
    return in_background(ask, server, "/v1/completions", body, key)


def test_an_abort_reaches_the_request_whichever_worker_has_it(server):
    numbers = itertools.count()

    def is_aborted():
        """Return whether a request was aborted before its end. A fast machine may have answered it."""
        body = {**LONG, "req_id": f"long {next(numbers)}"}
        answer = begin(server, body, "alices")
        wait_until(lambda: metric(server, ALICES_OPEN) == 1 or answer.done())
        aborts = [ask(server, "/v1/abort", {"req_id": body["req_id"]}, key) for key in ("bobs", "alices")]
        of_bob, of_alice = (json.loads(text)["aborted"] for _, _, text in aborts)
        status, _, text = answer.result(PATIENCE_S)
        assert not of_bob
        expected = (499, "the request was aborted") if of_alice else (200, "")
        assert (status, json.loads(text)["error_msg"]) == expected
        return of_alice

    for _ in range(8):  # over both workers, with high probability
        wait_until(is_aborted)
    wait_until(lambda: is_aborted() and metric(server, "llm_wasted_tokens_total") > 0)
    wait_until(lambda: metric(server, "llm_requests_running") == 0)


def test_a_key_has_no_more_requests_open_than_its_limit_over_all_workers(server):
    bodies = [{**LONG, "req_id": f"open {number}"} for number in range(2)]
    wait_until(lambda: metric(server, ALICES_OPEN) == 0)  # of earlier tests
    num_refused = metric(server, ALICES_REFUSED)
    with paused(server.pid_of("engine")):
        answers = [begin(server, body, "alices") for body in bodies]
        wait_until(lambda: metric(server, ALICES_OPEN) == 2)
        refused = [ask(server, "/v1/completions", {**LONG, "max_dec_len": 1}, "alices") for _ in range(6)]
    for body, answer in zip(bodies, answers, strict=True):
        ask(server, "/v1/abort", {"req_id": body["req_id"]})
        answer.result(PATIENCE_S)
    assert {(status, headers["Retry-After"]) for status, headers, _ in refused} == {(429, "1")}
    assert metric(server, ALICES_REFUSED) - num_refused == 6


def test_of_more_prompts_than_a_key_may_have_open_the_others_wait(server):
    body = {"prompt": [f"Count to {number}." for number in range(5)], "max_tokens": 4}
    status, _, text = ask(server, "/v1/completions", body, "alices")
    assert (status, [choice["index"] for choice in json.loads(text).get("choices", ())]) == (200, [0, 1, 2, 3, 4])


def test_an_api_key_that_has_used_its_tokens_gets_the_time_of_the_next_ones(server):
    body = {**LONG, "min_dec_len": 90, "max_dec_len": 90}
    num_before = metric(server, BOBS_TOKENS)
    assert ask(server, "/v1/completions", body, "bobs")[0] == 200
    status, headers, text = ask(server, "/v1/completions", body, "bobs")
    assert (status, json.loads(text)["error_type"]) == (429, "overloaded")
    assert 20 <= int(headers["Retry-After"]) <= 60
    assert metric(server, BOBS_TOKENS) - num_before == 90


def test_urgent_requests_do_not_wait_for_others(server):
    """The batch has one place."""
    ends = []

    def ask_for(name, priority):  # of 300 tokens each, so that their ends are apart also on a busy machine
        body = {**LONG, "req_id": name, "min_dec_len": 300, "max_dec_len": 300, "priority": priority}
        assert ask(server, "/v1/completions", body)[0] == 200
        ends.append(name)

    with paused(server.pid_of("engine")):  # so that all of them are open before one has ended
        first = begin(server, {**LONG, "req_id": "first"}, "operators")  # runs until the engine has all others
        wait_until(lambda: metric(server, "llm_requests_open") == 1)
        others = []
        for number, (name, priority) in enumerate([("usual", 0), ("late", 5), ("urgent", -5)], 2):
            others.append(in_background(ask_for, name, priority))
            wait_until(lambda number=number: metric(server, "llm_requests_open") == number)
    ask(server, "/v1/abort", {"req_id": "first"})
    for answer in (first, *others):
        answer.result(PATIENCE_S)
    assert ends == ["urgent", "usual", "late"]


def test_the_gateways_page_has_histograms_of_prometheus(server):
    assert ask(server, "/v1/completions", {"text": "Hi", "max_dec_len": 1})[0] == 200
    status, headers, page = ask(server, "/metrics")
    assert (status, headers.get_content_type()) == (200, "text/plain")
    assert "# TYPE llm_request_seconds histogram\n" in page
    assert metric(server, 'llm_request_seconds_bucket{le="+Inf"}') == metric(server, "llm_request_seconds_count") > 0


def test_the_log_says_whose_requests_they_were_and_no_log_has_a_key(server):
    body = {"text": "Hi", "max_dec_len": 1}
    assert ask(server, "/v1/completions", body, "alices")[0] == 200
    assert ask(server, "/v1/completions", body, "bobs")[0] in (200, 429)  # an earlier test may have used his tokens

    def logged():
        return "".join(path.read_text() for path in server.log_dir.rglob("*") if path.is_file())

    wait_until(lambda: {" native alice ", " native bob "} <= {*re.findall(r" native \w+ ", logged())})
    text = logged()
    assert not re.search(r"\b(alices|bobs|operators)\b", text)
