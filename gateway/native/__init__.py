"""Native protocol: the wire's own objects, one per line or gathered into one answer.

A stream has one JSON object per line and per HTTP chunk, with the media type `application/x-ndjson`, so that
`iter_lines` of `requests` and `json.loads` read it as it arrives. Fields are checked by the model, except those that
are used here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine import wire
from engine.errors import RequestError
from gateway.json_encoder import dump
from gateway.native.answer import NativeExchange
from gateway.native.request import is_native, parse
from gateway.protocol import RequestContext


class NativeProtocol:
    """The native protocol."""

    name = "native"
    paths: Collection[str] = ("/v1/chat/completions", "/v1/completions")
    content_type = "application/x-ndjson"

    def fields(self, path: str) -> dict[str, Any]:
        return wire.field_schemas()

    def needs(self, path: str) -> Collection[str]:
        return ("text", "input_ids", "messages")

    def example(self, path: str) -> dict[str, Any]:
        return {"text": "Hello, how are you?", "max_dec_len": 64}

    def speaks(self, body: dict[str, Any]) -> bool:
        return is_native(body)

    def parse(self, body: dict[str, Any], context: RequestContext) -> NativeExchange:
        return parse(body, context)

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        if isinstance(context.exchange, NativeExchange):
            failure = context.exchange.failure(error, context.req_id).fields()
            failure["error_msg"] = error.message(context.exchange.names)
        else:
            failure = wire.Failure(error, context.req_id).fields()
        return {**failure, "result": ""}

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        return dump(self.error(error, context)) + b"\n"
