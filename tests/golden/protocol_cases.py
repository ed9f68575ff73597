"""The requests whose answers tests/golden/protocols/ holds, by protocol. Later ones may need what earlier ones left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

QUESTION = "What is the capital of France?"
USER = [{"role": "user", "content": QUESTION}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
GENERATE = "/v2/models/model/generate"
WRONG_KEY = {"Authorization": "Bearer wrong"}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]
WEATHER = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@dataclass(frozen=True)
class Case:
    """A request: its `body` is JSON, or the very bytes."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def payload(self) -> bytes | None:
        return self.body if self.body is None or isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def is_streamed(self) -> bool:
        streams = isinstance(self.body, dict) and self.body.get("stream")
        return bool(streams) or self.method == "gRPC" or "stream" in self.path


def native(path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> Case:
    given = {"temperature": 0, "infer_seed": 7, "max_dec_len": 6, **fields}
    return Case(path, {name: value for name, value in given.items() if value is not None}, headers=headers or {})


def openai(path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> Case:
    prompt = {} if path != CHAT or "messages" in fields else {"messages": USER}
    given = {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 6, **prompt, **fields}
    return Case(path, {name: value for name, value in given.items() if value is not None}, headers=headers or {})


def completion(**fields: Any) -> Case:
    return openai(COMPLETIONS, **{"prompt": "The capital of France is", "max_tokens": 3, **fields})


def response(headers: dict[str, str] | None = None, **fields: Any) -> Case:
    given = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 6, **fields}
    return Case(RESPONSES, given, headers=headers or {})


def message(headers: dict[str, str] | None = None, **fields: Any) -> Case:
    given = {"model": "demo", "messages": USER, "temperature": 0, "max_tokens": 6, **fields}
    return Case(MESSAGES, given, headers=headers or {})


def generate(path: str, **fields: Any) -> Case:
    asked = {"text": QUESTION, "req_id": "golden", "temperature": 0, "infer_seed": 7, "max_dec_len": 6, **fields}
    return Case(path, {"IN": json.dumps(asked)})


def over_grpc(headers: dict[str, str] | None = None, **fields: Any) -> Case:
    body = {"req_id": "golden", "temperature": 0, "infer_seed": 7, "max_dec_len": 6, **fields}
    return Case("ModelStreamInfer", [body], "gRPC", headers or {})


RESPONSES_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": CITY}
BEFORE = [  # the others
    native(text="Hi", headers={"Authorization": "Bearer poor"}),  # uses up the tokens of this key
    response(background=True, request_id="resp_background"),
]
CASES: dict[str, list[Case]] = {
    "native": [
        native(text=QUESTION, req_id="1"),
        native(text=QUESTION, req_id="1", return_usage=True, max_dec_len=40),
        native(text=QUESTION, req_id="1", stream=True),
        native(text=QUESTION, req_id="1", stream=True, stop_sequences=["Paris"], include_stop_str_in_output=True),
        native(messages=USER, req_id="1", stream=True, logprobs=2, return_token_ids=True, max_dec_len=2),
        native(messages=USER, system="Be brief.", req_id="1", logprobs=1, prompt_logprobs=0, max_dec_len=1),
        native(text=QUESTION, req_id="1", n=2, return_usage=True, max_dec_len=2),
        native(text=QUESTION, req_id="1", benchmark=True, stream=True, max_dec_len=2),
        native(text=QUESTION, req_id="1", guided_choice=["Paris", "Rome"]),
        native(text=QUESTION, req_id="1", use_beam_search=True, best_of=2, n=2, max_dec_len=2),
        native(text=QUESTION, req_id="1", return_all_tokens=True, stream=True),
        native(text=QUESTION, req_id="golden-resumed", stream=True),
        native(text=QUESTION, req_id="golden-resumed", stream=True, resume_from=4),
        native(text="Something else?", req_id="golden-resumed", resume_from=4),
        native(text=QUESTION, req_id="unknown", infer_seed=None, temperature=1, resume_from=4),
        native(text=QUESTION, max_dec_len=1),
        native(text="", req_id="1", topp=7, max_dec_len=-1),
        native(text="word " * 5000, req_id="1"),
        native(text=QUESTION, req_id="1", max_dec_len=5000),
        native(text=QUESTION, req_id="1", tempurature=1),
        native(text=QUESTION, req_id="1", guided_regex="("),
        native(text=QUESTION, req_id="1", headers=WRONG_KEY),
        native(text=QUESTION, req_id="1", headers={"Authorization": "Bearer poor"}),
        native("/v1/abort", req_id="unknown"),
        Case("/v1/abort", {}),
    ],
    "openai": [
        openai(),
        openai(max_tokens=40, request_id="golden"),
        openai(stream=True),
        openai(stream=True, max_tokens=40, stream_options={"include_usage": True}, headers={"X-Request-Id": "golden"}),
        openai(stream=True, max_tokens=2, stream_options={"include_usage": True, "continuous_usage_stats": True}),
        openai(stream=True, headers={"X-Request-Id": "golden", "Last-Event-ID": "0"}),
        openai(stream=True, headers={"X-Request-Id": "golden", "Last-Event-ID": "4"}),
        openai(logprobs=True, top_logprobs=2, max_tokens=2),
        openai(logprobs=True, top_logprobs=1, max_tokens=2, stream=True),
        openai(n=2, max_tokens=2),
        openai(stop=["Paris"]),
        openai(max_tokens=5000, stop=["."]),
        openai(prompt_logprobs=0, return_token_ids=True, max_tokens=1),
        openai(tools=TOOLS, tool_choice="required", max_tokens=80),
        openai(
            tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=80, stream=True
        ),
        openai(response_format=JSON_SCHEMA, max_tokens=40),
        openai(structured_outputs={"choice": ["Paris", "Rome"]}),
        completion(),
        completion(prompt=["One", "Two"], max_tokens=2, stop="x"),
        completion(stream=True, stream_options={"include_usage": True}),
        completion(echo=True, logprobs=2, max_tokens=1),
        completion(prompt=[1, 2, 3], logprobs=0, max_tokens=2, stream=True),
        openai("/v1/embeddings", input="Paris", max_tokens=None, temperature=None, seed=None),
        Case("/v1/embeddings", {"input": ["Paris", "Rome"], "encoding_format": "base64"}),
        Case("/v1/score", {"text_1": "Paris", "text_2": ["Rome", "Madrid"]}),
        Case("/v1/rerank", {"query": "Paris", "documents": ["Paris", "Oslo"], "top_n": 1}),
        Case("/tokenize", {"prompt": "Paris is", "return_token_strs": True}),
        Case("/tokenize", {"messages": USER}),
        Case("/detokenize", {"tokens": [72, 73, 300]}),
        Case("/v1/models", method="GET"),
        Case("/v1/models/other", method="GET"),
        Case("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"}),
        openai(messages=None),
        openai(temperature=1000),
        openai(temprature=1),
        openai(tool_choice="auto"),
        openai(tools=[{"type": "web_search"}]),
        openai(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}),
        openai(messages=[{"role": "user", "content": "word " * 5000}]),
        openai(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        openai(logit_bias={"5000000": 1}),
        openai(headers=WRONG_KEY),
        openai(headers={"Authorization": "Bearer poor"}),
        openai(stream=True, headers={"Authorization": "Bearer poor"}),
        Case(CHAT, b"{"),
        Case(CHAT, b"[]"),
        Case(CHAT, b" " * 70000),
        Case(CHAT, method="GET"),
        Case("/v1/nothing", {}),
    ],
    "responses": [
        response(),
        response(max_output_tokens=40, instructions="Be brief.", metadata={"a": "b"}),
        response(stream=True, max_output_tokens=3),
        response(stream=True, max_output_tokens=40),
        response(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=80),
        response(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=80, stream=True),
        response(text={"format": {"type": "json_schema", "name": "city", "schema": CITY}}, max_output_tokens=40),
        response(store=True, request_id="resp_golden"),
        Case(f"{RESPONSES}/resp_golden", method="GET"),
        response(previous_response_id="resp_golden", input="And of Italy?"),
        Case(f"{RESPONSES}/resp_golden/cancel", {}),
        Case(f"{RESPONSES}/resp_golden", method="DELETE"),
        Case(f"{RESPONSES}/resp_golden", method="GET"),
        response(previous_response_id="resp_golden"),
        response(background=True, stream=True, max_output_tokens=3),
        Case(f"{RESPONSES}/resp_background", method="GET"),
        Case(f"{RESPONSES}/resp_background?stream=true&starting_after=4", method="GET"),
        Case(f"{RESPONSES}/input_tokens", {"input": QUESTION}),
        response(input=[]),
        response(max_output_tokens=0),
        response(truncation="auto"),
        response(headers=WRONG_KEY),
    ],
    "anthropic": [
        message(),
        message(max_tokens=40, system="Be brief."),
        message(stream=True, max_tokens=3),
        message(stream=True, max_tokens=40),
        message(stop_sequences=["Paris"]),
        message(tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=80),
        message(tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=80, stream=True),
        Case("/v1/messages/count_tokens", {"model": "demo", "messages": USER}),
        message(messages=[]),
        message(max_tokens=0),
        message(headers={"x-api-key": "wrong", "Authorization": ""}),
        message(headers={"Authorization": "Bearer poor"}),
    ],
    "triton": [
        generate(GENERATE),
        generate(f"{GENERATE}_stream"),
        generate(GENERATE, n=2, max_dec_len=2),
        generate(GENERATE, topp=7),
        Case(GENERATE, {"text_input": QUESTION, "parameters": {"temperature": 0, "max_tokens": 6}}),
        Case(f"{GENERATE}_stream", {"text_input": QUESTION, "parameters": {"temperature": 0, "max_tokens": 3}}),
        Case(GENERATE, {"OUT": 5}),
        Case("/v2/models/model/infer", {}),
        Case("/v2/models/model", method="GET"),
        Case("/v2/models/other", method="GET"),
        Case("/v2/health/ready", method="GET"),
        over_grpc(text=QUESTION),
        over_grpc(text=QUESTION, max_dec_len=40, logprobs=1, return_token_ids=True),
        over_grpc(text=QUESTION, n=2, return_all_tokens=True, max_dec_len=1),
        over_grpc(text=QUESTION, topp=7),
        over_grpc(abort="unknown"),
        over_grpc(tokenize={"prompt": "Paris"}),
        over_grpc(text=QUESTION, headers=WRONG_KEY),
        over_grpc(text=QUESTION, headers={"Authorization": "Bearer poor"}),
        Case("ModelStreamInfer", b"{", "gRPC"),
    ],
}
