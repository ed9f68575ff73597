"""Conversion of a checked structural tag (engine/wire/structural_tags.py) to Lark.

Text without an end of its own extends to the end of its tag, a trigger, or the text that must follow. Therefore every
format is written together with the texts that end it, and matches one of them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.text.lark import lark_of_grammar, lark_of_regex, one_of, pattern_of
from engine.wire.structural_tags import is_unlimited

Json = dict[str, Any]
NOTHING = '""'
ANY = "/(?s:.*)/"


class TagWriter:
    """Collects the rules and nested grammars of one structural tag. `options` are the JSON options of llguidance for
    usual and for compact output."""

    def __init__(self, field: str, options: tuple[Json, Json]):
        self._field, self._options = field, options
        self._rules: list[str] = []
        self._others: list[Json] = []
        self._num_names = 0

    def grammars(self, tree: Json) -> list[Json]:
        """Return the grammar of the whole answer, followed by the nested grammars."""
        start = self._write(tree)
        return [{"lark_grammar": "\n".join([f"start: {start}", *self._rules])}, *self._others]

    def _write(self, node: Json, ends: Sequence[str] = ()) -> str:
        """Return the Lark expression of a format, followed by one of `ends` if there are any."""
        write = getattr(self, f"_{node['type']}")
        if ends and not is_unlimited(node):
            return f"{write(node, ())} {one_of(ends)}"
        return write(node, ends)

    def _name(self) -> str:
        self._num_names += 1
        return f"part{self._num_names}"

    def _other(self, grammar: Json) -> str:
        name = self._name()
        self._others.append({"name": name, **grammar})
        return f"@{name}"

    # Formats with an end

    def _const_string(self, node: Json, ends: Sequence[str]) -> str:
        return one_of([node["value"]])

    def _json_schema(self, node: Json, ends: Sequence[str]) -> str:
        options = self._options[node.get("is_compact", False)]
        return self._other({"json_schema": {**node["json_schema"], "x-guidance": options}})

    def _regex(self, node: Json, ends: Sequence[str]) -> str:
        return self._other({"lark_grammar": lark_of_regex(self._field, node["pattern"])})

    def _grammar(self, node: Json, ends: Sequence[str]) -> str:
        return self._other({"lark_grammar": lark_of_grammar(self._field, node["grammar"])})

    def _plus(self, node: Json, ends: Sequence[str]) -> str:
        low, high = node["min"], node["max"]
        return f"({self._write(node['content'])}){{{low},{'' if high < 0 else high}}}" if high else NOTHING

    _star = _repeat = _plus

    def _tags_with_separator(self, node: Json, ends: Sequence[str]) -> str:
        tag = f"({' | '.join(map(self._write, node['tags']))})"
        tags = tag if node["stop_after_first"] else f"{tag} ({one_of([node['separator']])} {tag})*"
        return f"({tags})" if node["at_least_one"] else f"({tags})?"

    def _token(self, node: Json, ends: Sequence[str]) -> str:
        token = node["token"]
        if isinstance(token, int):
            return f"<[{token}]>"
        return token if token.startswith("<") else f"<|{token}|>"

    def _exclude_token(self, node: Json, ends: Sequence[str]) -> str:
        excluded = ",".join(map(str, node["exclude_tokens"]))
        return f"<[^{excluded}]>" if excluded else "<[*]>"

    def _any_tokens(self, node: Json, ends: Sequence[str]) -> str:
        at_most = node["max_tokens"]
        return NOTHING if at_most == 0 else f"{self._exclude_token(node, ())}{{0,{at_most or ''}}}"

    # Formats that may have no end

    def _any_text(self, node: Json, ends: Sequence[str]) -> str:
        bound = node["max_chars"]
        return self._text(ends, node["excludes"], ANY if bound is None else f"/(?s:.{{0,{bound}}})/")

    def _sequence(self, node: Json, ends: Sequence[str]) -> str:
        parts, rest = [], list(node["elements"])
        while rest:
            first = rest.pop(0)
            if not rest or not is_unlimited(first):
                parts.append(self._write(first, () if rest else ends))
                continue
            follows = rest[0].get("value") if rest[0]["type"] == "const_string" else rest[0].get("begin")
            if not isinstance(follows, str) or not follows:
                text = "The `{field}` has {value} without an end: what follows it must begin with a text"
                raise InvalidRequest(text, field=self._field, value=f"`{first['type']}`")
            parts.append(self._write(first, [follows]))
            rest[0] = {**rest[0], "begin": "", "value": ""}
        return f"({' '.join(parts)})"

    def _or(self, node: Json, ends: Sequence[str]) -> str:
        return f"({' | '.join(self._write(each, ends) for each in node['elements'])})"

    def _optional(self, node: Json, ends: Sequence[str]) -> str:
        return f"({self._write(node['content'], ends)} | {one_of(ends) or NOTHING})"

    def _tag(self, node: Json, ends: Sequence[str]) -> str:
        begin, content, end = node["begin"], node["content"], node["end"]
        first = self._token(begin, ()) if isinstance(begin, dict) else one_of([begin])
        if isinstance(end, list):
            own = [each for each in end if each]
            last = one_of(ends) if own else ""
            return f"({first} {self._write(content, own or ends)} {last})"
        if content["type"] == "any_tokens" and isinstance(end["token"], int):
            content = {**content, "exclude_tokens": [*content["exclude_tokens"], end["token"]]}
        return f"({first} {self._write(content)} {self._token(end, ())} {one_of(ends)})"

    def _triggered_tags(self, node: Json, ends: Sequence[str]) -> str:
        excluded: list[str] = node["excludes"]
        by_trigger: dict[str, list[Json]] = {}
        for tag in node["tags"]:
            by_trigger.setdefault(tag["trigger"], []).append({**tag, "begin": tag["begin"][len(tag["trigger"]) :]})
        after_text = [
            f"{self._text([trigger], excluded)} ({' | '.join(map(self._write, tags))})"
            for trigger, tags in by_trigger.items()
        ]
        tag = f"({' | '.join(after_text)})"
        tail = self._text(ends, excluded if ends else [*excluded, *by_trigger])
        more = "" if node["stop_after_first"] else f"{tag}* {tail}"
        if node["at_least_one"]:
            return f"(({' | '.join(map(self._write, node['tags']))}) {more or one_of(ends)})"
        return f"({more or f'{tag} {one_of(ends)} | {tail}'})"

    def _text(self, ends: Sequence[str], excluded: Sequence[str], text: str = ANY) -> str:
        """Return the name of a new rule for free text up to the first of `ends`, or without `ends` for any text."""
        name = self._name()
        terminal = name.upper()
        if others := [each for each in excluded if each not in ends]:
            text = f"{text} & ~/(?s:.*){pattern_of(others)}(?s:.*)/"
        if not ends:
            self._rules.append(f"{terminal}: {text}")
            return terminal
        self._rules += [f"{name}[lazy]: {terminal}", f"{terminal}: {terminal}_TEXT /{pattern_of(ends)}/"]
        self._rules.append(f"{terminal}_TEXT: {text}")
        return name
