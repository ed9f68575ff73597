"""Triton's generate extension over HTTP.

The native request is the text of the input `IN`, an answer that of the output `OUT`.

Triton's `infer` cannot serve a decoupled model, so clients use `generate` and `generate_stream` instead. Metadata for
`tritonclient.http` is in metadata.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine import wire
from engine.errors import InvalidRequest, RequestError
from engine.wire.triton import INPUT, MODEL, OUTPUT, VERSION
from gateway.json_encoder import dump
from gateway.native.answer import NativeExchange
from gateway.native.request import parse
from gateway.protocol import RequestContext

PREFIX = "/v2/"  # prefix of Triton's paths, on which clients expect errors in Triton's form
ROOT = f"/v2/models/{MODEL}"
ROOTS = (ROOT, f"{ROOT}/versions/{VERSION}")


class GenerateExchange(NativeExchange):
    """Exchange whose answers are native ones in Triton's envelope."""

    def event(self, index: int, answer: wire.Delta) -> bytes:
        self.last[answer.index] = answer
        return b"data: " + dump(_enveloped(wire.native_json(answer))) + b"\n\n"

    def whole(self) -> dict[str, Any]:
        """Return the list of answers, one for each choice, in Triton's envelope."""
        return _enveloped(dump([last.fields() for _, last in sorted(self.last.items())]))


class TritonGenerateProtocol:
    """Triton's generate extension with a native request."""

    name = "triton"
    paths: Collection[str] = tuple(f"{root}/{way}" for root in ROOTS for way in ("generate", "generate_stream"))
    content_type = "text/event-stream"

    def fields(self, path: str) -> dict[str, Any]:
        return {
            INPUT: {"type": "string", "description": "a native request as JSON, an object or a list with one"},
            "id": {"type": "string", "description": "does nothing"},
        }

    def needs(self, path: str) -> Collection[str]:
        return (INPUT,)

    def example(self, path: str) -> dict[str, Any]:
        return {INPUT: '{"text": "Hello, how are you?", "max_dec_len": 64}'}

    def speaks(self, body: dict[str, Any]) -> bool:
        return True  # TritonTextProtocol is asked first

    def parse(self, body: dict[str, Any], context: RequestContext) -> NativeExchange:
        if unknown := body.keys() - {INPUT, "id"}:
            raise InvalidRequest(f"unexpected input {wire.shown(min(unknown))}, the model has the input {INPUT}")
        text = body.get(INPUT)
        if not isinstance(text, str):
            raise InvalidRequest(f"{INPUT} must be a text with the request as JSON, it is {wire.kind_of(text)}")
        try:
            asked = wire.only_object(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{INPUT}: {error}") from None
        stream = context.path.endswith("_stream")
        native = parse(asked if stream else {**asked, "return_all_tokens": True}, context)
        return GenerateExchange(native.requests, stream, native.timeout_s, False, None, names=native.names)

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        return {"error": error.message(context.exchange.names if context.exchange else {})}

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        return b"data: " + dump(self.error(error, context)) + b"\n\n"


def _enveloped(payload: bytes) -> dict[str, Any]:
    return {"model_name": MODEL, "model_version": VERSION, OUTPUT: payload.decode()}
