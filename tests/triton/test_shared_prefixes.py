"""Two servers of one model that share their prefix caches, and hand running requests over when one is stopped."""

import os
import random
import re
import signal

import pytest

from tests.patience import wait_until
from tests.server import a_server, free_ports
from tests.triton.asking import get, post
from tests.triton.test_replicas import NUM_ATTEMPTS, Stream, log_of, num_greetings, start_again

WORDS = ("red", "blue", "river", "seven", "France", "Paris", "count", "never", "long", "of", "the", "and", "why")
NUM_TOKENS, NUM_STREAMS = 2500, 10
SETTINGS = {
    **{"CPU_THREADS": "1", "MAX_DEC_LEN": str(NUM_TOKENS), "REMOTE_PREFILL_MIN_TOKENS": "64"},
    **{"DRAIN_TIMEOUT": "60", "DRAIN_DELAY": "2"},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    both = [a_server(folder / str(i), SETTINGS) for i in range(2)]
    for each, port in zip(both, free_ports(2), strict=True):
        each.env.update({"REPLICAS": ",".join(other.grpc_url for other in both), "REPLICA_CACHE_PORT": str(port)})
    try:
        for each in both:
            start_again(each)
        wait_until(lambda: all("answers, model" in log_of(each) for each in both))
        yield both
    finally:
        for each in both:
            each.command("stop_server", "0")


def pulled(server):
    _, page = get(server.ports["SERVICE_HTTP_PORT"], "/metrics")
    return float(re.search(r"^llm_pulled_blocks_total (\S+)$", page, re.MULTILINE)[1])


def a_prompt(seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(1000))


@pytest.mark.thorough
def test_running_requests_move_to_the_other_server_when_theirs_is_stopped(servers):
    front, other = servers
    for each in servers:  # so that both know how long a token takes
        assert post(each, "/v1/chat/completions", {"text": a_prompt(each.grpc_url), "max_dec_len": 1})[0] == 200
    common = {"min_dec_len": NUM_TOKENS, "max_dec_len": NUM_TOKENS, "stream": True}
    bodies = [{**common, "text": a_prompt(i), "temperature": i % 2, "infer_seed": i} for i in range(NUM_STREAMS)]
    expected = [stream.result() for stream in [Stream(front, body) for body in bodies]]
    for attempt in range(NUM_ATTEMPTS):
        # The salt keeps the front end from finding the same prompt and answer in its own cache.
        streams = [Stream(front, {**body, "cache_salt": f"{attempt}"}) for body in bodies]
        wait_until(lambda begun=streams: all(each.lines for each in begun))
        num_pulled, num_known = pulled(front), num_greetings(front, other)
        os.kill(other.pid_of("supervisor"), signal.SIGTERM)  # as stop_server does, which needs some time to start
        assert [each.result() for each in streams] == expected
        stopped = other.command("stop_server")
        assert stopped.returncode == 0, stopped.stdout
        was_needed = f"{other.grpc_url} is stopping and hands its requests over" in log_of(front)
        num_pulled = pulled(front) - num_pulled
        start_again(other)
        wait_until(lambda known=num_known: num_greetings(front, other) > known)
        if was_needed and num_pulled > 0:  # otherwise answers had ended, or it was faster to compute the prompts
            return
    raise AssertionError("no blocks were pulled from the server that was stopped")
