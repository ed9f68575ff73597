"""What a client's inference request may have: everything else is refused with a sentence, and nothing of it passes."""

import pytest
from tritonclient.grpc import service_pb2

from engine.wire.triton import as_string, infer_request
from gateway.inference import request as request_module
from gateway.inference.request import MAX_ID_LEN, Refused, parse, payload_of, rewritten

TEXT = b'[{"text":"hi"}]'


def changed(change):
    request = infer_request({"text": "hi"})
    change(request)
    return request


def refusal(request):
    with pytest.raises(Refused) as caught:
        payload_of(parse(request.SerializeToString()))
    return str(caught.value)


def parameter(owner, name, **value):
    owner.parameters[name].CopyFrom(service_pb2.InferParameter(**value))


def two_inputs(request):
    request.inputs.add(name="IN", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(as_string(TEXT))


def contents(request, **fields):
    request.ClearField("raw_input_contents")
    request.inputs[0].contents.CopyFrom(service_pb2.InferTensorContents(**fields))


def shared_memory(tensor):
    parameter(tensor, "shared_memory_region", string_param="llm_server_")
    parameter(tensor, "shared_memory_byte_size", int64_param=64)


REFUSED = {
    "another model": (lambda r: setattr(r, "model_name", "x" * 1000), "Request for unknown model: 'xxx"),
    "no model": (lambda r: r.ClearField("model_name"), "Request for unknown model: '' is not found"),
    "another version": (lambda r: setattr(r, "model_version", "2"), "unknown model: 'model' version '2' is not found"),
    "a long id": (
        lambda r: setattr(r, "id", "x" * 257),
        f"the request id has 257 characters, the limit is {MAX_ID_LEN}",
    ),
    "no input": (lambda r: r.ClearField("inputs"), "expected 1 inputs but got 0 inputs for model 'model'"),
    "two inputs": (two_inputs, "expected 1 inputs but got 2 inputs for model 'model'"),
    "another input": (lambda r: setattr(r.inputs[0], "name", "X"), "unexpected inference input 'X' for model 'model'"),
    "another type": (
        lambda r: setattr(r.inputs[0], "datatype", "INT32"),
        "inference input 'IN' data-type is 'INT32', but model 'model' expects 'BYTES'",
    ),
    "another shape": (lambda r: r.inputs[0].shape.append(1), "unexpected shape for input 'IN' for model 'model'. Expe"),
    "a negative shape": (lambda r: r.inputs[0].shape.__setitem__(0, -1), "Expected [1], got [-1]."),
    "a shape of a million": (lambda r: r.inputs[0].shape.extend([1] * 10**6), "got [1, 1, 1, 1, 1, 1, 1, 1]...."),
    "no data": (lambda r: r.ClearField("raw_input_contents"), "expected data of 1 tensor in raw_input_contents"),
    "too much data": (lambda r: r.raw_input_contents.append(b""), "expected data of 1 tensor in raw_input_contents"),
    "data of three bytes": (
        lambda r: r.raw_input_contents.__setitem__(0, b"abc"),
        "incomplete string length indicator for inference input 'IN' for model 'model', expecting 4 bytes but only 3",
    ),
    "a length that is too large": (
        lambda r: r.raw_input_contents.__setitem__(0, b"\xff\xff\xff\xff{}"),
        "its length indicator says 4294967295 bytes, 2 bytes are available",
    ),
    "two strings": (
        lambda r: r.raw_input_contents.__setitem__(0, as_string(TEXT) + as_string(TEXT)),
        "its length indicator says 15 bytes, 34 bytes are available",
    ),
    "data twice": (
        lambda r: r.inputs[0].contents.bytes_contents.append(TEXT),
        "contents field must not be specified when using raw_input_contents for 'IN' for model 'model'",
    ),
    "two contents": (lambda r: contents(r, bytes_contents=[TEXT] * 2), "expected 1 string in bytes_contents"),
    "numbers": (lambda r: contents(r, int_contents=[1]), "expected 1 string in bytes_contents for input 'IN'"),
    "another output": (lambda r: r.outputs.add(name="X"), "unexpected inference output 'X' for model 'model'"),
    "a classification": (
        lambda r: parameter(r.outputs.add(name="OUT"), "classification", int64_param=3),
        "the parameter 'classification' of output 'OUT' is not supported",
    ),
    "output in shared memory": (
        lambda r: shared_memory(r.outputs.add(name="OUT")),
        "the parameter 'shared_memory_",
    ),
    "input in shared memory": (lambda r: shared_memory(r.inputs[0]), "of input 'IN' is not supported"),
    "a parameter of a request": (
        lambda r: parameter(r, "triton_something", bool_param=True),
        "the parameter 'triton_something' of the request is not supported, those of a request are triton_enable_empty_",
    ),
    "a value of another type": (
        lambda r: parameter(r, "triton_enable_empty_final_response", int64_param=1),
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
    ),
    "a value of none": (
        lambda r: r.parameters["timeout"].SetInParent(),
        "invalid value type for 'timeout' parameter, expected int64_param.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_is_none_is_refused_with_a_short_sentence(name):
    change, text = REFUSED[name]
    said = refusal(changed(change))
    assert text in said
    assert len(said) < 400


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05abc", b"\x2a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_refused(message):
    with pytest.raises(Refused, match="the message is no ModelInferRequest"):
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
        lambda request: parameter(request, "timeout", int64_param=7),
    ],
)
def test_all_forms_of_a_request_come_to_tritonserver_as_the_same(change):
    request = changed(change)
    payload = payload_of(request)
    assert payload == TEXT
    assert rewritten(request, payload) == infer_request({"text": "hi"}).SerializeToString()


def test_the_id_and_the_wish_for_an_empty_end_are_kept():
    request = changed(lambda request: parameter(request, "triton_enable_empty_final_response", bool_param=True))
    request.id = "an id"
    fresh = service_pb2.ModelInferRequest.FromString(rewritten(request, payload_of(request)))
    assert fresh.id == "an id"
    assert fresh.parameters["triton_enable_empty_final_response"].bool_param
    assert len(fresh.parameters) == 1


def test_fields_that_nobody_knows_do_not_pass():
    unknown = b"\x9a\x06\x03abc"  # field 99
    request = parse(infer_request({"text": "hi"}).SerializeToString() + unknown)
    assert unknown not in rewritten(request, payload_of(request))


def test_every_parameter_that_tritonclient_sends_is_known(monkeypatch):
    from tritonclient.grpc._utils import _get_inference_request

    sent = _get_inference_request(
        "model", [], "", "", None, 7, True, True, 1, 1, {}
    ).parameters  # sequence, priority, timeout
    assert set(sent) | {"triton_enable_empty_final_response"} == set(request_module.PARAMETERS)
