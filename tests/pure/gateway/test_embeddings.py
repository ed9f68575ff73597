"""OpenAI's embeddings with the unmodified client."""

import base64

import numpy as np
import openai
import pytest

from gateway import concurrent_requests
from tests.pure.gateway_fake import FakeBackend, openai_client, running

PATH = "/v1/embeddings"


class Embedding(FakeBackend):
    """Answers with what it was asked: the first id, or the length of a text, and twice that, and 0."""

    num_open = most_open = 0

    async def generate(self, body, timeout_s):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        async for answer in super().generate(body, timeout_s):
            yield answer
        self.num_open -= 1

    def _end(self, body, texts):
        first = body["input_ids"][0] if "input_ids" in body else len(body["text"])
        vector = np.array([3 * first, 4 * first, 0], "<f4").tobytes()
        return super()._end(body, texts) | {"embedding": base64.b64encode(vector).decode()}


@pytest.mark.parametrize("base", ["/v1", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("ab", [{"text": "ab", "apply_chat_template": False}]),
        ([7, 8], [{"input_ids": [7, 8]}]),
        (["a", "ab"], [{"text": "a", "apply_chat_template": False}, {"text": "ab", "apply_chat_template": False}]),
        ([[1], [2, 3]], [{"input_ids": [1]}, {"input_ids": [2, 3]}]),
    ],
)
def test_every_input_gets_its_embedding_in_its_place(base, given, asked):
    backend = Embedding()
    with running(backend) as gateway, openai_client(gateway, base) as client:
        answer = client.embeddings.create(model="m", input=given)  # the client asks for base64, and decodes it
    assert [{name: body[name] for name in each} for body, each in zip(backend.bodies, asked, strict=True)] == asked
    assert {body["pooling"] for body in backend.bodies} == {"last"}
    assert len({body["req_id"] for body in backend.bodies}) == len(asked)
    assert [each.index for each in answer.data] == [*range(len(asked))]
    for each in answer.data:
        assert each.embedding == pytest.approx([0.6, 0.8, 0])
    assert (answer.model, answer.object, answer.data[0].object) == ("m", "list", "embedding")
    assert answer.usage.to_dict() == {"prompt_tokens": 5 * len(asked), "total_tokens": 5 * len(asked)}


def test_numbers_are_cut_then_normalized_and_written_as_asked():
    backend = Embedding()
    with running(backend) as gateway:
        body = {"input": [[2], [5]], "pooling": "mean", "timeout": 9, "cache_salt": "s"}
        plain = gateway.post(PATH, {**body, "normalize": False, "endianness": "little", "padding": "do_not_pad"})
        assert gateway.post(PATH, {**body, "use_activation": False}) == plain
        cut = gateway.post(PATH, {**body, "dimensions": 1})
        packed = gateway.post(PATH, {**body, "encoding_format": "base64", "dimensions": 2})
        assert gateway.refused(PATH, {**body, "dimensions": 4})[1]["error"]["message"] == (
            "`dimensions` is 4, the model has 3"
        )
    assert [each["embedding"] for each in plain["data"]] == [[6, 8, 0], [15, 20, 0]]
    assert [each["embedding"] for each in cut["data"]] == [[1], [1]]
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in packed["data"]]
    assert vectors == [pytest.approx([0.6, 0.8])] * 2
    assert {(each["pooling"], each["timeout"], each["cache_salt"]) for each in backend.bodies} == {("mean", 9, "s")}


def test_many_inputs_are_asked_for_by_and_by(monkeypatch):
    monkeypatch.setattr(concurrent_requests, "MAX_AT_ONCE", 8)
    backend = Embedding("one", "two")
    with running(backend) as gateway:
        answer = gateway.post(PATH, {"input": [[n + 1] for n in range(100)], "normalize": False})
    assert [each["embedding"][0] for each in answer["data"]] == [3 * n + 3 for n in range(100)]
    assert backend.most_open == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": 3}, "normalize"),
        ({"use_activation": 3}, "use_activation"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"dimension": 3}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, param):
    with running(Embedding()) as gateway, openai_client(gateway, "/v1") as client:
        status, answer = gateway.refused(PATH, {"input": "a", **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        if param == "dimensions":
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model="m", input="a", dimensions=0)
