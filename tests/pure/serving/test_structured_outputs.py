"""Tests of structured output, from the fields of a request to the grammar that the engine gets."""

import json
from dataclasses import replace

import pytest

from engine.errors import InvalidRequest
from engine.serving.grammar_builder import GrammarBuilder
from engine.text.tokenizer import Tokenizer
from engine.wire import parse_request
from engine.wire.structured_output_fields import StructuredOutput
from tests.byte_tokenizer import EOS_ID, write_tokenizer
from tests.pure.service_fakes import an_input_processor

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
LONE = "\ud800"  # a surrogate without its other half: JSON can say it, UTF-8 cannot
WITH_LONE = [{"enum": [LONE]}, {"properties": {LONE: {}}}, {"description": LONE}, {"anyOf": [{"pattern": [LONE]}]}]
TAG = {"structures": [{"begin": "<n>", "schema": {"type": "null"}, "end": "</n>"}], "triggers": ["<n"]}

PART = {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "null"}}}
FORMAT = {"type": "triggered_tags", "triggers": ["<n"], "tags": [{**PART, "end": "</n>"}]}
FLAGS = {"at_least_one": False, "stop_after_first": False}
TREE = {"type": "triggered_tags", "tags": [{**PART, "end": ["</n>"], "trigger": "<n"}], "excludes": [], **FLAGS}


def parsed(**fields):
    return parse_request({"req_id": "a", "text": "hi", **fields})


def refusal(**fields):
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    return caught.value


def asked(tokenizer, options=None, **fields):
    """Return the field and the grammar that the engine gets."""
    processor = an_input_processor(tokenizer, 330, (200, 100, 100), grammar_builder=GrammarBuilder(**(options or {})))
    return processor.process(parsed(**fields)).sampling.structured_output


@pytest.mark.parametrize(
    ("field", "value", "kind", "given"),
    [
        ("guided_json", SCHEMA, "json", CLOSED),
        ("guided_json", json.dumps(SCHEMA), "json", CLOSED),
        ("guided_regex", "a+", "regex", "a+"),
        ("guided_choice", ["a", "b"], "choice", ["a", "b"]),
        ("guided_grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("allowed_token_ids", [7, 3, 7], "token_ids", [3, 7]),
        ("allowed_token_ids", [7], "token_ids", [7]),
        ("structural_tag", TAG, "structural_tag", TREE),
        ("structural_tag", json.dumps(TAG), "structural_tag", TREE),
        ("response_format", {"type": "structural_tag", **TAG}, "structural_tag", TREE),
        ("response_format", {"type": "structural_tag", "format": FORMAT}, "structural_tag", TREE),
        ("response_format", {"type": "json_object"}, "json", {"type": "object"}),
        ("response_format", {"type": "json_object", "schema": {"type": "array"}}, "json", {"type": "array"}),
        ("response_format", {"type": "json_object", "value": {"type": "array"}}, "json", {"type": "array"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "json", CLOSED),
    ],
)
def test_every_field_of_structured_output(field, value, kind, given):
    assert parsed(**{field: value}).structured_output == StructuredOutput(field, kind, given)


def test_free_text_has_no_grammar():
    assert parsed(response_format={"type": "text"}).structured_output is None
    assert parsed(response_format={"type": "text"}, guided_regex="a").structured_output == StructuredOutput(
        "guided_regex", "regex", "a"
    )


def test_objects_have_the_properties_that_are_named_and_no_others_unless_that_may_forbid_too_much():
    def left(schema):
        return parsed(guided_json=schema).structured_output.value == schema

    inner = {"$defs": {"a": SCHEMA}, "properties": {"b": {"items": {"anyOf": [SCHEMA, {"allOf": [SCHEMA]}]}}}}
    given = json.dumps(inner)
    assert parsed(guided_json=inner).structured_output.value == {
        "$defs": {"a": CLOSED},
        "properties": {"b": {"items": {"anyOf": [CLOSED, {"allOf": [CLOSED]}]}}},
        "additionalProperties": False,
    }
    assert json.dumps(inner) == given  # the client's own is not written into
    assert left({"type": "object"}) and left({**SCHEMA, "additionalProperties": True})
    assert left({**SCHEMA, "required": ["a", "b"]}) and left({**SCHEMA, "required": ["a"], "minProperties": 2})
    assert left({"allOf": [SCHEMA, {"properties": {"b": {}}}]}) and left(
        {**SCHEMA, "anyOf": [{"properties": {"b": {}}}]}
    )
    assert left({"$defs": {"a": SCHEMA}, "properties": {"b": {}}, "$ref": "#/$defs/a"})
    assert left({"properties": {"a": {"const": {"properties": {}}}}, "additionalProperties": {}, "required": [[]]})


def test_formats_that_the_standard_does_not_know_are_notes():
    def asks_for(name):
        return parsed(guided_json={"items": {"type": "string", "format": name}}).structured_output.value

    assert asks_for("password") == {"items": {"type": "string"}}
    assert asks_for("uri") == {"items": {"type": "string", "format": "uri"}}
    assert parsed(guided_json={"properties": {"format": {"enum": [1]}}}).structured_output.value["properties"] == {
        "format": {"enum": [1]}
    }


@pytest.mark.parametrize("bound", [-(2**63), 2**63 - 1, 2**64 - 1])
def test_the_limits_of_64_bit_integers_are_no_bounds(bound):
    schema = {"properties": {"a": {"type": "integer", "minimum": bound}, "minimum": {"type": "integer", "maximum": 5}}}
    without = {"properties": {"a": {"type": "integer"}, "minimum": {"type": "integer", "maximum": 5}}}
    assert parsed(guided_json={**schema, "additionalProperties": True}).structured_output.value["properties"] == {
        **without["properties"]
    }
    elsewhere = {"$ref": "#/x/y", "x": {"y": {"exclusiveMaximum": bound, "const": {"maximum": bound}}}}
    assert parsed(guided_json=elsewhere).structured_output.value == {
        "$ref": "#/x/y",
        "x": {"y": {"const": {"maximum": bound}}},
    }
    lark = f'start: %json {{"type": "integer", "maximum": {bound}}} "%json" %json {{"maximum": 3}} b\nb: "b"'
    expected = 'start: %json {"type": "integer"} "%json" %json {"maximum": 3} b\nb: "b"'
    assert parsed(guided_grammar=lark).structured_output.value == expected
    tag = {"structures": [{"begin": "<n>", "schema": {"minimum": bound}, "end": ""}], "triggers": ["<n"]}
    assert parsed(structural_tag=tag).structured_output.value["tags"][0]["content"]["json_schema"] == {}


@pytest.mark.parametrize("bound", [2**53 + 1, -(2**53) - 1, 2**63, -(2**63) + 1, 1e300, float("-inf"), 10**400])
def test_other_bounds_beyond_2_to_the_53_are_refused(bound):
    error = refusal(guided_json={"anyOf": [{"type": "integer", "exclusiveMinimum": bound}]})
    assert (error.field, error.limit) == ("guided_json", 2**53)
    assert str(error).startswith(f"The `guided_json` sets `exclusiveMinimum` to {str(bound)[:40]}; bounds beyond +-900")
    lark = f"start: %json {json.dumps({'maximum': bound})}"
    assert refusal(guided_grammar=lark).field == "guided_grammar"
    exact = {"type": "integer", "minimum": -(2**53), "maximum": 2**53}
    assert parsed(guided_json=exact).structured_output.value == exact


def nested(depth):
    return {"items": nested(depth - 1)} if depth > 1 else {"type": "null"}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("guided_json", [1], "`guided_json` must be an object, it is a list"),
        ("guided_json", "{", "`guided_json` is a text that is no JSON"),
        ("guided_json", "[" * 100_000, "`guided_json` is a text that is no JSON"),
        ("guided_json", "3", "`guided_json` must be an object, it is a number"),
        ("guided_json", nested(100), "`guided_json` is nested 101 deep, the limit is 100"),
        ("guided_json", {"const": "x" * 131072}, "`guided_json` has 131085 bytes, the limit is 131072"),
        ("guided_regex", "x" * 131071, "`guided_regex` has 131073 bytes, the limit is 131072"),
        ("guided_regex", "", "`guided_regex` in input parameters cannot be empty"),
        ("guided_choice", "a", "`guided_choice` must be a list of strings, it is a string"),
        ("guided_choice", [], "`guided_choice` must be a list of strings"),
        ("guided_choice", ["a", 1], "`guided_choice[1]` in input parameters must be a string, it is a number"),
        ("guided_choice", ["a"] * 4097, "`guided_choice` has 4097 items, the limit is 4096"),
        ("guided_grammar", 5, "`guided_grammar` in input parameters must be a string"),
        ("allowed_token_ids", [], "`allowed_token_ids` must hold at least one token id, it is empty"),
        ("allowed_token_ids", 5, "`allowed_token_ids` must be a list of token ids, it is a number"),
        ("allowed_token_ids", [-1], "`allowed_token_ids` must hold token ids, -1 is none"),
        ("allowed_token_ids", [1] * 1025, "`allowed_token_ids` has 1025 items, the limit is 1024"),
        ("structural_tag", {"structures": []}, "`structural_tag` must have a `format`, or a list of `structures`, it"),
        ("structural_tag", {**TAG, "triggers": None}, "must have a `format`, or a list of `triggers`, it is null"),
        ("structural_tag", {**TAG, "structures": [{"begin": ""}]}, "`structural_tag.structures[].begin` in input"),
        ("response_format", {"type": "yaml"}, "`response_format` must have a `type` of `text`, `json_object`, `json"),
        ("response_format", {"type": "json_schema"}, "`response_format.json_schema` must be an object, it is null"),
    ],
)
def test_an_invalid_grammar_is_refused_by_name(field, value, says):
    error = refusal(**{field: value})
    assert says in str(error)
    assert error.field == field


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        *(("guided_json", schema, "") for schema in WITH_LONE),
        *(("guided_json", json.dumps(schema), "") for schema in WITH_LONE),
        ("guided_regex", LONE, ""),
        ("guided_choice", ["a", LONE], "[1]"),
        ("guided_grammar", f'start: "{LONE}"', ""),
        ("structural_tag", TAG | {"triggers": [LONE]}, ".triggers[]"),
        ("structural_tag", TAG | {"structures": [{"begin": "<n>", "end": LONE}]}, ".structures[].end"),
        ("structural_tag", TAG | {"structures": [{"begin": "<n>", "schema": {"const": LONE}}]}, ".structures[].schema"),
        ("response_format", {"type": "json_object", "schema": {"const": LONE}}, ".schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"const": LONE}}}, ".json_schema.schema"),
    ],
)
def test_every_text_of_a_grammar_is_valid_unicode(field, value, place):
    error = refusal(**{field: value})
    says = f"The `{field}{place}` in input parameters must be valid Unicode, it has a lone surrogate"
    assert (error.field, str(error)) == (field, says)


def test_the_longest_and_the_deepest_grammar_are_accepted():
    assert parsed(guided_regex="x" * 131070).structured_output
    assert parsed(guided_json=nested(99)).structured_output


def test_options_that_exclude_one_another_are_refused():
    assert str(refusal(guided_json=SCHEMA, guided_regex="a")) == (
        "Only one of ('guided_json', 'guided_regex') should be set"
    )
    error = refusal(guided_json=SCHEMA, min_dec_len=3)
    assert (error.field, error.value) == ("min_dec_len", 3)
    assert "cannot be combined with `guided_json`, whose grammar ends the answer" in str(error)


def test_structured_output_needs_a_token_that_ends_the_answer(tokenizer):
    with pytest.raises(InvalidRequest, match="`guided_regex` needs an end-of-sequence token") as caught:
        asked(tokenizer, guided_regex="a", ignore_eos=True)
    assert caught.value.field == "guided_regex"
    assert asked(tokenizer, guided_regex="a", ignore_eos=True, eos_token_ids=[EOS_ID])
    assert asked(tokenizer, allowed_token_ids=[7], ignore_eos=True) == ("allowed_token_ids", "[7]")


def test_tokens_that_the_model_does_not_have_cannot_be_the_only_ones(tokenizer):
    with pytest.raises(InvalidRequest, match="`allowed_token_ids` holds 100000, the vocabulary has"):
        asked(tokenizer, {}, allowed_token_ids=[1, 100_000])


def test_errors_found_without_compiling_name_the_field(tokenizer):
    with pytest.raises(InvalidRequest, match="The `guided_grammar` cannot be read: Rule 'b' not found") as caught:
        asked(tokenizer, guided_grammar="root ::= b")
    assert caught.value.field == "guided_grammar"
    with pytest.raises(InvalidRequest, match="`guided_grammar` cannot be read: Expected name .* '{'"):
        asked(tokenizer, guided_grammar="root ::= {")
    text = 'The `structural_tag` has a structure that none of its triggers begins: "<n>"'
    with pytest.raises(InvalidRequest, match=text) as caught:
        asked(tokenizer, structural_tag={**TAG, "triggers": ["<m"]})
    assert caught.value.field == "structural_tag"


def test_the_setting_forbids_whitespace_unless_the_request_says_otherwise(tokenizer):
    def options(settings, **fields):
        field, structured_output = asked(tokenizer, settings, guided_json=SCHEMA, **fields)
        assert field == "guided_json"
        [grammar] = json.loads(structured_output)["grammars"]
        return grammar["json_schema"]["x-guidance"]

    compact, loose = options({"any_whitespace": False}), options({})
    assert compact == {"whitespace_flexible": False}
    assert "whitespace_pattern" in loose
    assert options({"any_whitespace": False}, guided_decoding_disable_any_whitespace=False) == loose
    assert options({}, guided_decoding_disable_any_whitespace=True) == compact


def test_structured_output_waits_for_the_end_of_the_reasoning_if_there_is_one(tokenizer):
    apart = {"reasoning": "may"}

    def waits(options, **fields):
        return "thought" in asked(tokenizer, options, guided_regex="a", **fields)[1]

    assert waits(apart)
    assert not waits({})
    assert not waits(apart, apply_chat_template=False)
    closed = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
    kept = {"chat_template_kwargs": {"add_generation_prompt": False}}
    assert waits(apart, text=None, messages=closed, **kept)  # the turn has been closed, too
    closing = tokenizer.encode("<think>\n\n</think>\n\n")
    assert not waits(apart, input_ids=[1, *closing])


OPENED, CLOSED_AGAIN = "{{ '<think>\n' }}", "{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}"


@pytest.mark.parametrize(
    ("end", "server", "usually", "without"),
    [
        ("", "may", "may", "never"),  # of a model that does not think, and a template that knows no flag
        ("", "does", "does", "never"),
        (OPENED, "may", "does", "does"),  # of models that think always
        (OPENED, "does", "does", "does"),
        (CLOSED_AGAIN, "may", "may", "never"),
        (CLOSED_AGAIN, "does", "does", "never"),
        ("{{ '</think>' }}", "does", "never", "never"),  # by a flag that is called otherwise
    ],
)
def test_the_end_of_the_prompt_says_whether_a_model_thinks_and_else_its_client_and_the_setting(
    tmp_path, end, server, usually, without
):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}" + end)
    processor = an_input_processor(
        Tokenizer.load(tmp_path), 330, (200, 100, 100), grammar_builder=GrammarBuilder(reasoning=server)
    )
    for flag, expected in ((True, usually), (False, without)):
        prompt = processor.process(parsed(guided_regex="a", chat_template_kwargs={"enable_thinking": flag}))
        assert (prompt.reasoning, "thought" in prompt.sampling.structured_output[1]) == (expected, expected != "never")
    assert replace(processor, grammar_builder=GrammarBuilder()).process(parsed(guided_regex="a")).reasoning is None
