"""Tests of traces: an OTLP collector gets the stages of a request as one trace, and no request waits for it."""

import contextlib
import http.server
import json
import socket
import threading
import time

import pytest

from engine import tracing
from engine.core.loop import EngineLoop
from engine.core.types import PromptOutputs, Request, Sampling
from engine.errors import ConfigError
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.settings.config import Config
from engine.tracing import Context, Span, Tracer
from tests.patience import wait_until
from tests.pure.counting_executor import CountingExecutor
from tests.pure.gateway_fake import FakeBackend, running
from tests.pure.service_fakes import FakeEngine, FakeSender, a_payload, an_input_processor

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a secret"
TEXT = {"temperature": 0.5, "apply_chat_template": False}


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.payloads.append(body)
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/json")
        self.server.headers.append(self.headers)
        [of_process] = json.loads(body)["resourceSpans"]
        [scope] = of_process["scopeSpans"]
        for span in scope["spans"]:
            span["attributes"] = {each["key"]: [*each["value"].values()][0] for each in span["attributes"]}
            self.server.spans[span["name"]] = span
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(tracing, "GATHER_S", 0.05)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.spans, server.headers, server.payloads = {}, [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def collected_at(port):
    return {"otlp_endpoint": f"http://127.0.0.1:{port}/"}


def test_an_http_request_is_a_part_of_its_clients_trace_and_the_models_request_of_it(collector):
    backend = FakeBackend("a")
    named = {"otlp_headers": "x-tenant=a%20b", "otlp_service_name": "mine"}
    body = {"messages": [{"role": "user", "content": SECRET}]}
    with running(backend, **collected_at(collector.server_port), **named) as gateway:
        gateway.send("POST", "/v1/chat/completions", body, {"traceparent": CLIENT})
        gateway.send("GET", "/v1/models")
        span = wait_until(lambda: collector.spans.get("POST /v1/chat/completions"))
        gateway.send("POST", f"/{SECRET.split()[0]}", {})
        gateway.post("/v1/chat/completions", body)
    assert backend.bodies[0]["traceparent"] == f"00-{span['traceId']}-{span['spanId']}-01"
    assert (span["traceId"], span["parentSpanId"], span["kind"]) == (*CLIENT.split("-")[1:3], 2)
    assert 0 < int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    route = {"http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": "200"}
    assert (span["attributes"], [*collector.spans]) == (route, ["POST /v1/chat/completions"])
    assert collector.headers[0]["x-tenant"] == "a b" and b'"stringValue": "mine"' in collector.payloads[0]
    assert backend.bodies[1]["traceparent"].split("-")[1] not in CLIENT, "a trace of its own"
    assert SECRET.encode() not in b"".join(collector.payloads)


def test_the_stages_of_a_request_follow_one_another_and_tell_numbers_only(collector, tokenizer):
    config = Config(**collected_at(collector.server_port), served_model_name="m")
    engine = FakeEngine()
    service = Service(an_input_processor(tokenizer), engine, ServiceOptions(tracer=Tracer.of(config, "model")))

    def ask(req_id, **fields):
        sender = FakeSender()
        service.submit(a_payload(req_id=req_id, text=SECRET, max_dec_len=7, **TEXT, **fields), sender)
        return sender, tokenizer.encode(SECRET)

    _, ids = ask("unsampled", traceparent=f"{CLIENT[:-2]}00")
    engine.give(ids, b"a", "stop")
    sender, ids = ask("a", traceparent=CLIENT)
    began = time.time()
    engine.listener_of(ids)[1].prompt_outputs(PromptOutputs(num_cached=2, began_at=began))
    engine.give(ids, b"abc", "stop")
    assert sender.final
    service.close(1)  # with what has not been sent
    spans = collector.spans
    assert list(spans) == ["text_completion m", "queue", "prefill", "decode"]
    whole = spans["text_completion m"]
    assert (whole["traceId"], whole["parentSpanId"]) == tuple(CLIENT.split("-")[1:3])
    assert {spans[name]["parentSpanId"] for name in ("queue", "prefill", "decode")} == {whole["spanId"]}
    ends = [spans[name]["endTimeUnixNano"] for name in ("queue", "prefill", "decode")]
    starts = [spans[name]["startTimeUnixNano"] for name in ("queue", "prefill", "decode")]
    assert ends[:2] == starts[1:] and starts[1] == str(int(began * 1e9)) and starts[0] == whole["startTimeUnixNano"]
    attributes = whole["attributes"]
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (str(len(ids)), "3")
    assert (attributes["gen_ai.usage.cache_read.input_tokens"], attributes["gen_ai.request.model"]) == ("2", "m")
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == ("7", 0.5)
    assert attributes["gen_ai.response.finish_reasons"] == {"values": [{"stringValue": "stop"}]}
    assert SECRET.encode() not in b"".join(collector.payloads)


def test_the_engine_says_when_a_request_began():
    """A request begins with the first chunk of its prompt."""
    loop, before = EngineLoop(CountingExecutor(8, 4), 8, Config(batch_size=1, max_num_batched_tokens=4)), time.time()
    first, second = (Request(name, [*range(9)], 9, Sampling(4)) for name in "ab")
    loop.add(first)
    loop.add(second)
    loop.step()
    began_at, attributes = first.began_at, {}
    while not loop.is_idle:
        attributes |= {
            update.request.request_id: update.prompt_outputs for update in loop.step() if update.prompt_outputs
        }
    assert before <= began_at == attributes["a"].began_at < attributes["b"].began_at <= time.time()


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "away"])
def test_a_collector_that_is_slow_or_away_delays_no_request(is_silent, monkeypatch, caplog):
    """A full queue drops spans, and the log mentions it once."""
    monkeypatch.setattr(tracing, "GATHER_S", 0.01)
    monkeypatch.setattr(tracing, "TIMEOUT_S", 0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        if not is_silent:
            listener.close()
        with running(FakeBackend("a"), **collected_at(port)) as gateway:
            tracer, own = Tracer(Config(**collected_at(port)), "test"), Context.read(None)
            start = time.monotonic()
            for _ in range(3 * tracing.MAX_WAITING):
                tracer.send([Span("s", own, "", 1.0, 2.0)])
            assert time.monotonic() - start < 120  # one by one it would be twenty minutes
            assert gateway.post("/v1/completions", {"prompt": "a"})["choices"]
            wait_until(lambda: "spans are lost" in caplog.text)
            tracer.close()
    assert caplog.text.count("spans are lost") <= 2, "each tracer says it once"


@pytest.mark.parametrize("wrong", ["", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + CLIENT[2:], CLIENT.upper()])
def test_a_malformed_traceparent_begins_a_trace(wrong):
    own = Context.read(wrong)
    assert own.is_sampled and own.span_id == "" and len(own.trace_id) == 32 and own.trace_id not in wrong


def test_without_a_collector_there_is_no_tracer_and_a_wrong_one_is_refused():
    assert Tracer.of(Config(), "model") is None
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT is 'localhost:4317', it must be"):
        Config.from_env({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4317"})
