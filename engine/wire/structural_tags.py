"""Structural tags: free text with structured parts, as a tree of formats. The format is xgrammar's, which vLLM accepts,
too. The older format with `structures` and `triggers` is converted to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from engine.wire.checks import boolean, brief, filled_string, ids, int_in, json_object, kind_of, refusal, shown, string
from engine.wire.checks import within as at
from engine.wire.schema import accepts
from engine.wire.structured_output import (
    Json,
    StructuredOutput,
    check_depth,
    check_size,
    grammar,
    json_schema,
    object_or_text,
    regex,
)

MAX_REPEATS = 1000  # llguidance expands repetitions
MAX_CHARS = 1 << 16
NAMED_TOKEN = re.compile(r"[^\s<>/\\\"]+|<[^\s<>/\\\"]+>", re.ASCII)
UNLIMITED = ("any_text", "triggered_tags")  # formats that end only where something else begins


@accepts(type=["object", "string"])
def structural_tag(key: str, value: Any) -> StructuredOutput:
    """Check a structural tag: either `format`, a tree of formats, or `structures` and `triggers`, where each structure
    has `begin`, `end` and a `schema` of the content between them."""
    tag = object_or_text(key, value)
    check_depth(key, tag)
    tree = _older(key, tag) if tag.get("format") is None else at(key, ".format", _format, tag["format"])
    check_size(key, tag)
    return StructuredOutput(key, "structural_tag", tree)


def _older(key: str, tag: Json) -> Json:
    for name in ("structures", "triggers"):
        if not isinstance(tag.get(name), list) or not tag[name]:
            text = "must have a `format`, or a list of `" + name + "`, it is {value}"
            raise refusal(key, text, shown(tag.get(name)))
    triggers = [at(key, ".triggers[]", filled_string, each) for each in tag["triggers"]]
    tags = [at(key, ".structures[]", _structure, each) for each in tag["structures"]]
    return _triggered(key, {}, triggers, tags)


def _structure(key: str, value: Any) -> Json:
    structure = json_object(key, value)
    schema = at(key, ".schema", _schema, structure.get("schema") or {})
    return {
        "type": "tag",
        "begin": at(key, ".begin", filled_string, structure.get("begin")),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": [at(key, ".end", string, structure.get("end", ""))],
    }


def _format(key: str, value: Any) -> Json:
    kind = json_object(key, value).get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise refusal(key, "must have a `type` of {limit}, it is {value}", brief(kind), [*FORMATS])
    return {"type": kind, **FORMATS[kind](key, value)}


def _json_schema(key: str, node: Json) -> Json:
    style, schema = node.get("style", "json"), node.get("json_schema")
    if style != "json":
        raise refusal(key, "has the `style` {value}, only `json` is supported", brief(style))
    if node.get("excludes"):
        raise refusal(key, "has `excludes`, which only `any_text` may have, {value}", shown(node["excludes"]))
    checked = at(key, ".json_schema", _schema, {} if schema is True else schema)
    is_compact = {} if node.get("max_whitespace_cnt") is None else {"is_compact": True}
    return {"json_schema": checked, **is_compact}


def _schema(key: str, value: Any) -> Json:
    """Check a JSON schema. Repeated names cannot be found beside text that is no JSON."""
    checked: Json = json_schema(key, value).value
    if "patternProperties" in json.dumps(checked):
        raise refusal(key, "has `patternProperties`: that no name comes twice cannot be enforced in a structural tag")
    return checked


def _any_text(key: str, node: Json) -> Json:
    if node.get("max_tokens") is not None:
        text = "has `max_tokens` {value}, which is not supported: `max_chars` is"
        raise refusal(key, text, brief(node["max_tokens"]))
    max_chars = node.get("max_chars")
    checked = None if max_chars is None else at(key, ".max_chars", int_in(0, MAX_CHARS), max_chars)
    return {"excludes": _texts(key, node, "excludes"), "max_chars": checked}


def _elements(key: str, node: Json) -> Json:
    return {"elements": _list(key, node, "elements", _format)}


def _content(key: str, node: Json) -> Json:
    return {"content": at(key, ".content", _format, node.get("content"))}


def _repeated(key: str, node: Json) -> Json:
    """Check a repetition. Its content must have an end: otherwise repetitions could not be separated."""
    content = _content(key, node)["content"]
    if is_unlimited(content):
        raise refusal(key, "repeats {value}, which has no end: put it into a `tag`", content["type"])
    if node["type"] != "repeat":
        low, high = (1 if node["type"] == "plus" else 0), -1
    else:
        low = at(key, ".min", int_in(0, MAX_REPEATS), node.get("min"))
        high = at(key, ".max", int_in(-1, MAX_REPEATS), node.get("max"))
        if 0 <= high < low:
            raise refusal(key, "has `max` {value}, less than `min`, which is {limit}", high, low)
    return {"content": content, "min": low, "max": high}


def _tag(key: str, node: Json) -> Json:
    begin, end = node.get("begin"), node.get("end")
    is_token, ends = isinstance(end, dict), end if isinstance(end, list) else [end]
    return {
        "begin": at(key, ".begin", _token if isinstance(begin, dict) else string, begin),
        "content": at(key, ".content", _format, node.get("content")),
        "end": at(key, ".end", _token, end) if is_token else [at(key, ".end", string, each) for each in ends],
    }


def _triggered_tags(key: str, node: Json) -> Json:
    triggers, tags = _texts(key, node, "triggers"), _list(key, node, "tags", _format_of_tag)
    return _triggered(key, node, triggers, tags)


def _triggered(key: str, node: Json, triggers: Sequence[str], tags: Sequence[Json]) -> Json:
    """Assign each tag the shortest trigger that it begins with."""
    found = []
    for tag in tags:
        begin = tag["begin"]
        matching = [each for each in triggers if isinstance(begin, str) and begin.startswith(each)]
        if not matching:
            raise refusal(key, "has a structure that none of its triggers begins: {value}", shown(begin))
        found.append({**tag, "trigger": min(matching, key=len)})  # the shortest one is recognized first
    flags = {name: at(key, f".{name}", boolean, node.get(name) or False) for name in FLAGS}
    return {"type": "triggered_tags", "tags": found, "excludes": _texts(key, node, "excludes"), **flags}


def _separated(key: str, node: Json) -> Json:
    flags = {name: at(key, f".{name}", boolean, node.get(name) or False) for name in FLAGS}
    separator = at(key, ".separator", string, node.get("separator"))
    return {"tags": _list(key, node, "tags", _format_of_tag), "separator": separator, **flags}


def _dispatch(key: str, node: Json) -> Json:
    """Convert to triggered tags without an end."""
    rules = _list(key, node, "rules", _rule)
    loop = at(key, ".loop", boolean, True if node.get("loop") is None else node["loop"])
    flags = {"at_least_one": False, "stop_after_first": not loop}
    return {"type": "triggered_tags", "tags": rules, "excludes": _texts(key, node, "excludes"), **flags}


def _rule(key: str, value: Any) -> Json:
    if not isinstance(value, list) or len(value) != 2:
        raise refusal(key, "must be a text and a format, it is {value}", shown(value))
    pattern = at(key, "[0]", filled_string, value[0])
    content = at(key, "[1]", _format, value[1])
    return {"type": "tag", "begin": pattern, "trigger": pattern, "content": content, "end": [""]}


def _format_of_tag(key: str, value: Any) -> Json:
    """Check a tag in a list of tags, where `type` is optional."""
    return _format(key, {"type": "tag", **json_object(key, value)})


def _token(key: str, value: Any) -> Json:
    """Check a token, given by its id, or by its text if it is a special token."""
    token = json_object(key, value).get("token")
    if isinstance(token, str) and NAMED_TOKEN.fullmatch(token):
        return {"type": "token", "token": token}
    return {"type": "token", "token": at(key, ".token", ids, [token])[0]}


def _tokens(key: str, node: Json) -> Json:
    max_tokens = node.get("max_tokens")
    excluded = node.get("exclude_tokens") or []
    return {
        "exclude_tokens": at(key, ".exclude_tokens", ids, excluded) if excluded else [],
        "max_tokens": None if max_tokens is None else at(key, ".max_tokens", int_in(0, 2**31 - 1), max_tokens),
    }


FLAGS = ("at_least_one", "stop_after_first")
FORMATS: dict[str, Callable[[str, Json], Json]] = {
    "const_string": lambda key, node: {"value": at(key, ".value", string, node.get("value"))},
    "json_schema": _json_schema,
    "regex": lambda key, node: {"pattern": at(key, ".pattern", regex, node.get("pattern")).value},
    "grammar": lambda key, node: {"grammar": at(key, ".grammar", grammar, node.get("grammar")).value},
    "any_text": _any_text,
    "sequence": _elements,
    "or": _elements,
    "optional": _content,
    "plus": _repeated,
    "star": _repeated,
    "repeat": _repeated,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _separated,
    "dispatch": _dispatch,
    "token": _token,
    "exclude_token": _tokens,
    "any_tokens": _tokens,
}


def is_unlimited(node: Json) -> bool:
    """Return whether a checked format has no end of its own."""
    kind = node["type"]
    if kind in ("sequence", "or"):
        return any(map(is_unlimited, node["elements"][-1:] if kind == "sequence" else node["elements"]))
    if kind == "tag":
        return not any(node["end"]) and is_unlimited(node["content"])
    return is_unlimited(node["content"]) if kind == "optional" else kind in UNLIMITED


def _list(key: str, node: Json, name: str, check: Callable[[str, Any], Any]) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list) or not value:
        raise refusal(key, "must have a list of `" + name + "`, it is {value}", shown(value))
    return [at(key, f".{name}[{index}]", check, each) for index, each in enumerate(value)]


def _texts(key: str, node: Json, name: str) -> list[str]:
    value = node.get(name) or []
    if not isinstance(value, list):
        raise refusal(key, "must have a list of texts as `" + name + "`, it is {value}", kind_of(value))
    return [at(key, f".{name}[{index}]", filled_string, each) for index, each in enumerate(value)]
