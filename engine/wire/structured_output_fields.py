"""Request fields for structured output, and their checks."""

from __future__ import annotations

from typing import Any

from engine.wire import checks
from engine.wire.checks import Check, boolean, brief, filled_string, json_object, kind_of, refusal, within
from engine.wire.schema import ID, accepts
from engine.wire.structural_tags import structural_tag
from engine.wire.structured_output import (
    Json,
    StructuredOutput,
    check_size,
    grammar,
    json_schema,
    lenient_json_schema,
    regex,
)

MAX_CHOICES = 4096


@accepts(type="array", items={"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
def choice(key: str, value: Any) -> StructuredOutput:
    if not isinstance(value, list) or not value:
        raise refusal(key, "must be a list of strings, it is {value}", "empty" if value == [] else kind_of(value))
    if len(value) > MAX_CHOICES:
        raise refusal(key, "has {value} items, the limit is {limit}", len(value), MAX_CHOICES)
    for index, item in enumerate(value):
        within(key, f"[{index}]", filled_string, item)
    return StructuredOutput(key, "choice", check_size(key, value))


@accepts(type="array", items=ID, minItems=1, maxItems=checks.MAX_TOKEN_IDS)
def token_ids(key: str, value: Any) -> StructuredOutput:
    if not isinstance(value, list):
        raise refusal(key, "must be a list of token ids, it is {value}", kind_of(value))
    token_ids = sorted(set(checks.few_ids(key, value)))
    if not token_ids:
        raise refusal(key, "must hold at least one token id, it is {value}", "empty")
    return StructuredOutput(key, "token_ids", token_ids)


@accepts(type="object")
def response_format(key: str, value: Any) -> StructuredOutput | None:
    """Check OpenAI's field; None stands for unconstrained text."""
    kind = json_object(key, value).get("type")
    if kind == "text":
        return None
    for name in ("schema", "value"):  # as llama.cpp has it; as Hugging Face's client sends a schema
        if kind == "json_object" and value.get(name) is not None:
            return within(key, f".{name}", schema_check(key, "", value), value[name])
    if kind == "json_object":
        return StructuredOutput(key, "json", {"type": "object"})
    if kind == "json_schema":
        schema = within(key, ".json_schema", json_object, value.get("json_schema"))
        return within(key, ".json_schema.schema", schema_check(key, ".json_schema", schema), schema.get("schema"))
    if kind == "structural_tag":
        return structural_tag(key, value)
    kinds = "`text`, `json_object`, `json_schema` or `structural_tag`"
    raise refusal(key, f"must have a `type` of {kinds}, it is {{value}}", brief(kind))


STRUCTURED_OUTPUT_FIELDS: dict[str, Check] = {
    "guided_json": json_schema,
    "guided_regex": regex,
    "guided_choice": choice,
    "guided_grammar": grammar,
    "allowed_token_ids": token_ids,
    "structural_tag": structural_tag,
    "response_format": response_format,
}


def schema_check(key: str, place: str, given: Json) -> Check:
    """Return the check of a schema, which `strict` beside it makes lenient. `place` is the path of `given`."""
    if given.get("strict") is None or within(key, f"{place}.strict", boolean, given["strict"]):
        return json_schema
    return lenient_json_schema
