"""model.py, loaded as Triton loads it but with a fake of Triton's module: tensors in, responses out, nothing else."""

import importlib.util
import logging
import re
import sys
from pathlib import Path

import pytest

from engine.core.types import Sampling
from engine.exporting.manifest import Manifest
from engine.serving import service as service_module
from engine.settings.config import Config
from tests.byte_tokenizer import write_tokenizer
from tests.patience import wait_until
from tests.pure import fake_triton
from tests.pure.counting_executor import CountingExecutor, answer
from tests.pure.engine_helpers import a_server
from tests.pure.service_fakes import a_payload, fields_of

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "model_repository" / "model"


@pytest.fixture
def model_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton.as_module())
    monkeypatch.setenv("LLM_SERVER_SYS_PATH", str(ROOT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])  # basicConfig changes nothing
    spec = importlib.util.spec_from_file_location("model_under_test", MODEL / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def graph_dir(tmp_path):
    write_tokenizer(tmp_path)
    Manifest(400, 64, 4, 1, "float32", {}).write(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # every exported model has one
    return tmp_path


@pytest.fixture
def model(model_py, graph_dir, monkeypatch):
    """Return a model that is served by an engine in this process."""
    monkeypatch.setattr(service_module, "MIN_CANCEL_POLL_S", 0.002)
    monkeypatch.setenv("MODEL_DIR", str(graph_dir))
    monkeypatch.setenv("RUN_DIR", str(graph_dir))
    monkeypatch.setenv("DRAIN_TIMEOUT", "0")
    monkeypatch.delenv("GRAPH_DIR", raising=False)
    model = model_py.TritonPythonModel()
    model.initialize({})
    try:
        with a_server(CountingExecutor(64, 4), f"ipc://{graph_dir}/engine.sock"):
            yield model
    finally:
        model.finalize()


def execute(model, *payloads):
    requests = [fake_triton.Request(payload) for payload in payloads]
    assert model.execute(requests) is None
    for request in requests:
        request.take_memory_back()
    return [request.response_sender for request in requests]


@pytest.mark.slow
def test_a_request_streams_and_ends_with_the_final_flag(model):
    [sender] = execute(model, a_payload(req_id="a", input_ids=[65], temperature=0, max_dec_len=20))
    wait_until(lambda: sender.is_over)
    *deltas, (last, flags) = sender.sent
    assert flags == 1
    assert {flags for _, flags in deltas} <= {0}
    fields = fields_of(last)
    assert fields["tokens_all_ids"] == answer([65], Sampling(20, temperature=0))
    texts = [fields_of(payload)["token"] for payload, _ in sender.sent]
    assert "".join(texts) == fields["tokens_all"]


def test_refused_requests_get_one_final_response_each_and_others_go_on(model):
    good = a_payload(req_id="good", text="hi", max_dec_len=1)
    *refused, served = execute(model, b"[{", b"[]", a_payload(req_id="b", text=""), good)
    for sender in (*refused, served):
        wait_until(lambda sender=sender: sender.is_over)
    for sender in refused:
        [(payload, flags)] = sender.sent
        assert (flags, fields_of(payload)["error_code"]) == (1, 400)
    assert fields_of(served.sent[-1][0])["is_end"] == 1


def test_a_client_that_leaves_is_noticed_and_not_asked_again_after_the_end(model):
    prompt = {"input_ids": [65], "temperature": 0, "ignore_eos": True}
    [sender] = execute(model, a_payload(req_id="a", **prompt))
    sender.cancelled = True
    wait_until(lambda: sender.is_over)
    wait_until(lambda: model.service.num_open == 0)


def test_a_stop_ends_what_is_open(model_py, graph_dir, monkeypatch):
    monkeypatch.setenv("GRAPH_DIR", str(graph_dir))
    monkeypatch.setenv("RUN_DIR", str(graph_dir))  # no engine is there
    monkeypatch.setenv("DRAIN_TIMEOUT", "0")
    model = model_py.TritonPythonModel()
    model.initialize({})
    [sender] = execute(model, a_payload(req_id="a", text="hi"))
    model.finalize()
    [(payload, flags)] = sender.sent
    assert (flags, fields_of(payload)["error_code"]) == (1, 503)


def test_the_limits_are_the_models_and_the_settings(model, graph_dir):
    [sender] = execute(model, a_payload(probe=True))
    wait_until(lambda: sender.is_over)
    fields = fields_of(sender.sent[0][0])
    assert (fields["model_len"], fields["max_seq_len"], fields["max_dec_len"]) == (64, 64, 64)
    assert Config().max_prompt_len > 64


def test_a_wrong_setting_keeps_the_model_from_loading(model_py, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE", "many")
    with pytest.raises(Exception, match="BATCH_SIZE is 'many'"):
        model_py.TritonPythonModel().initialize({})


def test_the_contract_file_and_the_code_agree():
    contract = (MODEL / "config.pbtxt").read_text()
    assert re.search(r"decoupled: true", contract)
    assert re.search(r"max_batch_size: 0\b", contract)
    assert re.findall(r'name: "(\w+)"', contract) == ["model", "IN", "OUT"]
    assert len(re.findall(r"TYPE_STRING dims: \[ 1 \]", contract)) == 2
