"""Anthropic's messages, translated into chat completions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.errors import RequestError
from gateway.anthropic.answer import MessagesExchange
from gateway.anthropic.fields import REFUSED, fields
from gateway.anthropic.request import CLIENT_NAMES, parse
from gateway.openai import OpenAIProtocol
from gateway.openai.content_blocks import as_named_event
from gateway.openai.output_syntax import output_syntax_of
from gateway.openai.unsupported_fields import NAMES, UNSUPPORTED_IN_BLOCKS, check_spelling
from gateway.protocol import RequestContext

PATH = "/v1/messages"
TYPES = {  # by status
    **{401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"},
    **{500: "api_error", 503: "overloaded_error", 504: "timeout_error"},
}
RESPONSES_NAMES = {"instructions": "system", "input": "messages", "max_output_tokens": "max_tokens"}


class AnthropicProtocol(OpenAIProtocol):
    """Anthropic's messages protocol."""

    name = "anthropic"
    paths: Collection[str] = (PATH,)
    names = CLIENT_NAMES

    def fields(self, path: str) -> dict[str, Any]:
        return fields()

    def needs(self, path: str) -> Collection[str]:
        return ("messages",)

    def example(self, path: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        return {"model": "default", "max_tokens": 64, "messages": messages}

    def parse(self, body: dict[str, Any], context: RequestContext) -> MessagesExchange:
        check_spelling(body, fields(), (*REFUSED, *UNSUPPORTED_IN_BLOCKS), {**NAMES, **CLIENT_NAMES, **RESPONSES_NAMES})
        return MessagesExchange(parse(body, context.model_name, output_syntax_of(context.config)), CLIENT_NAMES)

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        kind = TYPES.get(error.code, "invalid_request_error" if error.code < 500 else "api_error")
        message = error.message(context.exchange.names if context.exchange else self.names)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        return as_named_event(self.error(error, context))
