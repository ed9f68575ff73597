"""Questions about tokens: as the model counts them, without its engine."""

import json
from functools import partial

import pytest

from engine import wire
from engine.text.tokenizer import Tokenizer
from tests.pure.service_fakes import FakeEngine, a_service, an_input_processor, answer_to

CHAT = [{"role": "user", "content": "Hi there"}]


@pytest.fixture
def ask(tokenizer):
    engine = FakeEngine()
    engine.reason = "the engine is not there"
    with a_service(an_input_processor(tokenizer, tokenizer.vocab_size, (64, 48, 32)), engine) as service:
        yield partial(answer_to, service)
    assert engine.prompts == {}


def test_the_tokens_of_a_prompt_are_those_that_its_answer_would_begin_with(ask, tokenizer):
    reported = ask(tokenize={"prompt": "the there", "return_token_strs": True})
    assert reported == {
        **{"is_end": 1, "count": len(reported["tokens"]), "max_model_len": 64},
        **{"tokens": tokenizer.encode("the there"), "token_strs": ["th", "e", "Ġ", "th", "er", "e"]},
    }
    assert ask(detokenize={"tokens": reported["tokens"]}) == {"is_end": 1, "prompt": "the there"}


def test_a_chat_is_counted_with_its_template(ask, tokenizer):
    rendered = tokenizer.render_chat(CHAT)
    reported = ask(tokenize={"messages": CHAT})
    assert reported["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert ask(detokenize={"tokens": reported["tokens"]})["prompt"] == rendered
    shorter = ask(tokenize={"messages": CHAT, "add_generation_prompt": False})
    assert shorter["tokens"] == reported["tokens"][: shorter["count"]] and shorter["count"] < reported["count"]


def test_tools_and_variables_reach_the_template(ask, monkeypatch):
    seen = {}
    monkeypatch.setattr(Tokenizer, "render_chat", lambda self, messages, **given: seen.update(given) or "x")
    ask(tokenize={"messages": CHAT, "tools": [{"a": 1}], "chat_template_kwargs": {"b": 2}})
    assert seen == {"tools": [{"a": 1}], "b": 2}


def test_special_tokens_are_added_to_a_prompt_unless_it_says_otherwise(ask, monkeypatch):
    seen = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, special=True: seen.append(special) or [1])
    ask(tokenize={"prompt": "a"})
    ask(tokenize={"prompt": "a", "add_special_tokens": False})
    ask(tokenize={"messages": CHAT})
    assert seen == [True, False, False]


@pytest.mark.parametrize(
    ("question", "field", "text"),
    [
        ({"tokenize": {}}, "prompt", "Exactly one of `prompt` and `messages` must be set"),
        ({"tokenize": {"prompt": "a", "messages": CHAT}}, "prompt", "Exactly one of `prompt` and `messages` must be"),
        ({"tokenize": 1}, "tokenize", "The `tokenize` must be an object, it is a number"),
        ({"tokenize": {"prompt": 1}}, "prompt", "must be a string, it is a number"),
        ({"tokenize": {"prompt": "\ud800"}}, "prompt", "must be valid Unicode"),
        ({"tokenize": {"prompt": "x" * 10_000}}, "prompt", "The prompt has 10000 bytes, at most"),
        ({"tokenize": {"messages": [{}]}}, "messages", "must include `content`"),
        ({"tokenize": {"messages": CHAT, "chat_template_kwargs": {"messages": 1}}}, "messages", "messages cannot be"),
        ({"tokenize": {"messages": CHAT, "tools": [1]}}, "tools", "must be an object, it is a number"),
        ({"detokenize": {}}, "tokens", "`tokens` is missing"),
        ({"detokenize": {"tokens": [1, "a"]}}, "tokens", 'must hold token ids, \\"a\\" is none'),
        ({"detokenize": {"tokens": [-1]}}, "tokens", "must hold token ids, -1 is none"),
        ({"detokenize": {"tokens": [100_000]}}, "tokens", "holds 100000, the vocabulary has"),
    ],
)
def test_a_question_that_is_wrong_is_refused_by_field(ask, question, field, text):
    reported = ask(**question)
    assert (reported["error_code"], reported["error_field"]) == (400, field)
    assert text in json.dumps(reported["error_msg"])


@pytest.mark.parametrize("answer", [wire.TokenizeResponse([1, 2], 64, ["a", "b"]), wire.DetokenizeResponse("ü")])
def test_the_answers_are_read_as_they_were_written(answer):
    assert wire.read_answer(wire.write_answer(answer)) == answer
