"""The form that an answer must have, as a request asks for it: a JSON schema, a regular expression, a choice, a
grammar, tokens of a list, tags in free text. What of it can be seen without compiling is checked here, its size too."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.wire import checks
from engine.wire.checks import Check, brief, filled_string, json_object, kind_of, refusal, shown, string, within
from engine.wire.json_schemas import to_follow
from engine.wire.schema import ID, holds

MAX_FORM_BYTES = 128 << 10  # as JSON
MAX_NESTING = 100  # of a schema
MAX_CHOICES = 4096

Json = dict[str, Any]


class Form(NamedTuple):
    field: str  # that asks for it
    kind: str  # json, regex, choice, grammar, token_ids, structural_tag
    value: Any


@holds(type=["object", "string"])
def json_schema(key: str, value: Any) -> Form:
    schema = _object_or_text(key, value)
    _check_size(key, schema)
    if (depth := _depth(schema)) > MAX_NESTING:
        raise refusal(key, "is nested {value} deep, the limit is {limit}", depth, MAX_NESTING)
    return Form(key, "json", to_follow(schema))


@holds(type="string", minLength=1)
def regex(key: str, value: Any) -> Form:
    return Form(key, "regex", _check_size(key, filled_string(key, value)))


@holds(type="string", minLength=1)
def grammar(key: str, value: Any) -> Form:
    return Form(key, "grammar", _check_size(key, filled_string(key, value)))


@holds(type="array", items={"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
def choice(key: str, value: Any) -> Form:
    if not isinstance(value, list) or not value:
        raise refusal(key, "must be a list of strings, it is {value}", "empty" if value == [] else kind_of(value))
    if len(value) > MAX_CHOICES:
        raise refusal(key, "has {value} items, the limit is {limit}", len(value), MAX_CHOICES)
    for item in value:
        within(key, "[]", filled_string, item)
    return Form(key, "choice", _check_size(key, value))


@holds(type="array", items=ID, minItems=2, maxItems=checks.MAX_TOKEN_IDS)
def token_ids(key: str, value: Any) -> Form:
    if not isinstance(value, list):
        raise refusal(key, "must be a list of token ids, it is {value}", kind_of(value))
    token_ids = sorted(set(checks.few_ids(key, value)))
    if len(token_ids) < 2:
        raise refusal(key, "must hold at least {limit} token ids to choose from, it has {value}", len(token_ids), 2)
    return Form(key, "token_ids", token_ids)


@holds(type=["object", "string"])
def structural_tag(key: str, value: Any) -> Form:
    """`structures`, each with `begin`, `end` and a `schema` of what is between, and `triggers` that begin them."""
    tag = _object_or_text(key, value)
    for name in ("structures", "triggers"):
        if not isinstance(tag.get(name), list) or not tag[name]:
            raise refusal(key, "must have a list of `" + name + "`, it is {value}", shown(tag.get(name)))
    for trigger in tag["triggers"]:
        within(key, ".triggers[]", filled_string, trigger)
    structures = [within(key, ".structures[]", _structure, each) for each in tag["structures"]]
    _check_size(key, tag)
    return Form(key, "structural_tag", {"structures": structures, "triggers": tag["triggers"]})


@holds(type="object")
def response_format(key: str, value: Any) -> Form | None:
    """OpenAI's. None: free text."""
    kind = json_object(key, value).get("type")
    if kind == "text":
        return None
    for name in ("schema", "value"):  # as llama.cpp has it; as Hugging Face's client sends a schema
        if kind == "json_object" and value.get(name) is not None:
            return within(key, f".{name}", json_schema, value[name])
    if kind == "json_object":
        return Form(key, "json", {"type": "object"})
    if kind == "json_schema":
        schema = within(key, ".json_schema", json_object, value.get("json_schema"))
        return within(key, ".json_schema.schema", json_schema, schema.get("schema"))
    if kind == "structural_tag":
        return structural_tag(key, value)
    kinds = "`text`, `json_object`, `json_schema` or `structural_tag`"
    raise refusal(key, f"must have a `type` of {kinds}, it is {{value}}", brief(kind))


FORMS: dict[str, Check] = {
    "guided_json": json_schema,
    "guided_regex": regex,
    "guided_choice": choice,
    "guided_grammar": grammar,
    "allowed_token_ids": token_ids,
    "structural_tag": structural_tag,
    "response_format": response_format,
}


def _structure(key: str, value: Any) -> Json:
    structure = json_object(key, value)
    schema = structure.get("schema") or {}
    return {
        "begin": within(key, ".begin", filled_string, structure.get("begin")),
        "schema": within(key, ".schema", json_schema, schema).value,
        "end": within(key, ".end", string, structure.get("end", "")),
    }


def _object_or_text(key: str, value: Any) -> Json:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                "The `{field}` is a text that is no JSON: {value}", field=key, value=str(error)
            ) from None
    return json_object(key, value)


def _check_size(key: str, value: Any) -> Any:
    num_bytes = len(string(key, json.dumps(value, ensure_ascii=False)).encode())
    if num_bytes > MAX_FORM_BYTES:
        raise refusal(key, "has {value} bytes, the limit is {limit}", num_bytes, MAX_FORM_BYTES)
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [item for each in level if isinstance(each, (dict, list)) for item in _items(each)]
    return depth


def _items(value: Json | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
