"""Tests of the fields that an inference request may have: everything else is refused with a sentence, and nothing of it
is forwarded.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from engine.wire.triton import infer_request, request_of
from gateway.grpc_server import request as request_module
from gateway.grpc_server.request import InvalidInferRequest, checked_payload, parse, rewritten
from tests.fuzz import examples
from tests.hostile_requests import REFUSED, TEXT, changed, contents, odd_messages, parameter


def refusal(request):
    with pytest.raises(InvalidInferRequest) as caught:
        checked_payload(parse(request.SerializeToString()))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_request_is_refused_with_a_short_sentence(name):
    change, text = REFUSED[name]
    said = refusal(changed(change))
    assert text in said
    assert len(said) < 400


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05abc", b"\x2a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_refused(message):
    with pytest.raises(InvalidInferRequest, match="the message is no ModelInferRequest"):
        parse(message)


@pytest.mark.parametrize(
    "change",
    [
        lambda request: None,
        lambda request: setattr(request, "model_version", "1"),
        lambda request: contents(request, bytes_contents=[TEXT]),
        lambda request: request.outputs.add(name="OUT"),
        lambda request: parameter(request, "sequence_id", string_param="a"),
        lambda request: parameter(request, "sequence_id", int64_param=7),
        lambda request: parameter(request, "priority", int64_param=7),
        lambda request: parameter(request, "priority", uint64_param=7),
        lambda request: parameter(request, "timeout", int64_param=7),
    ],
)
def test_all_forms_of_a_request_come_to_tritonserver_as_the_same(change):
    request = changed(change)
    payload = checked_payload(request)
    assert payload == TEXT
    assert rewritten(request, payload) == infer_request({"text": "hi"}).SerializeToString()


def test_the_id_and_the_wish_for_an_empty_end_are_kept():
    request = changed(lambda request: parameter(request, "triton_enable_empty_final_response", bool_param=True))
    request.id = "an id"
    fresh = service_pb2.ModelInferRequest.FromString(rewritten(request, checked_payload(request)))
    assert fresh.id == "an id"
    assert fresh.parameters["triton_enable_empty_final_response"].bool_param
    assert len(fresh.parameters) == 1


def test_unknown_fields_are_not_forwarded():
    unknown = b"\x9a\x06\x03abc"  # field 99
    request = parse(infer_request({"text": "hi"}).SerializeToString() + unknown)
    assert unknown not in rewritten(request, checked_payload(request))


@pytest.mark.slow
@examples(200)
@given(message=odd_messages() | st.binary())
def test_an_unusual_message_is_refused_or_reaches_tritonserver_with_its_text_only(message):
    try:
        request = parse(message)
        payload = checked_payload(request)
    except InvalidInferRequest as error:
        assert 0 < len(str(error)) < 500
        return
    fresh = service_pb2.ModelInferRequest.FromString(rewritten(request, payload))
    assert set(fresh.parameters) <= {"triton_enable_empty_final_response"}
    fresh.ClearField("parameters")
    assert fresh == request_of(payload, request.id)


@pytest.mark.parametrize("sequence_id", [7, "a"])
def test_every_parameter_that_tritonclient_sends_is_accepted(sequence_id):
    from tritonclient.grpc._utils import _get_inference_request

    sent = _get_inference_request(
        "model", [], "", "", None, sequence_id, True, True, 1, 1, {}
    ).parameters  # sequence, priority, timeout
    assert set(sent) | {"triton_enable_empty_final_response"} == set(request_module.PARAMETERS)
    request = infer_request({"text": "hi"})
    for name, value in sent.items():
        request.parameters[name].CopyFrom(value)
    assert checked_payload(parse(request.SerializeToString())) == TEXT
