"""POST /generate of vLLM's plain API server: a prompt in, the prompt and its continuations as texts out.

A stream has one JSON object per line, each with the whole text so far. The request fields are those of a completion.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine import wire
from engine.errors import InvalidRequest, RequestError
from gateway.json_encoder import dump
from gateway.openai import OpenAIProtocol
from gateway.openai.answer import CompletionExchange
from gateway.openai.request import CompletionRequest, check_string, parse
from gateway.openai.unsupported_fields import NAMES, check_spelling
from gateway.protocol import RequestContext

PATH = "/generate"
MAX_TOKENS = 16  # vLLM's default
# Their results have no place in the answer.
UNSUPPORTED_FIELDS = (
    "logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "echo",
    "stream_options",
)


class VllmExchange(CompletionExchange):
    """Exchange of one prompt."""

    def __init__(self, completion: CompletionRequest):
        super().__init__(completion)
        self.texts = [""] * completion.n
        self.last: dict[int, wire.Delta] = {}  # last answer of each choice

    @property
    def num_tokens(self) -> int:
        return sum(last.usage.completion_tokens for last in self.last.values())

    def event(self, index: int, answer: wire.Delta) -> bytes:
        self.gather(index, answer)
        return dump(self.whole()) + b"\n"

    def gather(self, index: int, answer: wire.Delta) -> None:
        self.texts[answer.index] += answer.token
        self.last[answer.index] = answer

    def whole(self) -> dict[str, Any]:
        prompt = self.requests[0]["text"]
        return {"text": [prompt + text for text in self.texts]}


class VllmGenerateProtocol(OpenAIProtocol):
    """vLLM's /generate. Errors are OpenAI's error objects."""

    name = "vllm"
    paths: Collection[str] = (PATH,)
    content_type = "application/x-ndjson"

    def fields(self, path: str) -> dict[str, Any]:
        known = {
            name: each for name, each in super().fields("/v1/completions").items() if name not in UNSUPPORTED_FIELDS
        }
        prompt = {"type": "string", "description": "the text to continue; it begins each text of the answer"}
        return {**known, "prompt": prompt, "max_tokens": {**known["max_tokens"], "default": MAX_TOKENS}}

    def needs(self, path: str) -> Collection[str]:
        return ("prompt",)

    def example(self, path: str) -> dict[str, Any]:
        return {"prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}

    def parse(self, body: dict[str, Any], context: RequestContext) -> VllmExchange:
        check_spelling(body, self.fields(context.path), called=NAMES)
        given = {name: value for name, value in body.items() if value is not None}
        for name in UNSUPPORTED_FIELDS:
            if given.get(name, False) is not False:
                text = "`{field}` is not supported, the answer has nothing but texts; use /v1/completions"
                raise InvalidRequest(text, field=name)
        if "inputs" in body:  # as Text Generation Inference has it at this path
            raise InvalidRequest("`{field}` is unknown, the text to continue is `prompt`", field="inputs")
        check_string("prompt", body.get("prompt"))
        return VllmExchange(parse({"max_tokens": MAX_TOKENS, **given}, False, context.model_name))

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        return dump(self.error(error, context)) + b"\n"
