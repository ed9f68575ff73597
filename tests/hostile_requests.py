"""Inference requests that must not reach tritonserver, and the errors of their clients: `REFUSED`. Add yours here.
`odd_messages` makes others, of which most must not either."""

from __future__ import annotations

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from engine.wire.triton import encode_string, infer_request, request_of

TEXT = b'[{"text":"hi"}]'
MAX_ID_LEN = 256


def changed(change):
    request = infer_request({"text": "hi"})
    change(request)
    return request


def parameter(owner, name, **value):
    owner.parameters[name].CopyFrom(service_pb2.InferParameter(**value))


def two_inputs(request):
    request.inputs.add(name="IN", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(encode_string(TEXT))


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
        lambda r: r.raw_input_contents.__setitem__(0, encode_string(TEXT) + encode_string(TEXT)),
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

# --- valid protobuf, odd otherwise: for hypothesis ---

names = st.sampled_from(("", "IN", "OUT", "model", "1", "timeout", "classification", "shared_memory_region")) | st.text(
    st.characters(blacklist_categories=("Cs",)), max_size=300
)
int64 = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(
    st.builds(lambda each: {"bool_param": each}, st.booleans()),
    st.builds(lambda each: {"int64_param": each}, int64),
    st.builds(lambda each: {"string_param": each}, names),
    st.builds(lambda each: {"double_param": each}, st.floats()),
    st.builds(lambda each: {"uint64_param": each}, st.integers(0, 2**64 - 1)),
    st.just({}),
)
CHANGES = (
    *[st.tuples(st.just(kind), names) for kind in ("model_name", "model_version", "id", "input", "datatype", "output")],
    *[st.tuples(st.just(kind), names, values) for kind in ("parameter", "input parameter", "output parameter")],
    st.tuples(st.just("shape"), st.lists(int64, max_size=3)),
    st.tuples(st.just("raw"), st.lists(st.binary(max_size=20) | st.just(encode_string(TEXT)), max_size=3)),
    st.tuples(st.just("contents"), st.binary(max_size=20), st.lists(int64, max_size=2)),
    st.tuples(st.just("bytes"), st.binary(max_size=20)),  # behind the message: unknown fields, or none
    st.tuples(st.just("twice")),  # two messages behind each other are one
)


def _change(request, kind, *given):
    if kind in ("model_name", "model_version", "id"):
        setattr(request, kind, *given)
    elif kind == "input":
        request.inputs[0].name = given[0]
    elif kind == "datatype":
        request.inputs[0].datatype = given[0]
    elif kind == "output":
        request.outputs.add(name=given[0])
    elif kind == "shape":
        request.inputs[0].shape[:] = given[0]
    elif kind == "raw":
        request.raw_input_contents[:] = given[0]
    elif kind == "contents":
        request.inputs[0].contents.CopyFrom(
            service_pb2.InferTensorContents(bytes_contents=[given[0]], int64_contents=given[1])
        )
    elif kind.endswith("parameter"):
        owners = {"parameter": request, "input parameter": request.inputs[0]}
        parameter(owners.get(kind) or request.outputs.add(name="OUT"), given[0], **given[1])


@st.composite
def odd_messages(draw, body=TEXT):
    """Return the bytes of a request after one to three changes."""
    request = request_of(body)
    tail = b""
    for kind, *given in draw(st.lists(st.one_of(*CHANGES), min_size=1, max_size=3)):
        tail += given[0] if kind == "bytes" else request.SerializeToString() if kind == "twice" else b""
        if kind not in ("bytes", "twice"):
            _change(request, kind, *given)
    return request.SerializeToString() + tail
