"""Scores and reranking: what is asked of the model for them, and the shapes of vLLM, Jina and Cohere."""

import base64

import numpy as np
import pytest

from engine.wire import ModelState
from tests.pure.gateway_fake import FakeBackend, running

# By text; of a pair the head's one number is the first of its second text
VECTORS = {"east": [2, 0], "north": [0, 3], "north-east": [1, 1], "west": [-1, 0]}


class Scoring(FakeBackend):
    def __init__(self, num_labels=0):
        super().__init__(state=ModelState(ready=True, model_len=8192, num_labels=num_labels))

    def _end(self, body, texts):
        vector = VECTORS[body["text_pair"]][:1] if "text_pair" in body else VECTORS[body["text"]]
        return super()._end(body, texts) | {"embedding": base64.b64encode(np.array(vector, "<f4").tobytes()).decode()}


def test_without_a_head_texts_are_compared_by_their_embeddings_each_computed_once():
    backend = Scoring()
    with running(backend) as gateway:
        for path in ("/v1/score", "/score"):
            body = {"model": "m", "text_1": "east", "text_2": ["east", "north", "north-east", "west"], "priority": 3}
            answer = gateway.post(path, body)
            assert [each["score"] for each in answer["data"]] == pytest.approx([1, 0, 0.5**0.5, -1])
        pairs = gateway.post("/v1/score", {"text_1": ["east", "north"], "text_2": ["west", "north"]})
    assert [each["text"] for each in backend.bodies[:4]] == [*VECTORS] and len(backend.bodies) == 4 + 4 + 3
    assert {(each["pooling"], each["apply_chat_template"]) for each in backend.bodies} == {("last", False)}
    assert backend.bodies[0]["priority"] == 3
    assert [each["score"] for each in pairs["data"]] == pytest.approx([-1, 1])
    assert (answer["object"], answer["data"][1]["object"], answer["data"][1]["index"]) == ("list", "score", 1)
    assert (answer["model"], answer["usage"]) == ("m", {"prompt_tokens": 20, "total_tokens": 20})


def test_with_a_head_each_pair_is_a_request_and_its_score_a_probability():
    backend = Scoring(num_labels=1)
    with running(backend) as gateway:
        answer = gateway.post("/rerank", {"query": "q", "documents": ["west", {"text": "east"}, "north"], "top_n": 2})
        bare = gateway.post("/score", {"queries": "q", "documents": ["west", "east"], "use_activation": False})
        assert [each["score"] for each in bare["data"]] == [-1, 2]
        for others in (("data_1", "data_2"), ("queries", "items")):
            same = gateway.post("/score", dict(zip(others, ("q", ["west", "east"]), strict=True)))
            assert [each["score"] < 0.5 for each in same["data"]] == [True, False]
        assert len(gateway.post("/rerank", {"query": "q", "documents": ["west", "east"], "top_n": 0})["results"]) == 2
        again = gateway.post("/v2/rerank", {"model": "m", "query": "q", "documents": ["west", "east"]})
        assert backend.num_probes == 1, "the model is asked once what it is"
        gateway.post("/score", {"text_1": "q", "text_2": "east", "instruction": "i", "chat_template_kwargs": {"a": 1}})
        assert backend.bodies[-1]["chat_template_kwargs"] == {"instruction": "i", "a": 1}
    asked = [(each["text"], each["text_pair"], each["pooling"]) for each in backend.bodies]
    assert sorted(asked[:3]) == [("q", "east", "score"), ("q", "north", "score"), ("q", "west", "score")]
    likely = 1 / (1 + np.exp(-np.array([2.0, 0, -1])))
    assert answer["results"] == [
        {"index": 1, "relevance_score": pytest.approx(likely[0]), "document": {"text": "east"}},
        {"index": 2, "relevance_score": pytest.approx(likely[1]), "document": {"text": "north"}},
    ]
    assert again["results"] == [  # Cohere's client wants no documents
        {"index": 1, "relevance_score": pytest.approx(likely[0])},
        {"index": 0, "relevance_score": pytest.approx(likely[2])},
    ]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": "a"}, "`text_2` must be a text or a list of texts, it is null"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "`text_1` has 2 texts, `text_2` has 1"),
        ("/score", {"text_1": "a", "text_2": ["c"] * 2049}, "`text_2` has 2049 items, the limit is 2048"),
        ("/rerank", {"documents": ["a"]}, "`query` must be a text, it is null"),
        ("/rerank", {"query": "a", "documents": []}, "`documents` must be a text or a list of texts, it is []"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", {"title": "b"}]},
            "The `documents[1]` in input parameters must be",
        ),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "i"}, "`instruction` needs a model with a head"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncation_side": "right"}, "`truncation_side` is not supp"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "`max_tokens_per_doc` is not supp"),
        ("/rerank", {"query": "a", "documents": ["b"], "return_document": True}, "did you mean `return_documents`"),
    ],
)
def test_requests_that_cannot_be_scored_are_refused_by_name(path, body, message):
    with running(Scoring()) as gateway:
        status, answer = gateway.refused(path, body)
    assert status == 400 and message in answer["error"]["message"]


def test_a_head_of_several_labels_gives_no_score():
    with running(Scoring(num_labels=3)) as gateway:
        status, answer = gateway.refused("/v1/score", {"text_1": "a", "text_2": "b"})
    assert status == 400 and "the model tells 3 labels apart" in answer["error"]["message"]
