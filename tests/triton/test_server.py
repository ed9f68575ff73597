"""The whole server: real start_server, tritonserver, engine and gateway, on the demo model."""

from __future__ import annotations

import ast
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tritonclient.http as triton_http

from tests import document_programs
from tests.patience import wait_until
from tests.server import ROOT, free_ports, running_server, state_of
from tests.triton.asking import (
    CHAT,
    GrpcStream,
    facts,
    get,
    health_of,
    long_answers,
    post,
    settled,
    stream_lines,
    wait_until_idle,
)

SETTINGS = {"BATCH_SIZE": "32", "MAX_CACHED_TASK_NUM": "200", "TRITON_HTTP_PORT": str(free_ports(1)[0])}


# --- the main job -----------------------------------------------------------------------------------------------


def test_tritons_http_client_finds_its_port_and_the_health_port_ready(server):
    port = server.env["TRITON_HTTP_PORT"]
    for address in (f"127.0.0.1:{port}", server.health_url.partition("//")[2]):
        with triton_http.InferenceServerClient(address) as client:
            assert client.is_server_live() and client.is_server_ready()
    with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_model_ready("model")
        reported = client.get_model_metadata("model")
    with GrpcStream(server) as stream:
        assert reported == stream.client.get_model_metadata("model", as_json=True) | {
            name: [{**tensor, "shape": [1]} for tensor in reported[name]] for name in ("inputs", "outputs")
        }  # protobuf writes numbers of 64 bits as texts
    body = json.dumps({"IN": json.dumps({"messages": CHAT, "temperature": 0})}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/model/generate", body) as response:
        [answer] = json.loads(json.loads(response.read())["OUT"])
    assert "Paris" in answer["tokens_all"] and answer["is_end"] == 1


def test_a_maximum_that_the_server_has_no_room_for_is_reduced_for_openais_client(client):
    asked = {"model": "default", "messages": CHAT, "temperature": 0, "max_tokens": 4096}
    reported = client.chat.completions.with_raw_response.create(**asked)
    assert reported.headers["X-Reduced-Max-Tokens"] == "1024"
    assert "Paris" in reported.parse().choices[0].message.content
    cut = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    assert cut.finish_reason == "length"


def test_the_demo_model_answers_at_least_48_of_its_50_questions(client):
    questions = json.loads((ROOT / "demo_model/questions.json").read_text())
    assert len(questions) == 50

    def is_right(item):
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": item["question"]}], temperature=0, max_tokens=512
        )
        text = answer.choices[0].message.content.strip()
        return text == item["answer"] if "answer" in item else item["contains"] in text

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_right, questions)) >= 48


def test_native_streaming_brings_the_answer_as_it_is_generated(server):
    """Tokens that arrive while others are sent are merged, so only the order of the parts is guaranteed, not their
    number.
    """
    lines = stream_lines(server, {"text": "Hello, how are you?", "req_id": "s1", "max_dec_len": 64, "stream": True,
                                  "temperature": 0})  # fmt: skip
    *deltas, last = lines
    assert len(deltas) >= 1
    assert all(line["error_code"] == 0 and line["error_msg"] == "" and line["req_id"] == "s1" for line in lines)
    assert [line["is_end"] for line in lines] == [0] * len(deltas) + [1]
    assert "".join(line["token"] for line in lines) == last["tokens_all"] != ""
    sent = 0
    for line in lines:  # send_idx lets a client notice a loss
        assert line["send_idx"] == sent
        sent += len(line["token_ids"])
    assert last["finish_reason"] == "stop" and last["tokens_all_num"] == sent + 1


def test_native_answer_in_one_piece_has_both_keys(server):
    body = {"messages": CHAT, "req_id": "n1", "max_dec_len": 64, "temperature": 0, "return_usage": True}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200
    assert "Paris" in answer["result"]
    assert answer["tokens_all"] == answer["result"]
    assert answer["usage"]["completion_tokens"] == answer["tokens_all_num"]
    assert (answer["error_code"], answer["error_msg"]) == (0, "")


def test_the_documented_native_program_gets_both_streams(server):
    lines = [ast.literal_eval(line) for line in output_of(document_programs.NATIVE, server).splitlines()]
    assert [line["is_end"] for line in lines].count(1) == 2 and lines[-1]["is_end"] == 1
    assert {(line["error_code"], line["error_msg"]) for line in lines} == {(0, "")}
    assert {"token", "send_idx"} <= lines[0].keys()


def test_the_documented_program_of_openais_client_gets_all_four_answers(server):
    completion, _, chat, stream = re.split(r"\n\n\n?", output_of(document_programs.OPENAI, server).strip())
    assert completion.startswith("Completion(") and chat.startswith("ChatCompletion(")
    assert repr(stream.removesuffix("None"))[1:-1] in chat


def output_of(program, server):
    command = [sys.executable, "-c", program.replace("ADDRESS", server.http_url.removeprefix("http://"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_both_base_urls_answer_the_openai_client(server):
    for base in ("/v1", "/v1/chat/completions"):
        with openai.OpenAI(base_url=server.http_url + base, api_key="EMPTY_API_KEY", max_retries=0) as client:
            chat = client.chat.completions.create(model="default", messages=CHAT, temperature=0, max_tokens=64)
            assert "Paris" in chat.choices[0].message.content
            assert chat.choices[0].finish_reason == "stop"
            assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
            chunks = list(
                client.chat.completions.create(
                    model="default", messages=CHAT, temperature=0, max_tokens=64, stream=True
                )
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == chat.choices[0].message.content
            completion = client.completions.create(
                model="default", prompt="The capital of France is", temperature=0, max_tokens=5
            )
            assert "Paris" in completion.choices[0].text
            stream = client.completions.create(
                model="default", prompt="The capital of France is", temperature=0, max_tokens=5, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == completion.choices[0].text
            assert [model.object for model in client.models.list().data] == ["model"]


def test_grpc_streams_the_same_answer_as_http(server):
    fields = {"text": "What is the capital of Japan?", "req_id": "g1", "max_dec_len": 64, "temperature": 0}
    with GrpcStream(server) as stream:
        answers = stream.lines(fields)
    _, over_http = post(server, "/v1/chat/completions", fields | {"req_id": "g2"})
    assert "".join(answer["token"] for answer in answers) == over_http["result"]
    assert "Tokyo" in over_http["result"]


def test_one_grpc_stream_may_have_many_requests_at_once(server):
    with GrpcStream(server) as stream:
        for name in range(20):
            stream.ask({"req_id": f"many-{name}", "text": f"What is {name} plus 5?", "max_dec_len": 12})
        ended = []
        while len(ended) < 20:
            [answer] = stream.next()
            ended += [answer["req_id"]] * answer["is_end"]
        assert sorted(ended) == sorted(f"many-{name}" for name in range(20))


def test_seeded_sampling_repeats_itself_and_seed_zero_is_a_seed(server):
    def sample(seed):
        # The demo model is sure of itself: only much heat makes it waver.
        body = {"text": "Tell me a short story.", "temperature": 8, "topp": 1, "seed": seed, "max_dec_len": 24}
        return tuple(post(server, "/v1/chat/completions", body)[1]["tokens_all_ids"])

    assert sample(0) == sample(0)
    assert len({sample(seed) for seed in range(6)}) > 1


def several_answers(server, client, n):
    """Return the answers to a prompt of 1000 tokens over each protocol, as (prompt, texts). The tokens differ between
    protocols.
    """
    # The demo model is sure of itself: only much heat makes it waver.
    rng, options = random.Random(n), {"temperature": 8, "top_p": 1, "seed": 5, "n": n, "ignore_eos": True}

    def a_prompt():
        return [rng.randrange(1000) for _ in range(1000)]

    def fields():
        return {"input_ids": a_prompt(), "max_dec_len": 16, "req_id": str(time.monotonic_ns()), **options}

    body = fields()
    choices = post(server, "/v1/chat/completions", body)[1]["choices"]
    yield body["input_ids"], [choice["result"] for choice in choices]
    body = fields()
    lines = stream_lines(server, body | {"stream": True})
    assert [line["is_end"] for line in lines] == [0] * (len(lines) - 1) + [1]
    of_each = [[line["token"] for line in lines if line["index"] == index] for index in range(n)]
    yield body["input_ids"], ["".join(tokens) for tokens in of_each]
    with GrpcStream(server) as stream:
        body = fields()
        answers = stream.lines(body)
    whole = {each["index"]: each["tokens_all"] for each in answers if "finish_reason" in each}
    yield body["input_ids"], [whole[index] for index in range(n)]
    extra = {"ignore_eos": options.pop("ignore_eos")}
    prompt = a_prompt()
    answer = client.completions.create(model="demo", prompt=prompt, max_tokens=16, extra_body=extra, **options)
    yield prompt, [choice.text for choice in answer.choices]
    prompt = a_prompt()
    texts = [""] * n
    for chunk in client.completions.create(
        model="demo", prompt=prompt, max_tokens=16, stream=True, extra_body=extra, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    yield prompt, texts


def num_prompt_tokens(server):
    """Return the number of prompt tokens that were computed and not found in the cache."""
    page = get(server.ports["METRICS_HTTP_PORT"], "/metrics")[1]
    computed, cached = (
        float(re.search(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M)[1])
        for name in ("llm_prompt_tokens_total", "llm_cached_prompt_tokens_total")
    )
    return computed - cached


def test_eight_answers_over_every_protocol_are_those_of_their_seeds_and_cost_one_prefill(server, client):
    before = settled(num_prompt_tokens, server)
    answered = list(several_answers(server, client, 8))
    wait_until(lambda: num_prompt_tokens(server) - before >= 5000)
    assert num_prompt_tokens(server) - before == 1000 * len(answered) == 5000
    for prompt, texts in answered:
        body = {"input_ids": prompt, "max_dec_len": 16, "temperature": 8, "topp": 1, "ignore_eos": True}
        alone = [post(server, "/v1/chat/completions", body | {"seed": 5 + i})[1]["result"] for i in range(8)]
        assert texts == alone
        assert len(set(texts)) == 8
    wait_until_idle(server)


def test_max_dec_len_tokens_are_all_visible_and_the_reason_is_length(server):
    for count in (1, 7):
        body = {"text": "Count from 1 to 20.", "max_dec_len": count, "temperature": 0}
        _, answer = post(server, "/v1/chat/completions", body)
        assert len(answer["tokens_all_ids"]) == count
        assert answer["finish_reason"] == "length"
        assert answer["result"]


def test_chinese_arrives_whole(server):
    lines = stream_lines(server, {"text": "法国的首都是哪里？", "stream": True, "temperature": 0, "max_dec_len": 64})
    assert "巴黎" in lines[-1]["tokens_all"]
    assert "\ufffd" not in "".join(line["token"] for line in lines)


def test_a_stop_string_ends_the_text_before_itself(client):
    create = client.chat.completions.create
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Count from 1 to 20."}], "temperature": 0}
    whole = create(**ask).choices[0].message.content
    stopped = create(**ask, stop=["9"]).choices[0]
    assert stopped.message.content == whole.split("9")[0]
    assert stopped.finish_reason == "stop"


# --- what must hold ---------------------------------------------------------------------------------------------


def test_a_killed_engine_costs_a_pause_and_not_a_token(server):
    bodies = long_answers(16, length=400)

    def tokens(body):
        *_, last = stream_lines(server, body | {"req_id": body["req_id"] + str(time.monotonic_ns())})
        assert last["error_code"] == 0, last
        return last["tokens_all_ids"]

    with ThreadPoolExecutor(16) as pool:
        undisturbed = list(pool.map(tokens, bodies))
        restarts = facts(server)["num_restarts"]
        disturbed = [pool.submit(tokens, body) for body in bodies]
        wait_until(lambda: facts(server)["num_running"] >= 8 or all(future.done() for future in disturbed))
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        assert [future.result() for future in disturbed] == undisturbed
    wait_until(lambda: facts(server)["num_restarts"] == restarts + 1)
    wait_until_idle(server)


def test_a_hundred_clients_that_leave_hold_nothing(server):
    rng = random.Random(1)
    bodies = long_answers(100, seed=2)

    def leave(body):
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["SERVICE_HTTP_PORT"], timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        if rng.random() < 0.7:
            response = connection.getresponse()
            for _ in range(rng.randrange(4)):
                response.readline()
        connection.close()

    with ThreadPoolExecutor(25) as pool:
        list(pool.map(leave, bodies))
    wait_until_idle(server)
    assert post(server, "/v1/chat/completions", {"messages": CHAT, "max_dec_len": 8})[0] == 200


def test_answers_do_not_depend_on_the_batch(server):
    bodies = [body | {"stream": False} for body in long_answers(24, seed=3)]

    def tokens(body):
        return post(server, "/v1/chat/completions", body | {"req_id": f"{body['req_id']}-{time.monotonic_ns()}"})[1][
            "tokens_all_ids"
        ]

    alone = [tokens(body) for body in bodies[:6]]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(tokens, bodies))
    assert together[:6] == alone


# --- operators --------------------------------------------------------------------------------------------------


def test_health_answers_on_its_own_port(server):
    for what in ("live", "ready"):
        assert health_of(server, what) == (200, "")


def test_metrics_are_on_tritons_page(server):
    post(server, "/v1/chat/completions", {"messages": CHAT, "max_dec_len": 16})
    names = ("llm_generated_tokens_total", "llm_time_to_first_token_seconds_bucket", "llm_kv_blocks",
             "llm_engine_restarts_total", "inference_server_metrics", "nv_trt_llm_kv_cache_block_metrics")  # fmt: skip

    def missing():
        page = get(server.ports["METRICS_HTTP_PORT"], "/metrics")[1]
        return [name for name in names if name not in page]

    wait_until(lambda: not missing(), missing)


def test_prompts_do_not_reach_the_logs(server):
    secret = "xyzzyplugh"
    post(server, "/v1/chat/completions", {"text": secret, "max_dec_len": 4})
    post(server, "/v1/chat/completions", {"text": secret, "max_dec_len": -1})
    post(server, "/v1/chat/completions", {"messages": [secret], "req_id": "quoted"})
    for path in server.log_dir.rglob("*"):
        if path.is_file():
            assert secret not in path.read_text(errors="replace"), path


def test_without_an_http_port_grpc_is_served_alone(tmp_path):
    env = {"SERVICE_HTTP_PORT": "-1", "DISABLE_STREAMING": "1"}
    with running_server(tmp_path, env) as server, GrpcStream(server) as stream:
        stream.ask({"text": "What is the capital of Italy?", "req_id": "only", "max_dec_len": 64, "temperature": 0})
        (answer,) = stream.next()  # in one piece, as DISABLE_STREAMING says
        assert answer["is_end"] == 1 and "Rome" in answer["tokens_all"]
        with pytest.raises(ConnectionRefusedError):
            get(server.ports["SERVICE_HTTP_PORT"], "/health")
        assert "SERVICE_HTTP_PORT" not in state_of(server).ports
        assert "HTTP " not in server.command("start_server").stdout  # it says what runs


# --- README.md and docs/quickstart.md ----------------------------------------------------------------------------


def python_examples():
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.S)]
    return [block for block in blocks if "127.0.0.1" in block]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(4))
def test_the_python_examples_run_as_they_stand(server, number):
    assert len(python_examples()) == 4
    code = python_examples()[number]
    code = code.replace("9965", str(server.ports["SERVICE_HTTP_PORT"]))
    code = code.replace("8811", str(server.ports["SERVICE_GRPC_PORT"]))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) >= 3


def test_the_grpc_example_ends_on_an_error(server):
    code = next(code for code in python_examples() if "8811" in code)
    code = code.replace("8811", str(server.ports["SERVICE_GRPC_PORT"])).replace(
        '"max_dec_len": 32', '"max_dec_len": -1'
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "The `max_dec_len` must be an integer and at least 0, it is -1")


def test_the_readmes_curl_example_runs_as_it_stands(server):
    (example,) = re.findall(r"^curl -N .* -d .*$", (ROOT / "README.md").read_text(), re.M)
    example = example.replace("9965", str(server.ports["SERVICE_HTTP_PORT"]))
    run = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=120)
    assert json.loads(run.stdout.splitlines()[-1])["is_end"] == 1, run.stderr
