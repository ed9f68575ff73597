"""Tests of the data that passes Triton's gRPC: the names of config.pbtxt, a string with its length, and answers of all
kinds.
"""

import json
import re
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from engine import wire
from engine.errors import EngineUnavailable
from engine.wire.triton import MODEL, infer_request, read_response

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"
ANSWER = wire.Delta("a", "✓", [7], 0, wire.Usage(1, 1), 5)
BODY = wire.write_answer(ANSWER)


def a_response(**fields):
    return service_pb2.ModelStreamInferResponse(infer_response=service_pb2.ModelInferResponse(**fields))


def test_a_request_has_the_names_that_the_model_has():
    request = infer_request({"text": "✓"})
    config = (REPOSITORY / MODEL / "config.pbtxt").read_text()
    [given] = request.inputs
    assert (request.model_name, given.name) == (MODEL, re.search(r'input \[\s*\{\s*name: "(\w+)"', config)[1])
    [content] = request.raw_input_contents
    assert int.from_bytes(content[:4], "little") == len(content[4:])
    assert json.loads(content[4:]) == [{"text": "✓"}]


@pytest.mark.parametrize("is_raw", [True, False])
def test_an_answer_is_read_in_both_forms(is_raw):
    if is_raw:
        response = a_response(raw_output_contents=[len(BODY).to_bytes(4, "little") + BODY])
    else:
        response = a_response()
        response.infer_response.outputs.add(name="OUT").contents.bytes_contents.append(BODY)
    assert read_response(response) == ANSWER


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (service_pb2.ModelStreamInferResponse(error_message="gone"), "the model server failed: gone"),
        (a_response(), "the model sent an empty response"),
    ],
)
def test_a_malformed_answer_is_an_unavailable_model(response, reason):
    with pytest.raises(EngineUnavailable, match=reason):
        read_response(response)


def test_a_request_is_no_longer_than_its_client_has_written_it():
    """Its length is limited there: non-ASCII characters and lone surrogates are not escaped."""
    body = {"text": "\u4f60\ud800", "input_ids": [1, 2, 3]}
    [content] = infer_request(body).raw_input_contents
    assert len(content) == len(json.dumps([body], ensure_ascii=False, separators=(",", ":"))) + 4 + 2 + 2
    assert json.loads(content[4:]) == [body]
    assert infer_request({wire.PROBE: True}).raw_input_contents[0][4:] == wire.PROBE_PAYLOAD
