"""Tests of requests that the whole server refuses, of the error texts, and that the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tritonclient.grpc as triton
import tritonclient.utils as triton_errors

from tests.patience import PATIENCE_S, wait_until
from tests.server import paused, running_server, state_of
from tests.triton.asking import (
    CHAT,
    GrpcStream,
    facts,
    grpc_request,
    health_of,
    long_answers,
    post,
    stream_of,
    wait_until_idle,
)

# One for each place where a request is looked at: tests/pure has what each of them refuses.
BAD_BODIES = [
    (b"{", "not valid JSON"),
    (b"[]", "JSON object"),
    ({}, "`messages`"),
    ({"text": "hi", "stream": "yes"}, "`stream`"),
    ({"text": "hi", "topp": 1.5}, "`topp`"),
    ({"text": "hi", "topp": 0.5, "top_p": 0.5}, "top_p"),
    ({"text": "hi", "max_declen": 5}, "max_dec_len"),
    ({"text": "hi", "max_dec_len": 10**9}, "MAX_DEC_LEN"),
    ({"text": "word " * 9000, "max_dec_len": 5}, "the model(4096)"),
    ({"input_ids": [10**6]}, "vocabulary"),
    ({"messages": [{"role": "user"}], "req_id": "x"}, "content"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_input_is_refused_with_a_reason_and_the_server_goes_on(server, body, named):
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 400, answer
    assert named in json.dumps(answer)
    assert post(server, "/v1/chat/completions", {"messages": CHAT, "max_dec_len": 4, "req_id": "after"})[0] == 200


def test_a_huge_body_is_refused(server):
    assert post(server, "/v1/chat/completions", b'{"text": "' + b"x" * (17 << 20) + b'"}')[0] == 413


def test_openai_errors_have_openais_shape(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=CHAT, temperature=-1)
    assert "temperature" in refused.value.message


def test_a_duplicate_req_id_is_refused_while_the_first_goes_on(server):
    def refused():
        first = long_answers(1, seed=5, length=1000)[0]
        with stream_of(server, first) as lines:
            next(lines)
            status, answer = post(server, "/v1/chat/completions", first | {"stream": False})
            assert list(lines)[-1]["finish_reason"] == "length"
        return (status, answer.get("error_type")) == (409, "duplicate_request")

    wait_until(refused)  # on a busy machine the first may have ended before the second arrives


def test_grpc_errors_are_bare_objects(server):
    with GrpcStream(server) as stream:
        stream.ask({"req_id": "e1", "text": ""})
        answer = stream.next()
        assert answer["error_code"] == 400 and answer["req_id"] == "e1" and "cannot be empty" in answer["error_msg"]
        assert (answer["is_end"], answer["token"], answer["error_field"]) == (1, "", "text")
        stream.ask({"req_id": "e2", "text": "Hi", "max_dec_len": 2})
        [line] = stream.next()
        assert (line["req_id"], line["error_msg"], line["error_code"]) == ("e2", "", 0)


def test_tritonclient_finds_what_is_served_and_gets_errors_for_the_rest(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
        assert client.get_server_metadata().name == "triton"
        assert client.get_model_metadata("model").inputs[0].name == "IN"
        assert client.get_model_config("model").config.model_transaction_policy.decoupled
        assert client.get_inference_statistics("model").model_stats[0].inference_stats.success.count
        with pytest.raises(triton_errors.InferenceServerException, match="unknown model: 'other' is not found"):
            client.get_model_metadata("other")
        with pytest.raises(triton_errors.InferenceServerException, match="decoupled transaction policy"):
            client.infer("model", grpc_request({"req_id": "x", "text": "Hi"}))
        with pytest.raises(triton_errors.InferenceServerException, match="does not have this method"):
            client.register_system_shared_memory("mine", "/llm_server", 64)


def test_a_full_queue_is_an_error_and_every_accepted_request_is_answered(tmp_path):
    env = {"BATCH_SIZE": "2", "MAX_CACHED_TASK_NUM": "3", "PUSH_MODE_HTTP_WORKERS": "2"}
    with running_server(tmp_path, env) as server:
        statuses = []
        bodies = [body | {"stream": False} for body in long_answers(30, seed=7)]
        with ThreadPoolExecutor(30) as pool:
            # so that none ends before the last arrives, however slow the machine is
            with paused(state_of(server).supervisor.pid), paused(server.pid_of("engine")):
                answers = [pool.submit(post, server, "/v1/chat/completions", body) for body in bodies]
                # The engine alone counts exactly: one more than fits may be on its way to it.
                wait_until(lambda: sum(answer.done() for answer in answers) + facts(server)["num_open"] >= 30)
            for status, answer in (each.result() for each in answers):
                statuses.append(status)
                if status == 429:
                    assert "at most MAX_CACHED_TASK_NUM(3) may" in answer["error_msg"]
        assert (statuses.count(200), statuses.count(429)) == (5, 25)
        wait_until_idle(server)


def test_an_engine_that_keeps_dying_fails_requests_and_readiness(tmp_path):
    with running_server(tmp_path, {"ENGINE_MAX_CRASHES": "2"}) as server:
        done, has_begun = threading.Event(), threading.Event()

        def kill_on():
            while not done.wait(0.05):
                with contextlib.suppress(LookupError, ProcessLookupError):
                    os.kill(server.pid_of("engine"), signal.SIGKILL)
                    has_begun.set()

        killer = threading.Thread(target=kill_on)
        killer.start()
        try:
            assert has_begun.wait(PATIENCE_S)  # else a fast machine may answer before
            body = long_answers(1, length=1000)[0] | {"stream": False}
            status, answer = post(server, "/v1/chat/completions", body)
            assert (status, answer["error_type"]) == (503, "engine_unavailable")
            wait_until(lambda: health_of(server, "ready")[0] == 503)  # an answer may be a moment old
            assert health_of(server, "live")[0] == 200
        finally:
            done.set()
            killer.join()
