"""Two servers of one model on one host: streams continue with the same tokens when their server is killed."""

import contextlib
import http.client
import json
import os
import re
import signal
import threading

import pytest

from tests.patience import wait_until
from tests.server import pids_of, running_replicas, state_of
from tests.triton.asking import get, post, stream_lines

CHAT = "/v1/chat/completions"
NUM_TOKENS = 2500  # so many that answers have seldom ended when a test kills their server
NUM_ATTEMPTS = 5  # on a busy machine they may have
BODY = {"text": "Count.", "min_dec_len": NUM_TOKENS, "max_dec_len": NUM_TOKENS, "stream": True}
SETTINGS = {"CPU_THREADS": "1", "DRAIN_TIMEOUT": "0", "MAX_DEC_LEN": str(NUM_TOKENS)}
CASES = (
    {"temperature": 0},
    {"temperature": 4.0},  # the front end draws the seed
    {"temperature": 3.0, "seed": 7, "n": 2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 2.0, "seed": 8, "guided_regex": "([a-z]+ ){500,}", "logprobs": 0, "min_dec_len": None},
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with running_replicas(tmp_path_factory.mktemp("replicas"), SETTINGS) as both:
        yield both


def requests(name):
    bodies = [{**BODY, **case, "req_id": f"{name}-{i}"} for i, case in enumerate(CASES)]
    return [{field: value for field, value in body.items() if value is not None} for body in bodies]


def tokens_of(lines):
    """Return the tokens of each choice of a complete answer, as `tokens_of_choice` does."""
    assert [line["error_msg"] for line in lines if line["error_msg"]] == []
    assert lines[-1]["is_end"] == 1
    return [tokens_of_choice(lines, index) for index in sorted({line["index"] for line in lines})]


def tokens_of_choice(lines, index):
    """Return the tokens of one choice, each with its log-probabilities, or None if they were not asked for."""
    found = []
    for line in lines:
        if line["index"] == index:
            token_ids = line["token_ids"]
            found += zip(token_ids, line.get("logprobs") or [None] * len(token_ids), strict=True)
    return found


def log_of(server):
    return (server.log_dir / "http_server.log").read_text()


def fingerprint_of(server):
    """Return the fingerprint of the engine that was started last, which it writes into its log."""
    return re.findall(r"fingerprint (\w+)$", (server.log_dir / "infer_server.log").read_text(), re.M)[-1]


def start_again(server):
    started = server.command("start_server")
    assert started.returncode == 0, started.stdout + started.stderr


def num_greetings(server, other):
    """Return how often a server has found that the other one answers."""
    return log_of(server).count(f"replica {other.grpc_url} answers")


def kill(server):
    """Kill all processes of a server, as a loss of power would."""
    for pid in pids_of(state_of(server)):
        os.kill(pid, signal.SIGKILL)


class Stream(threading.Thread):
    """A stream that is read in the background, until its end or until the connection is lost."""

    def __init__(self, server, body):
        super().__init__(daemon=True)
        self.server, self.body, self.lines = server, body, []
        self.start()

    def run(self):
        port = self.server.ports["SERVICE_HTTP_PORT"]
        with (
            contextlib.suppress(OSError, http.client.HTTPException, ValueError),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection,
        ):
            connection.request("POST", CHAT, json.dumps(self.body))
            with connection.getresponse() as response:
                for line in response:
                    self.lines.append(json.loads(line))

    def result(self):
        self.join(120)
        return tokens_of(self.lines)


def answers_at(front):
    """Return the tokens of each case, asked at this front end."""
    streams = [Stream(front, body) for body in requests("plain")]
    return [stream.result() for stream in streams]


def wait_until_begun(streams):
    wait_until(lambda: all(stream.lines or not stream.is_alive() for stream in streams))


@pytest.fixture(scope="module")
def expected(servers):
    """Return the tokens of each case, generated without a loss."""
    front, other = servers
    wait_until(lambda: num_greetings(front, other) > 0)
    return answers_at(front)


def test_an_unseeded_request_has_the_same_answer_at_every_front_end(servers, expected):
    assert answers_at(servers[1]) == expected
    ids = {str([[token_id for token_id, _ in tokens] for tokens in choices]) for choices in expected}
    assert len(ids) == len(CASES) - 1  # log-probabilities do not change the tokens


def test_streams_continue_with_the_same_tokens_at_the_other_server(servers, expected):
    front, other = servers
    more = [requests(f"more-{i}")[0] for i in range(4)]  # so that both servers have some
    for _ in range(NUM_ATTEMPTS):
        streams = [Stream(front, body) for body in (*requests("plain"), *more)]
        wait_until_begun(streams)
        num_known = num_greetings(front, other)
        kill(other)
        assert [stream.result() for stream in streams] == expected + expected[:1] * 4
        was_needed = f"replica {other.grpc_url} is lost" in log_of(front) or "is sent to another" in log_of(front)
        start_again(other)
        wait_until(lambda known=num_known: num_greetings(front, other) > known)
        if was_needed:
            return
    raise AssertionError("no stream was open when its server was killed")


def test_equal_servers_have_equal_fingerprints_so_that_all_continuations_are_exact(servers):
    assert fingerprint_of(servers[0]) == fingerprint_of(servers[1]) != "0" * 12
    _, page = get(servers[0].ports["SERVICE_HTTP_PORT"], "/metrics")
    found = re.findall(r"^llm_replica_inexact_requests_total{.*} (\d+)$", page, re.M)
    assert found == ["0", "0"]


def test_a_client_that_loses_its_front_end_resumes_at_the_other_one(servers, expected):
    other, front = servers
    streams = [Stream(front, body) for body in requests("plain")]
    wait_until_begun(streams)
    kill(front)
    for stream in streams:
        stream.join(60)
    for stream, whole in zip(streams, expected, strict=True):
        if stream.lines[-1]["is_end"]:
            continue
        begun = [tokens_of_choice(stream.lines, i) for i in range(len(whole))]
        body = {**stream.body, "resume_from": [len(tokens) for tokens in begun]}
        rest = tokens_of(stream_lines(other, body))
        assert [tokens + more for tokens, more in zip(begun, rest, strict=True)] == whole
    start_again(front)


def test_a_request_is_aborted_wherever_it_is_computed(servers):
    front, other = servers
    for attempt in range(NUM_ATTEMPTS):
        bodies = [{**BODY, "req_id": f"abort-{attempt}-{i}", "temperature": 0} for i in range(4)]
        streams = [Stream(front, body) for body in bodies]
        wait_until_begun(streams)
        aborted = [post(other, "/v1/abort", {"req_id": body["req_id"]})[1]["aborted"] for body in bodies]
        for stream, was_open in zip(streams, aborted, strict=True):
            stream.join(60)
            last = stream.lines[-1]
            assert last["error_type"] == "cancelled" if was_open else last["finish_reason"] == "length"
        if all(aborted):
            return
    raise AssertionError("not all requests were aborted in any attempt")
