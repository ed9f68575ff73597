"""Validation of one inference request of a client.

Refusals use Triton's own words where it refuses the same.

Triton 2.51 crashes on some requests (a classification of strings) and writes to memory that others name (shared
memory). So everything that is not known to be harmless is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from engine.wire import shown
from engine.wire.triton import DATATYPE, INPUT, LENGTH_BYTES, MODEL, OUTPUT, VERSION, request_of

MAX_ID_LEN = 256  # characters: every response repeats it
EMPTY_FINAL = "triton_enable_empty_final_response"
# Supported parameters of a request with their types. Clients of Triton send them; only the first one has an effect.
PARAMETERS = {
    EMPTY_FINAL: ("bool_param",),
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),  # the latter from tritonclient
    "timeout": ("int64_param",),
}
FOR_MODEL = f"for model '{MODEL}'"


class InvalidInferRequest(Exception):
    """The request is not supported; the text is the client's error message."""


def parse(message: bytes) -> service_pb2.ModelInferRequest:
    """Return the parsed message. Raise InvalidInferRequest."""
    try:
        return service_pb2.ModelInferRequest.FromString(message)
    except DecodeError:
        raise InvalidInferRequest("the message is no ModelInferRequest") from None


def checked_payload(request: service_pb2.ModelInferRequest) -> bytes:
    """Return the text in the request's tensor. Raise InvalidInferRequest if anything else in it is not as expected."""
    if len(request.id) > MAX_ID_LEN:
        raise InvalidInferRequest(f"the request id has {len(request.id)} characters, the limit is {MAX_ID_LEN}")
    check_model(request.model_name, request.model_version)
    _check_parameters(request.parameters, PARAMETERS, "the request")
    if len(request.inputs) != 1:
        raise InvalidInferRequest(f"expected 1 inputs but got {len(request.inputs)} inputs {FOR_MODEL}")
    for output in request.outputs:
        if output.name != OUTPUT:
            raise InvalidInferRequest(f"unexpected inference output {_named(output.name)} {FOR_MODEL}")
        _check_parameters(output.parameters, {}, f"output '{OUTPUT}'")
    return _text(request.inputs[0], request.raw_input_contents)


def rewritten(request: service_pb2.ModelInferRequest, payload: bytes) -> bytes:
    """Return the request that is sent to tritonserver instead of the client's."""
    fresh = request_of(payload, request.id)
    if EMPTY_FINAL in request.parameters and request.parameters[EMPTY_FINAL].bool_param:
        fresh.parameters[EMPTY_FINAL].bool_param = True
    return fresh.SerializeToString()


def check_model(name: str, version: str) -> None:
    """Raise InvalidInferRequest if the name or the version is not that of the model."""
    if name != MODEL:
        raise InvalidInferRequest(f"Request for unknown model: {_named(name)} is not found")
    if version not in ("", VERSION):
        raise InvalidInferRequest(f"Request for unknown model: '{MODEL}' version {_named(version)} is not found")


def _text(tensor: Any, raw: Any) -> bytes:
    if tensor.name != INPUT:
        raise InvalidInferRequest(f"unexpected inference input {_named(tensor.name)} {FOR_MODEL}")
    what = f"input '{INPUT}'"
    _check_parameters(tensor.parameters, {}, what)
    if tensor.datatype != DATATYPE:
        given = _named(tensor.datatype)
        raise InvalidInferRequest(f"inference {what} data-type is {given}, but model '{MODEL}' expects '{DATATYPE}'")
    if list(tensor.shape[:2]) != [1]:
        given = f"{list(tensor.shape[:8])}{'...' * (len(tensor.shape) > 8)}"
        raise InvalidInferRequest(f"unexpected shape for {what} {FOR_MODEL}. Expected [1], got {given}.")
    if not tensor.HasField("contents"):
        if len(raw) != 1:
            raise InvalidInferRequest(f"expected data of 1 tensor in raw_input_contents {FOR_MODEL}, got {len(raw)}")
        return _element(raw[0], what)
    if raw:
        raise InvalidInferRequest(
            f"contents field must not be specified when using raw_input_contents for '{INPUT}' {FOR_MODEL}"
        )
    texts = tensor.contents.bytes_contents
    if len(texts) != 1:
        raise InvalidInferRequest(f"expected 1 string in bytes_contents for {what} {FOR_MODEL}, got {len(texts)}")
    return texts[0]


def _element(raw: bytes, what: str) -> bytes:
    num_bytes = len(raw) - LENGTH_BYTES
    if num_bytes < 0:
        raise InvalidInferRequest(
            f"incomplete string length indicator for inference {what} {FOR_MODEL}, expecting {LENGTH_BYTES} bytes but "
            f"only {len(raw)} bytes available"
        )
    if (length := int.from_bytes(raw[:LENGTH_BYTES], "little")) != num_bytes:
        raise InvalidInferRequest(
            f"the data of inference {what} {FOR_MODEL} must be one string: its length indicator says {length} bytes, "
            f"{num_bytes} bytes are available"
        )
    return raw[LENGTH_BYTES:]


def _check_parameters(given: Mapping[str, Any], known: Mapping[str, Collection[str]], whose: str) -> None:
    for name, value in given.items():
        if name not in known:
            allowed = f", those of a request are {', '.join(known)}" if known else ""
            raise InvalidInferRequest(f"the parameter {_named(name)} of {whose} is not supported{allowed}")
        if value.WhichOneof("parameter_choice") not in known[name]:
            kinds = " or ".join(known[name])
            raise InvalidInferRequest(f"invalid value type for '{name}' parameter, expected {kinds}.")


def _named(text: str) -> str:
    """Return a client's name for something in Triton's quotes, escaped and shortened."""
    return f"'{shown(text).strip(chr(34))}'"
