"""Echoes with logprobs, scores of prompts and token ids in OpenAI's objects, as vLLM has them."""

import openai
import pytest

from tests.pure.gateway.test_openai import A_CHAT, CHAT, COMPLETIONS, client_for
from tests.pure.gateway_fake import FakeBackend, events, openai_client, running

LM_EVAL = {"model": "m", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
ECHOED = {
    "tokens": ["<s>", "Hi ", "é", "a", "</s>"],
    "token_logprobs": [None, -1.5, -0.5, -0.5, -0.5],
    "top_logprobs": [
        None,
        {"Hi ": -1.5, "Ho": -0.25},
        {"é": -0.5},
        {"a": -0.5, "x": -9999.0},
        {"</s>": -0.5, "x": -9999.0},
    ],
    "text_offset": [0, 3, 6, 7, 8],
}


def test_a_loglikelihood_request_of_lm_eval_gets_the_logprobs_of_its_prompt():
    """The prompts are lists of token ids. The last logprob is that of the generated token, even if it ends the
    answer.
    """
    backend = FakeBackend("a")
    with client_for(backend) as client:
        answer = client.completions.create(**LM_EVAL, prompt=[[1, 2, 3], [1, 2, 3]])
        stream = list(client.completions.create(**LM_EVAL, prompt=[1, 2, 3], stream=True))
    assert [body["input_ids"] for body in backend.bodies] == [[1, 2, 3]] * 3
    assert all((body["prompt_logprobs"], body["max_tokens"]) == (1, 1) for body in backend.bodies)
    for choice in answer.choices:
        assert choice.text == "<s>Hi éa"
        assert choice.logprobs.to_dict() == ECHOED
    parts = [chunk.choices[0].logprobs.to_dict() for chunk in stream]
    assert {name: [each for part in parts for each in part[name]] for name in ECHOED} == ECHOED
    assert "".join(chunk.choices[0].text for chunk in stream) == "<s>Hi éa"


def test_an_echo_of_a_text_is_that_text_and_of_token_ids_what_the_model_tells():
    backend = FakeBackend("a")
    with client_for(backend) as client:
        texts = [client.completions.create(model="m", prompt=each, echo=True).choices[0].text for each in ("Hé", [1])]
    assert texts == ["Héa", "<s>Hi éa"]
    assert ["return_token_ids" in body for body in backend.bodies] == [False, True]
    assert not any("prompt_logprobs" in body for body in backend.bodies)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_and_token_ids_have_the_fields_of_vllm(stream):
    asked = {"prompt_logprobs": 1, "return_token_ids": True}
    scores = [
        None,
        {
            "2": {"logprob": -1.5, "rank": None, "decoded_token": "Hi "},
            "4": {"logprob": -0.25, "rank": 1, "decoded_token": "Ho"},
        },
        {"3": {"logprob": -0.5, "rank": 1, "decoded_token": "é"}},
    ]
    of_prompt = {"prompt_logprobs": scores, "prompt_token_ids": [1, 2, 3]}
    with running(FakeBackend("a", "b")) as gateway, openai_client(gateway, "/v1") as client:
        chat = client.chat.completions.create(**A_CHAT, extra_body=asked, stream=stream)
        completion = client.completions.create(model="m", prompt="x", extra_body=asked, stream=stream)
        chat, completion = ([each.to_dict() for each in answer] if stream else [answer.to_dict()]
                            for answer in (chat, completion))  # fmt: skip
    assert {name: chat[0][name] for name in of_prompt} == of_prompt
    assert {name: completion[0]["choices"][0][name] for name in of_prompt} == of_prompt
    for answer in (chat, completion):
        ids = [token_id for each in answer for token_id in each["choices"][0].get("token_ids", ())]
        assert ids == [0, 1, 2]  # the last one ended it
        assert not any(of_prompt.keys() & {*each, *each["choices"][0]} for each in answer[1:])


def test_unrequested_outputs_are_not_returned():
    with client_for(FakeBackend("a")) as client:
        chat = client.chat.completions.create(**A_CHAT, extra_body={"return_token_ids": True}).to_dict()
        echo = client.completions.create(model="m", prompt=[1], echo=True).to_dict()
    assert "prompt_logprobs" not in chat and chat["prompt_token_ids"] == [1, 2, 3]
    assert not {"prompt_token_ids", "prompt_logprobs", "token_ids"} & {*echo, *echo["choices"][0]}


def test_tokens_may_be_named_by_their_ids():
    asked = {"return_tokens_as_token_ids": True}
    with client_for(FakeBackend("a")) as client:
        chat = client.chat.completions.create(**A_CHAT, logprobs=True, top_logprobs=1, extra_body=asked)
        echo = client.completions.create(**LM_EVAL, prompt=[1, 2, 3], extra_body=asked).choices[0].logprobs
    [reported] = chat.choices[0].logprobs.content
    assert (reported.token, reported.top_logprobs[0].token, reported.bytes) == ("token_id:7", "token_id:7", [97])
    assert echo.tokens == ["token_id:1", "token_id:2", "token_id:3", "token_id:7", "token_id:2"]
    assert echo.top_logprobs[1] == {"token_id:2": -1.5, "token_id:4": -0.25}


def test_no_token_at_all_may_be_asked_for():
    backend = FakeBackend(finish_reason="length")
    with client_for(backend) as client:
        answer = client.completions.create(model="m", prompt="x", max_tokens=0, echo=True, logprobs=0)
        with pytest.raises(openai.BadRequestError, match="`max_tokens` must be an integer and at least 0, it is -1"):
            client.completions.create(model="m", prompt="x", max_tokens=-1)
    [choice] = answer.choices
    assert backend.bodies[0]["max_tokens"] == 0
    assert choice.text == "x" and choice.logprobs.token_logprobs[:3] == [None, -1.5, -0.5]


def test_a_stream_begins_with_what_its_prompt_tells_although_there_is_no_text_yet():
    class Late(FakeBackend):
        def delta_fields(self, body, texts, text):
            return super().delta_fields(body, texts, text) | {"token": ""}

    with running(Late("a", "b")) as gateway:
        body = {"prompt": "x", "stream": True, "return_token_ids": True}
        first, *_ = events(gateway.stream(COMPLETIONS, body))
    assert first["choices"][0]["prompt_token_ids"] == [1, 2, 3]


@pytest.mark.parametrize("with_chat", [False, True])
def test_a_stream_has_the_ids_of_tokens_without_text(with_chat):
    class Textless(FakeBackend):  # special tokens, and parts of characters
        def delta_fields(self, body, texts, text):
            fields = super().delta_fields(body, texts, text)
            return fields | {"token": ""} if text in "bc" else fields

    with running(Textless("a", "b", "c", "d")) as gateway:
        for wanted, expected in ((True, [0, 1, 2, 3, 2]), (False, [])):
            body = A_CHAT if with_chat else {"prompt": "x"}
            body = {**body, "stream": True, "return_token_ids": wanted}
            *chunks, _ = events(gateway.stream(CHAT if with_chat else COMPLETIONS, body))
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == expected
            assert len(choices) == with_chat + (5 if wanted else 3)
