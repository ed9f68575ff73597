"""A prefill and a decode instance on one host, with the options of FastDeploy: equal answers, and killed engines."""

import itertools
import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.settings.processes import ENGINE_PROGRESS_FILE
from tests.patience import wait_until
from tests.server import a_server, free_ports, running_server, state_of
from tests.triton.asking import get, health_of, post, settled, stream_lines

NUM_STREAMS = 6
SETTINGS = {"CPU_THREADS": "1", "MAX_DEC_LEN": "600"}
WORDS = ("red", "blue", "river", "seven", "France", "Paris", "count", "never", "long", "of", "the", "and", "why")
REMOTE = ("llm_remote_prefills_total", "llm_remote_prefill_failures_total")
CASES = (
    {"temperature": 0},
    {"temperature": 1.5, "infer_seed": 3, "n": 2},
    {"temperature": 1, "infer_seed": 4, "top_p": 0.7, "penalty_score": 1.3, "logprobs": 2},
    {"temperature": 1, "infer_seed": 5, "response_format": {"type": "json_object"}},
)


def a_prompt(seed, num_words=1000):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def of_role(folder, role, *arguments):
    """Return a server that does not run yet, and the options that start it."""
    server = a_server(folder / role, SETTINGS)
    server.env.pop("SERVICE_GRPC_PORT")  # FastDeploy has none
    return server, ["--splitwise-role", role, *arguments]


def grpc_address(server):
    """Return the address of the gRPC port, which follows from the HTTP port."""
    return f"127.0.0.1:{server.ports['SERVICE_HTTP_PORT'] + 100}"


@pytest.fixture(scope="module")
def instances(tmp_path_factory):
    """Return the prefill and the decode instance."""
    folder, [port] = tmp_path_factory.mktemp("disaggregation"), free_ports(1)
    both = [
        of_role(folder, "prefill", "--engine-worker-queue-port", str(port)),
        of_role(folder, "decode", "--innode-prefill-ports", str(port)),
    ]
    both[1][0].env["REPLICAS"] = grpc_address(both[1][0])  # for a scheduler
    try:
        for server, options in both:
            started = server.command("start_server", *options)
            assert started.returncode == 0, started.stdout + started.stderr
        yield [server for server, _ in both]
    finally:
        for server, _ in both:
            server.command("stop_server", "0")


def value_of(server, family):
    _, page = get(server.ports["SERVICE_HTTP_PORT"], "/metrics")
    return float(re.search(rf"^{family} (\S+)$", page, re.MULTILINE)[1])


def answer(server, body):
    """Return what a request is answered with, without its id and times."""
    status, found = post(server, "/v1/chat/completions", body)
    assert status == 200, found
    return without_times(found)


def without_times(value):
    if isinstance(value, list):
        return [without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    differ = ("req_id", "infer_seed", "inference_time_cost")
    return {name: without_times(each) for name, each in value.items() if name not in differ}


def assert_no_blocks_are_held(servers):
    for server in servers:
        wait_until(lambda: value_of(server, "llm_kv_blocks_held") == 0)  # noqa: B023


def test_answers_are_those_of_a_mixed_server_and_prompts_are_computed_elsewhere(instances, tmp_path):
    prefill, decode = instances
    wait_until_connected(decode)
    before, num_failures = (settled(lambda decode, name=name: value_of(decode, name), decode) for name in REMOTE)
    bodies = [{"text": a_prompt(i), "max_dec_len": 20, **case} for i, case in enumerate(CASES)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: answer(decode, body), bodies))
    wait_until(lambda: value_of(decode, "llm_remote_prefills_total") - before == len(bodies))
    assert value_of(decode, "llm_remote_prefill_failures_total") == num_failures
    with running_server(tmp_path, SETTINGS) as mixed:
        assert [answer(mixed, body) for body in bodies] == found
    assert_no_blocks_are_held(instances)
    # A prefill instance that was killed after this is started again at once.
    assert (prefill.run_dir / ENGINE_PROGRESS_FILE).exists()


def test_short_prompts_are_computed_where_they_are_answered(instances):
    _, decode = instances
    # An earlier test may still be counted.
    before = settled(lambda decode: value_of(decode, "llm_remote_prefills_total"), decode)
    num_steps = value_of(decode, "llm_steps_total")
    answer(decode, {"text": "What is the capital of France?", "max_dec_len": 5})
    wait_until(lambda: value_of(decode, "llm_steps_total") > num_steps)  # the figures are those after the answer
    assert value_of(decode, "llm_remote_prefills_total") == before


def wait_until_connected(decode):
    """Send new prompts until one is computed elsewhere."""
    names, before = itertools.count(), value_of(decode, "llm_remote_prefills_total")

    def is_connected():
        answer(decode, {"text": a_prompt(f"{before} {next(names)}"), "max_dec_len": 1})
        return value_of(decode, "llm_remote_prefills_total") > before

    wait_until(is_connected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_streams_continue_when_an_engine_is_killed_during_transfers(instances, role):
    prefill, decode = instances
    wait_until_connected(decode)
    bodies = [
        {"text": a_prompt(f"{role} {i}"), "max_dec_len": 60, "temperature": i % 2, "infer_seed": i, "stream": True}
        for i in range(NUM_STREAMS)
    ]
    before = value_of(decode, "llm_remote_prefills_total")

    def ask(body):
        lines = stream_lines(decode, body)
        assert not lines[-1]["error_code"], lines[-1]
        return lines[-1]["tokens_all_ids"]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        disturbed = [pool.submit(ask, body) for body in bodies]
        wait_until(lambda: value_of(decode, "llm_remote_prefills_total") > before)
        os.kill((prefill if role == "prefill" else decode).pid_of("engine"), signal.SIGKILL)
        answers = [future.result() for future in disturbed]
    assert_no_blocks_are_held(instances)
    assert [ask(body) for body in bodies] == answers


def test_a_scheduler_without_a_model_sends_requests_to_the_decode_instance(instances, tmp_path):
    _, decode = instances
    wait_until_connected(decode)
    body = {"text": a_prompt("scheduled"), "max_dec_len": 20, "temperature": 1, "infer_seed": 7}
    server, options = of_role(tmp_path, "scheduler", "--replicas", grpc_address(decode))
    started = server.command("start_server", *options)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        assert {process.name for process in state_of(server).processes} == {"gateway-0", "health"}
        before = settled(lambda decode: value_of(decode, "llm_remote_prefills_total"), decode)
        found = answer(server, body)
        wait_until(lambda: value_of(decode, "llm_remote_prefills_total") > before)
        assert found["tokens_all_ids"] == answer(decode, body)["tokens_all_ids"]
        assert [health_of(server, what)[0] for what in ("live", "ready")] == [200, 200]
    finally:
        assert server.command("stop_server", "0").returncode == 0


def log_of(server):
    return (server.log_dir / "infer_server.log").read_text()


@pytest.mark.thorough
def test_a_decode_instance_of_another_model_does_not_start(instances, tmp_path):
    prefill, _ = instances
    port = re.search(r"prompts of decode instances are computed, port (\d+)", log_of(prefill))[1]
    server, options = of_role(tmp_path, "decode", "--innode-prefill-ports", port, "--block-size", "32")
    started = server.command("start_server", *options)
    server.command("stop_server", "0")
    assert started.returncode == 1
    assert f"the prefill instance 127.0.0.1:{port} cannot be used: the model (hash of config.json" in started.stdout
