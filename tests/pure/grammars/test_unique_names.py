"""Objects whose properties match patterns get none twice, whatever the model says."""

import json

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.grammars.unique_names import NameReader, TokensOfNames, forbid_repeated
from engine.grammars.vocabulary import Vocabulary
from engine.text.grammars import ReasoningPrefix, unlimited_reasoning
from engine.wire import STRUCTURED_OUTPUT_FIELDS
from tests.pure.guided import Guided, a_request

VALUE = {"enum": [1, {}]}


def of_pattern(pattern, **more):
    return {"type": "object", "patternProperties": {pattern: VALUE}, "additionalProperties": False, **more}


INNER = of_pattern("^[ab]{1,2}$", minProperties=4)
SCHEMAS = {
    "all names of a pattern": of_pattern("^[abc]$", minProperties=3),
    "names of which some begin others": INNER,
    "two patterns": {**of_pattern("^a[ab]?$", minProperties=3), "patternProperties": {"^a": {}, "^b$": VALUE}},
    "beside a named one": of_pattern("^[abc]$", properties={"a": VALUE}, required=["a"], minProperties=3),
    "nested": of_pattern("^[ab]$", minProperties=2) | {"patternProperties": {"^[ab]$": INNER}},
    "in a list": {"type": "array", "items": INNER, "minItems": 2, "maxItems": 3},
    "escaped": of_pattern('^["\\\\\n]$', minProperties=3),
    "by propertyNames": {"type": "object", "propertyNames": {"pattern": "^[abc]$"}, "minProperties": 3},
}


def without_repetition(pairs):
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def checked(text):
    return json.loads(text, object_pairs_hook=without_repetition)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", pytest.param("ngram", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMAS)
def test_no_object_gets_a_property_twice(tokenizer, name, method):
    guided = Guided(tokenizer, speculate_method=method)
    likely = tuple((token_id, 4.0) for token_id in tokenizer.encode("ab,"))
    requests = [
        a_request(f"{seed}", "guided_json", SCHEMAS[name], seed=seed, logit_bias=likely, any_whitespace=seed % 2 == 0)
        for seed in range(8)
    ]
    guided.run(*requests)
    for request in requests:
        assert guided.ends[request.request_id] == "stop", guided.errors[request.request_id]
        assert checked(guided.text(request.request_id))


@pytest.mark.slow
def test_an_answer_goes_on_from_any_of_its_tokens_without_a_property_twice(tokenizer):
    guided = Guided(tokenizer)
    whole = '{"a":1,"ab":{},"b":1,"ba":1'
    for count in range(len(whole)):
        name = f"{count}"
        guided.run(
            a_request(name, "guided_json", INNER, token_ids=tokenizer.encode(whole[:count]), any_whitespace=False)
        )
        assert checked(whole[:count] + guided.text(name))
    guided.run(a_request("twice", "guided_json", INNER, token_ids=tokenizer.encode('{"a":1,"a":')))
    assert "do not have the form" in str(guided.errors["twice"])


def test_a_thought_has_no_names(tokenizer):
    guided = Guided(tokenizer)
    before = '<think>{"a": 1, "b": [" </think>'
    for begin in ("", '"<think>"'):
        reasoning = ReasoningPrefix(unlimited_reasoning("</think>"), begin)
        request = a_request(
            f"thinks {begin}", "guided_json", INNER, token_ids=tokenizer.encode(before), reasoning=reasoning, seed=1
        )
        guided.run(request)
        assert len(checked(guided.text(request.request_id))) > 3
    reasoning = ReasoningPrefix(unlimited_reasoning("</think>"), '"<think>"')
    bias = ((tokenizer.encode("<")[0], -100.0),)
    guided.run(a_request("does not", "guided_json", INNER, reasoning=reasoning, logit_bias=bias))
    assert len(checked(guided.text("does not"))) > 3


WORDS = ('"a"', 'a"', '":', '","', ',"a":', ',"b":', '"b', 'ab"', ', "', 'a":1,"b":', "\\u")
ALL_OF_A = '{"aa":1,"ab":1,"a":1,'
LEFT = {
    "{": {'"', '"a"', '"b'},
    '{"a":1': {",", ',"b":'},
    '{"a":1,': {'"', '"b'},
    '{"a":1,"': {"a", "b", 'ab"'},
    '{"a":1,"a': {"a", "b", 'a"', 'a":1,"b":'},
    ALL_OF_A: {'"', '"b'},
    f'{ALL_OF_A}"': {"b"},
    f'{ALL_OF_A}"b': {"a", "b", '"', 'a"', '":', 'a":1,"b":'},
    f'{ALL_OF_A}"b":1,"bb":1,"b': {"a", 'a"'},
    f'{ALL_OF_A}"b":1,"bb":1,"ba":1': {"}"},
}


def test_tokens_of_several_characters_give_no_name_twice_either():
    """The vocabulary has tokens in which names, quotes and commas are combined."""

    class Tokenizer:
        special_ids, eos_token_ids = (), (0,)
        words = ["", *map(chr, range(1, 128)), *WORDS]

        def token_bytes(self, token_id):
            return self.words[token_id].encode()

        def encode(self, text, add_special_tokens):
            return [*text.encode()]

    vocabulary = Vocabulary(Tokenizer(), len(Tokenizer.words))
    names = TokensOfNames(vocabulary.tokens)
    grammar = json.dumps({"grammars": [{"json_schema": {**INNER, "x-guidance": {"whitespace_flexible": False}}}]})
    for text, expected in LEFT.items():
        matcher, reader = LLMatcher(vocabulary.of_library, grammar, log_level=0), NameReader()
        matcher.consume_tokens([*text.encode()])
        reader.read(text.encode())
        row = np.frombuffer(matcher.compute_bitmask(), np.uint32).copy()
        forbid_repeated(matcher, reader, names, row)
        left = [i for i in range(len(Tokenizer.words)) if row[i // 32] >> (i % 32) & 1]
        assert {Tokenizer.words[i] for i in left} == expected


@pytest.mark.parametrize(
    "tag",
    [
        {"format": {"type": "json_schema", "json_schema": INNER}},
        {"structures": [{"begin": "<f>", "schema": INNER, "end": "</f>"}], "triggers": ["<"]},
    ],
    ids=lambda tag: next(iter(tag)),
)
def test_structural_tags_take_no_patterns_of_names(tag):
    with pytest.raises(Exception, match="`patternProperties`: that no name comes twice cannot be enforced"):
        STRUCTURED_OUTPUT_FIELDS["structural_tag"]("structural_tag", tag)


def test_a_text_outside_of_objects_is_no_name():
    reader = NameReader()
    assert not reader.read(b'"a" "a" ["a", "a"] {"a": 1')
    assert reader.names == {b"a"}


def test_names_are_read_whatever_is_around_them():
    reader = NameReader()
    assert not reader.read(b'<tool_call>\n{"name": "f", "arguments": {"f": ["f", {"f": "f\\"", "g')
    assert (reader.names, reader.name) == ({b"f"}, b"g")
    assert not reader.copy().read(b'":1}], "g": {}')
    assert reader.copy().read(b'":1, "f"')
    assert reader.copy().read(b'":1}], "f"')
    assert not reader.read(b'": [') and reader.names == set()
