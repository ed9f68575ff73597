"""JSON schemas that answers are made by: what is enforced, rewritten, refused with its place, or left out."""

import copy
import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.grammars.vocabulary import Vocabulary
from engine.wire import STRUCTURED_OUTPUT_FIELDS
from engine.wire.json_schemas import enforceable_schema
from tests.byte_tokenizer import EOS_ID
from tests.pure.random_keywords import random_keywords

VOCAB_SIZE = EOS_ID + 1
INT, TEXT = {"type": "integer"}, {"type": "string"}
AB = {"type": "object", "properties": {"a": INT, "b": TEXT}}


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, VOCAB_SIZE)


def compiled(vocabulary, schema):
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    structured_output = json.dumps({"grammars": [{"json_schema": compact}]})
    return LLMatcher(vocabulary.of_library, structured_output, log_level=0)


def allows(vocabulary, schema, text):
    matcher = compiled(vocabulary, schema)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = [*text.encode()]
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    matcher.consume_tokens(token_ids)
    return matcher.is_accepting()


UNENFORCED = {
    "uniqueItems": {"type": "array", "items": INT, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 5}, "minContains": 2},
    "not": {"type": "integer", "not": {"const": 5}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 5}},
    "propertyNames": {"properties": {"a": INT}, "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"allOf": [AB], "unevaluatedProperties": False},
    "unevaluatedItems": {"anyOf": [{"prefixItems": [INT]}], "unevaluatedItems": False},
    "minProperties": {**AB, "minProperties": 2},
    "maxProperties": {**AB, "maxProperties": 1},
    "format": {"type": "string", "format": "iri"},
    "pattern": {"type": "string", "pattern": "^(?!a)"},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
}


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_keywords_that_cannot_be_enforced_are_refused_with_their_place_or_left_out_on_request(keyword, vocabulary):
    schema = {"$defs": {"x y": UNENFORCED[keyword]}, "properties": {"p": {"items": {"$ref": "#/$defs/x%20y"}}}}
    with pytest.raises(InvalidRequest) as caught:
        enforceable_schema("guided_json", schema)
    assert (caught.value.field, keyword in str(caught.value)) == ("guided_json", True)
    assert 'at $.$defs["x y"]' in str(caught.value)
    followed = enforceable_schema("guided_json", schema, strict=False)
    assert [each.partition(" ")[0] for each in followed.unenforced] == [keyword]
    assert not compiled(vocabulary, followed.schema).is_error()


A_ONLY, NOTHING = '{"a":1}', "{}"
BOTH = '{"a":1,"b":"x"}'
REWRITTEN = {
    "uniqueItems of one item": (
        {"items": INT, "type": "array", "uniqueItems": True, "maxItems": 1},
        ["[1]"],
        ["[1,1]"],
    ),
    "uniqueItems false": ({"items": INT, "type": "array", "uniqueItems": False}, ["[1,1]"], []),
    "contains of none": ({"items": INT, "type": "array", "contains": TEXT, "minContains": 0}, ["[]", "[1]"], []),
    "not false": ({**INT, "not": False}, ["5"], ['"x"']),
    "then without if": ({**INT, "then": TEXT}, ["5"], ['"x"']),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, [NOTHING, BOTH, '{"b":"x"}'], [A_ONLY]),
    "dependencies": ({**AB, "dependencies": {"a": ["b"]}}, [NOTHING, BOTH], [A_ONLY]),
    "dependentSchemas": ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, [NOTHING, BOTH], [A_ONLY]),
    "propertyNames of a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        [NOTHING, A_ONLY, '{"a":1,"b":2}'],
        ['{"c":1}', BOTH],
    ),
    "propertyNames of a pattern": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"pattern": "^a"}}},
        ['{"ab":"x"}'],
        ['{"b":1}'],
    ),
    "propertyNames of a length": ({"type": "object", "propertyNames": {"minLength": 2}}, ['{"ab":1}'], [A_ONLY]),
    "unevaluatedProperties": ({**AB, "unevaluatedProperties": False}, [A_ONLY], ['{"c":1}']),
    "unevaluatedItems": ({"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, ["[1]"], ["[1,2]"]),
    "minProperties 1": ({**AB, "minProperties": 1}, [A_ONLY, BOTH, '{"b":"x"}'], [NOTHING]),
    "minProperties that are required": ({**AB, "required": ["a"], "minProperties": 1}, [A_ONLY], [NOTHING]),
    "maxProperties that there are": ({**AB, "additionalProperties": False, "maxProperties": 2}, [BOTH], ['{"c":1}']),
    "a format that is a note": ({**TEXT, "format": "password"}, ['"x"'], []),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_keywords_that_can_be_rewritten_are_enforced(name, vocabulary):
    schema, allowed, forbidden = REWRITTEN[name]
    followed, given = enforceable_schema("guided_json", schema), copy.deepcopy(schema)
    assert [allows(vocabulary, followed.schema, text) for text in allowed] == [True] * len(allowed)
    assert [allows(vocabulary, followed.schema, text) for text in forbidden] == [False] * len(forbidden)
    assert schema == given  # the client's own is not written into


def a_kind(value, **more):
    return {"type": "object", "properties": {"k": {"const": value}}, **more}


DISJOINT = {
    "types": ([INT, TEXT], ["1", '"x"'], ["null"]),
    "values": ([{"const": 1}, {"enum": [2, True]}], ["1", "true"], ["3"]),
    "ranges": ([{**INT, "maximum": 3}, {**INT, "exclusiveMinimum": 3}], ["3", "4"], []),
    "lengths": ([{**TEXT, "maxLength": 1}, {**TEXT, "minLength": 2}], ['""', '"ab"'], []),
    "a property": ([a_kind("x", required=["k"]), a_kind("y", required=["k"])], ['{"k":"y"}'], [NOTHING, '{"k":"z"}']),
    "a property that is in one": ([a_kind("x", required=["k"]), {**AB, "required": ["a"]}], [A_ONLY], [NOTHING]),
    "a property that is not required": ([a_kind("x"), a_kind("y")], ['{"k":"x"}', '{"k":"y"}'], [NOTHING]),
    "references": ([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], ['{"k":"y"}'], [NOTHING]),
    "alternatives": ([{"anyOf": [INT, {"type": "null"}]}, {"type": ["string", "boolean"]}], ["1", "true"], ["[]"]),
}
KINDS = {"x": a_kind("x", required=["k"]), "y": {"$ref": "#/$defs/z"}, "z": a_kind("y", required=["k"])}


@pytest.mark.parametrize("name", DISJOINT)
def test_alternatives_of_which_no_value_fits_two_are_enforced(name, vocabulary):
    alternatives, allowed, forbidden = DISJOINT[name]
    followed = enforceable_schema("guided_json", {"$defs": KINDS, "oneOf": alternatives})
    assert [allows(vocabulary, followed.schema, text) for text in allowed] == [True] * len(allowed)
    assert [allows(vocabulary, followed.schema, text) for text in forbidden] == [False] * len(forbidden)


def test_exactly_one_of_some_properties_is_enforced(vocabulary):
    schema = {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    followed = enforceable_schema("guided_json", schema).schema
    assert allows(vocabulary, followed, A_ONLY) and allows(vocabulary, followed, '{"b":"x"}')
    assert not allows(vocabulary, followed, BOTH) and not allows(vocabulary, followed, NOTHING)


OVERLAPPING = {
    "numbers": [{"type": "integer"}, {"type": "number"}],
    "equal values": [{"const": 1}, {"enum": [1.0, 2]}],
    "ranges": [{**INT, "maximum": 3}, {**INT, "minimum": 3}],
    "empty arrays": [{"type": "array", "items": INT}, {"type": "array", "items": TEXT}],
    "what is no object": [{"properties": {"k": {"const": "x"}}}, {"properties": {"k": {"const": "y"}}}],
    "other properties": [{**AB, "required": ["a"]}, {**AB, "required": ["b"]}],
    "the same twice": [TEXT, TEXT],
    "a value that one adds": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_alternatives_that_may_overlap_are_refused_or_count_as_any_on_request(name):
    schema = {"items": {"oneOf": OVERLAPPING[name]}}
    with pytest.raises(InvalidRequest, match=r"oneOf \(two alternatives may allow the same value\) at \$.items"):
        enforceable_schema("guided_json", schema)
    followed = enforceable_schema("guided_json", schema, strict=False)
    assert [*followed.schema["items"]] == ["anyOf"]


def test_keywords_that_no_answer_can_meet_do_not_matter():
    note = {"type": "integer", "default": {"not": 1}, "x-note": {"uniqueItems": True}, "enum": [{"if": 1}, 3]}
    unused = {"$defs": {"unused": {"not": {}}}, **note}
    assert enforceable_schema("guided_json", unused).schema == unused


def test_proofs_that_would_take_long_are_given_up():
    deep = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(20)} | {"d20": {"type": "object"}}
    with pytest.raises(InvalidRequest, match="oneOf"):
        enforceable_schema("guided_json", {"$defs": deep, "oneOf": [{"$ref": "#/$defs/d0"}] * 2})
    assert enforceable_schema("guided_json", {"oneOf": [a_kind(str(i), required=["k"]) for i in range(50)]})


@pytest.mark.parametrize("given", ["json_schema", "json_object"])
def test_a_response_format_says_whether_all_keywords_matter(given):
    def asked(**strict):
        schema = {"schema": {"type": "array", "uniqueItems": True}, **strict}
        value = {"type": given, "json_schema": schema} if given == "json_schema" else {"type": given, **schema}
        return STRUCTURED_OUTPUT_FIELDS["response_format"]("response_format", value)

    assert asked(strict=False).unenforced == ("uniqueItems at $",)
    for strict in ({}, {"strict": True}, {"strict": None}):
        with pytest.raises(InvalidRequest, match='schema` has keywords .*: uniqueItems at [$]; .* `"strict": false`'):
            asked(**strict)
    with pytest.raises(InvalidRequest, match='strict` must be a boolean, it is "no"'):
        asked(strict="no")


def random_value(vocabulary, matcher, rng):
    """Return a text that the matcher accepts, or None for one that would be long."""
    matcher, token_ids = matcher.deep_copy(), []
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        allowed = [each for each in range(VOCAB_SIZE) if bits[each // 32] >> (each % 32) & 1]
        ends = [each for each in allowed if each in vocabulary.eos_ids]
        if len(token_ids) > 100 or not allowed:
            return None
        closing = [each for each in allowed if each in (*b'"]}', *ends)]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if token_id in vocabulary.eos_ids:
            break
        matcher.consume_tokens([token_id])
        token_ids.append(token_id)
    return b"".join(vocabulary.tokens[each] for each in token_ids)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 100])
def test_texts_that_a_random_schema_lets_through_are_valid(first, vocabulary):
    num_checked = 0
    for seed in range(first, first + 100):
        schema, rng = random_keywords(seed), random.Random(seed)
        try:
            matcher = compiled(vocabulary, enforceable_schema("guided_json", schema).schema)
        except InvalidRequest:
            continue
        if matcher.is_error():
            assert "Unimplemented" not in matcher.get_error() and "oneOf" not in matcher.get_error(), schema
            continue
        valid = jsonschema.Draft202012Validator(schema)
        texts = [random_value(vocabulary, matcher, rng) for _ in range(8)]
        for text in filter(None, texts):
            valid.validate(json.loads(text))
            num_checked += 1
    assert num_checked > 100
