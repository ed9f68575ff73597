"""Scores of text pairs: vLLM's score API, and the rerank APIs of Jina and Cohere.

A model with a classifier scores each pair in one request. Other models embed each text in one request, and the score is
the cosine similarity.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import wire
from engine.errors import InvalidRequest
from engine.wire import FIELD_DESCRIPTIONS, POOLINGS, SCORE, int_in, schema_of, strip_links
from gateway.embeddings import CHECKS, PoolingExchange
from gateway.openai import OpenAIProtocol
from gateway.openai.request import check_name, model_of
from gateway.openai.unsupported_fields import UNSUPPORTED_POOLING_FIELDS, check_spelling, refuse_any, refuse_more
from gateway.protocol import RequestContext

MAX_TEXTS = 2048
check_text, check_bool, check_req_id = (wire.FIELDS[name].check for name in ("text", "stream", "req_id"))
check_object = wire.FIELDS["chat_template_kwargs"].check
check_top_n = int_in(0, 1 << 20)
REFUSED: dict[str, Collection[Any]] = {
    **dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query", "max_chunks_per_doc", "rank_fields"), ()),
    **UNSUPPORTED_POOLING_FIELDS,
}
# Names of these fields in newer versions of vLLM
TEXT_ALIASES = {"text_1": ("queries", "data_1"), "text_2": ("documents", "items", "data_2")}
TEXTS = {"type": "array", "items": schema_of(check_text), "minItems": 1, "maxItems": MAX_TEXTS}
DOCUMENT = {"anyOf": [schema_of(check_text), {"type": "object", "properties": {"text": schema_of(check_text)}}]}
Json = dict[str, Any]


@dataclass(eq=False)
class ScoreExchange(PoolingExchange):
    """Exchange of a score or rerank request."""

    pairs: Sequence[tuple[str, str]]
    has_classifier: bool
    options: Json  # fields of every request to the model
    answer_id: str
    top_n: int | None = None  # None: one score per pair, in order; otherwise the best pairs, best first
    with_documents: bool = False  # the response repeats the texts of the documents
    is_activated: bool = True  # the classifier's logit is mapped to 0..1 by a sigmoid
    model: str = ""

    def __post_init__(self) -> None:
        if self.has_classifier:
            self._places = [(place, place) for place in range(len(self.pairs))]
            texts: list[Json] = [{"text": a, "text_pair": b, "pooling": SCORE} for a, b in self.pairs]
        else:
            place_of = {
                text: place for place, text in enumerate(dict.fromkeys(text for pair in self.pairs for text in pair))
            }
            self._places = [(place_of[a], place_of[b]) for a, b in self.pairs]
            texts = [{"text": text, "apply_chat_template": False, "pooling": POOLINGS[0]} for text in place_of]
        self.timeout_s: float | None = self.options.get("timeout")
        self.requests: list[Json] = [
            {**each, **self.options, "req_id": f"{self.answer_id[:240]}-{at}"} for at, each in enumerate(texts)
        ]
        names = ("text_1", "text_2") if self.top_n is None else ("documents", "documents")
        called = {"req_id": "request_id", "lora_name": "model"}
        self.names: Mapping[str, str] = {**called, "text": names[0], "text_pair": names[1]}

    def whole(self) -> Json:
        scores = [self._score(a, b) for a, b in self._places]
        if self.top_n is None:
            data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
            head = {"id": self.answer_id, "object": "list", "created": int(time.time()), "model": self.model}
            return {**head, "data": data, "usage": self.usage()}
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: self.top_n]
        results: list[Json] = [{"index": at, "relevance_score": scores[at]} for at in best]
        for each in results if self.with_documents else ():
            each["document"] = {"text": self.pairs[each["index"]][1]}
        return {"id": self.answer_id, "model": self.model, "results": results, "usage": self.usage()}

    def _score(self, a: int, b: int) -> float:
        if self.has_classifier:
            logit = self._vector(a)[0]
            return float(1 / (1 + np.exp(-logit)) if self.is_activated else logit)
        one, other = self._vector(a), self._vector(b)
        cosine = one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), np.finfo(np.float32).tiny)
        return float(np.clip(cosine, -1, 1))

    def _vector(self, index: int) -> np.ndarray:
        answer = self.found.get(index)
        return np.frombuffer(base64.b64decode((answer and answer.embedding) or EMPTY_EMBEDDING), "<f4").astype(
            np.float64
        )


EMPTY_EMBEDDING = base64.b64encode(bytes(4))


class ScoreProtocol(OpenAIProtocol):
    """vLLM's score protocol. The number of the model's labels must be known before a request is parsed."""

    name = "scores"
    paths: Collection[str] = ("/v1/score", "/score")

    def fields(self, path: str) -> Json:
        one_or_more = {"anyOf": [schema_of(check_text), TEXTS]}
        texts = {
            "text_1": {**one_or_more, "description": "a text, or a list of them"},
            "text_2": {**one_or_more, "description": "to score each of these with `text_1`, or with that in its place"},
        }
        others = {name: texts[own] for own, names in TEXT_ALIASES.items() for name in names}
        return {**texts, **others, **self._common()}

    def _common(self) -> Json:
        common = {
            "model": {**schema_of(check_name), "description": "any is accepted, and named in the answer"},
            "request_id": {**schema_of(check_req_id), "description": "names the requests; random if not given"},
            "instruction": {**schema_of(check_text), "description": "for the chat template that writes a pair"},
            "chat_template_kwargs": {**schema_of(check_object), "description": "`instruction` and others"},
            "use_activation": {
                **schema_of(check_bool),
                "description": "map the classifier's score to 0..1",
                "default": True,
            },
        }
        return common | {
            name: {**schema_of(check), "description": strip_links(FIELD_DESCRIPTIONS[name])}
            for name, check in CHECKS.items()
        }

    def needs(self, path: str) -> Collection[str]:
        return ("text_1",)

    def example(self, path: str) -> Json:
        return {"model": "default", "text_1": "Where is Paris?", "text_2": ["In France.", "At noon."]}

    def parse(self, body: Json, context: RequestContext) -> ScoreExchange:
        names = [next((each for each in others if body.get(each)), own) for own, others in TEXT_ALIASES.items()]
        return self._exchange(context, body, _paired(*(_texts(name, body) for name in names)))

    def _exchange(
        self, context: RequestContext, body: Json, pairs: Sequence[tuple[str, str]], **more: Any
    ) -> ScoreExchange:
        body = {key: value for key, value in body.items() if value is not None}
        check_spelling(body, self.fields(context.path), [*REFUSED])
        refuse_any(body, REFUSED)
        if context.num_labels > 1:
            text = "`{field}`: the model tells {value} labels apart, a score is that of one"
            raise InvalidRequest(text, field="model", value=context.num_labels, limit=1)
        options = {name: check(name, body[name]) for name, check in CHECKS.items() if name in body}
        variables = check_object("chat_template_kwargs", body.get("chat_template_kwargs", {}))
        if "instruction" in body:
            variables = {"instruction": check_text("instruction", body["instruction"]), **variables}
        if variables and not context.num_labels:
            text = "`{field}` needs a model with a head and a chat template that writes pairs"
            raise InvalidRequest(text, field="instruction" if "instruction" in body else "chat_template_kwargs")
        options |= {"chat_template_kwargs": variables} if variables else {}
        name = check_req_id("request_id", body.get("request_id", f"score-{uuid.uuid4().hex}"))
        model = model_of(body, context.model_name)
        more["is_activated"] = check_bool("use_activation", body.get("use_activation", True))
        return ScoreExchange(pairs, context.num_labels > 0, options, name, model=model, **more)


class RerankProtocol(ScoreProtocol):
    """Rerank protocol of Jina and of Cohere's second API version."""

    name = "reranking"
    paths: Collection[str] = ("/v1/rerank", "/rerank", "/v2/rerank")

    def fields(self, path: str) -> Json:
        own = {
            "query": {**schema_of(check_text), "description": "the text to compare the documents with"},
            "documents": {**TEXTS, "items": DOCUMENT, "description": "texts, or objects with a `text`"},
            "top_n": {**schema_of(check_top_n), "description": "return only the best `top_n`; 0 or absent: all"},
            "return_documents": {
                **schema_of(check_bool),
                "description": "include their texts in the response",
                "default": _returns_documents(path),
            },
        }
        return {**own, **self._common()}

    def needs(self, path: str) -> Collection[str]:
        return ("query",)

    def example(self, path: str) -> Json:
        return {"model": "default", "query": "Where is Paris?", "documents": ["At noon.", "In France."]}

    def parse(self, body: Json, context: RequestContext) -> ScoreExchange:
        if not isinstance(query := body.get("query"), str):
            raise InvalidRequest("`{field}` must be a text, it is {value}", field="query", value=wire.shown(query))
        documents = body.get("documents")
        if isinstance(documents, list):
            texts = [each.get("text") if isinstance(each, dict) else each for each in documents]
            body = {**body, "documents": texts}
        pairs = [(check_text("query", query), each) for each in _texts("documents", body)]
        top_n = check_top_n("top_n", 0 if body.get("top_n") is None else body["top_n"]) or len(pairs)
        given = body.get("return_documents")
        with_documents = _returns_documents(context.path) if given is None else check_bool("return_documents", given)
        return self._exchange(context, body, pairs, top_n=top_n, with_documents=with_documents)


def _returns_documents(path: str) -> bool:
    """Return True if the response contains the documents by default, as Jina's does and Cohere's does not."""
    return path != "/v2/rerank"


def _texts(name: str, body: Mapping[str, Any]) -> list[str]:
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        text = "`{field}` must be a text or a list of texts, it is {value}"
        raise InvalidRequest(text, field=name, value=wire.shown(given))
    refuse_more(name, len(texts), MAX_TEXTS)
    return [wire.within(name, f"[{index}]", check_text, each) for index, each in enumerate(texts)]


def _paired(ones: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    if len(ones) == 1:
        ones = [*ones] * len(others)
    if len(ones) != len(others):
        text = "`text_1` has {limit} texts, `{field}` has {value}: as many are needed, or one `text_1`"
        raise InvalidRequest(text, field="text_2", value=len(others), limit=len(ones))
    return list(zip(ones, others, strict=True))
