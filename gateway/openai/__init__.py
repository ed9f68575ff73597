"""OpenAI's completions and chat completions. Each prompt becomes one native request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import InvalidRequest, PromptTooLong, RequestError
from gateway.openai.answer import OpenAIExchange, as_event
from gateway.openai.fields import fields
from gateway.openai.output_syntax import output_syntax_of
from gateway.openai.request import parse
from gateway.openai.resume import LAST_EVENT_ID, parse_resumed
from gateway.openai.unsupported_fields import NAMES, OTHER_API_NAMES, check_spelling
from gateway.protocol import Exchange, RequestContext

BASE = "/v1/chat/completions"  # the documented base URL of its client
IS_CHAT = {BASE: True, "/v1/completions": False, f"{BASE}/chat/completions": True, f"{BASE}/completions": False}
TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}  # by status


class OpenAIProtocol:
    """OpenAI's protocol, and the base class of the protocols that are translated into it."""

    name = "openai"
    paths: Collection[str] = IS_CHAT
    content_type = "text/event-stream"
    names: Mapping[str, str] = {}  # of the model's fields, before a request is read

    def fields(self, path: str) -> dict[str, Any]:
        return fields(IS_CHAT[path])

    def needs(self, path: str) -> Collection[str]:
        return ("messages",) if IS_CHAT[path] else ("prompt",)

    def example(self, path: str) -> dict[str, Any]:
        text = "What is the capital of France?"
        prompt = {"messages": [{"role": "user", "content": text}]} if IS_CHAT[path] else {"prompt": text}
        return {"model": "default", **prompt, "max_tokens": 64}

    def speaks(self, body: dict[str, Any]) -> bool:
        return True

    def parse(self, body: dict[str, Any], context: RequestContext) -> Exchange:
        known = self.fields(context.path)
        check_spelling(
            body, known, called={**NAMES, **{name: own for name, own in OTHER_API_NAMES.items() if own in known}}
        )
        if LAST_EVENT_ID in context.headers:
            return parse_resumed(body, IS_CHAT[context.path], context)
        return OpenAIExchange(parse(body, IS_CHAT[context.path], context.model_name, output_syntax_of(context.config)))

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        names = context.exchange.names if context.exchange else self.names
        param = names.get(error.field, error.field) if error.field else None
        if param is None and isinstance(error, InvalidRequest):
            param = names.get("text")  # the model's refusals are about the prompt: all else was checked here
        fields = {
            "message": error.message(names),
            "type": TYPES.get(error.code, "invalid_request_error" if error.code < 500 else "server_error"),
            "param": param,
            "code": "context_length_exceeded" if isinstance(error, PromptTooLong) else error.kind,
        }
        return {"error": fields}

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        return as_event(self.error(error, context))
