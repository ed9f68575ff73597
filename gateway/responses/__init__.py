"""OpenAI's responses over a chat completion: stateless, so that each request has all of its conversation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.errors import RequestError
from gateway.openai import OpenAI
from gateway.openai.blocks import as_named_event
from gateway.openai.dialect import dialect_of
from gateway.openai.refusals import OF_BLOCKS, check_spelling
from gateway.protocol import Call
from gateway.responses.answer import ResponsesExchange
from gateway.responses.fields import IGNORED, REFUSED, fields
from gateway.responses.request import NAMES, parse

PATH = "/v1/responses"


class Responses(OpenAI):
    name = "responses"
    paths: Collection[str] = (PATH,)
    names = NAMES

    def fields(self, path: str) -> dict[str, Any]:
        return fields()

    def needs(self, path: str) -> Collection[str]:
        return ("input",)

    def example(self, path: str) -> dict[str, Any]:
        return {"model": "default", "input": "What is the capital of France?", "max_output_tokens": 64}

    def parse(self, body: dict[str, Any], call: Call) -> ResponsesExchange:
        check_spelling(body, fields(), (*IGNORED, *REFUSED, *OF_BLOCKS), NAMES)
        return parse(body, call.model_name, dialect_of(call.config))

    def error_event(self, error: RequestError, call: Call) -> bytes:
        """In both of the shapes that clients know: that of the documents, and the one that makes them raise."""
        told = self.error(error, call)
        exchange = call.exchange
        number = exchange.num_events if isinstance(exchange, ResponsesExchange) else 0
        return as_named_event({**told["error"], **told, "type": "error", "sequence_number": number})
