"""OpenAI's embeddings endpoint. Each input becomes one native request."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import wire
from engine.errors import InvalidRequest
from engine.wire import POOLINGS, Delta, Final, int_in, schema_of
from gateway.openai import BASE, OpenAIProtocol
from gateway.openai.prompts import sources_of
from gateway.openai.request import check_name, model_of
from gateway.openai.unsupported_fields import UNSUPPORTED_POOLING_FIELDS, check_spelling, refuse_any, refuse_false
from gateway.protocol import RequestContext

MAX_INPUTS = 2048
check_dimensions, ENCODINGS = int_in(1, 1 << 20), ("float", "base64")
CHECKS = {name: wire.FIELDS[name].check for name in ("cache_salt", "priority", "timeout", "truncate_prompt_tokens")}
check_bool, check_req_id = (wire.FIELDS[name].check for name in ("stream", "req_id"))
TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
IDS_SCHEMA = schema_of(wire.FIELDS["input_ids"].check)
MEANINGS = {
    "input": "a text or a list of token ids, or a list of up to 2048 of either; taken as it stands",
    "model": "any is accepted, and named in the answer",
    "dimensions": "truncate each embedding to this many numbers",
    "encoding_format": "`float` or `base64`, of little-endian f32",
    "normalize": "to length 1",
    "use_activation": "the same, by its name in newer versions of vLLM",
    "request_id": "names the requests; random if not given",
}


@dataclass(eq=False)
class PoolingExchange:
    """Base class of the exchanges (`gateway.protocol.Exchange`) of embeddings and scores, which are never streamed."""

    stream: bool = field(default=False, init=False)
    num_tokens: int = field(default=0, init=False)
    found: dict[int, Final] = field(default_factory=dict, init=False)

    def event(self, index: int, answer: Delta) -> bytes:
        raise AssertionError("embeddings and scores are not streamed")

    def gather(self, index: int, answer: Delta) -> None:
        if isinstance(answer, Final):
            self.found[index] = answer

    def usage(self) -> dict[str, int]:
        """Return the usage of all requests."""
        num_tokens = sum(answer.usage.prompt_tokens for answer in self.found.values())
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


@dataclass(eq=False)
class EmbeddingExchange(PoolingExchange):
    """Exchange of an embeddings request."""

    requests: list[dict[str, Any]]
    answer_id: str
    names: Mapping[str, str]
    timeout_s: float | None
    model: str
    encoding: str
    dimensions: int | None
    is_normalized: bool

    def whole(self) -> dict[str, Any]:
        """Return the response object.

        Raise InvalidRequest if `dimensions` exceeds the model's, which is known only now.
        """
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(answer.embedding or "")}
            for index, answer in sorted(self.found.items())
        ]
        return {"object": "list", "data": data, "model": self.model, "usage": self.usage()}

    def _written(self, embedding: str) -> Any:
        vector = np.frombuffer(base64.b64decode(embedding), "<f4")
        if self.dimensions:
            if self.dimensions > len(vector):
                text = "`{field}` is {value}, the model has {limit}"
                raise InvalidRequest(text, field="dimensions", value=self.dimensions, limit=len(vector))
            vector = vector[: self.dimensions]
        if self.is_normalized:
            vector = vector / max(np.linalg.norm(vector), np.finfo(np.float32).tiny)
        return (
            vector.tolist() if self.encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
        )


class EmbeddingsProtocol(OpenAIProtocol):
    """OpenAI's embeddings protocol."""

    name = "embeddings"
    paths: Collection[str] = ("/v1/embeddings", f"{BASE}/embeddings")

    def fields(self, path: str) -> dict[str, Any]:
        lists = [
            {"type": "array", "items": each, "minItems": 1, "maxItems": MAX_INPUTS}
            for each in (TEXT_SCHEMA, IDS_SCHEMA)
        ]
        schemas = {
            "input": {"anyOf": [TEXT_SCHEMA, IDS_SCHEMA, *lists]},
            "model": schema_of(check_name),
            "dimensions": schema_of(check_dimensions),
            "encoding_format": {"enum": [*ENCODINGS], "default": ENCODINGS[0]},
            "pooling": {"enum": [*POOLINGS], "default": POOLINGS[0]},
            **dict.fromkeys(("normalize", "use_activation"), schema_of(check_bool) | {"default": True}),
            "request_id": schema_of(check_req_id),
            **{name: schema_of(check) for name, check in CHECKS.items()},
        }
        meanings = {**wire.FIELD_DESCRIPTIONS, **MEANINGS}
        return {name: {**schema, "description": wire.strip_links(meanings[name])} for name, schema in schemas.items()}

    def needs(self, path: str) -> Collection[str]:
        return ("input",)

    def example(self, path: str) -> dict[str, Any]:
        return {"model": "default", "input": ["What is the capital of France?", "Paris is."]}

    def parse(self, body: dict[str, Any], context: RequestContext) -> EmbeddingExchange:
        body = {key: value for key, value in body.items() if value is not None}
        check_spelling(body, self.fields(context.path), [*UNSUPPORTED_POOLING_FIELDS])
        refuse_any(body, UNSUPPORTED_POOLING_FIELDS)
        refuse_false(body, ("add_special_tokens",))
        is_normalized = body.get("use_activation", body.get("normalize", True))
        encoding = _one_of(ENCODINGS, "encoding_format", body)
        sources = sources_of("input", body, MAX_INPUTS)
        options: dict[str, Any] = {"pooling": _one_of(POOLINGS, "pooling", body)}
        options |= {name: check(name, body[name]) for name, check in CHECKS.items() if name in body}
        name = check_req_id("request_id", body.get("request_id", f"embd-{uuid.uuid4().hex}"))
        return EmbeddingExchange(
            requests=[{**each, **options, "req_id": f"{name[:240]}-{at}"} for at, each in enumerate(sources)],
            answer_id=name,
            names=dict.fromkeys(("text", "input_ids"), "input") | {"req_id": "request_id", "lora_name": "model"},
            timeout_s=options.get("timeout"),
            model=model_of(body, context.model_name),
            encoding=encoding,
            dimensions=check_dimensions("dimensions", body["dimensions"]) if "dimensions" in body else None,
            is_normalized=check_bool("use_activation" if "use_activation" in body else "normalize", is_normalized),
        )


def _one_of(known: Sequence[str], name: str, body: Mapping[str, Any]) -> str:
    """Return the value of the field `name`, by default the first of `known`. Raise InvalidRequest for any other."""
    value = body.get(name, known[0])
    if value not in known:
        text = "`{field}` must be one of {limit}, it is {value}"
        raise InvalidRequest(text, field=name, value=wire.shown(value), limit=[*known])
    return str(value)
