"""Tools of a chat: validated, passed to the chat template, and turned into a grammar if a call is forced or the text is
structured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import wire
from engine.errors import InvalidRequest, escape_braces
from gateway.openai.output_syntax import FORMATS, OutputSyntax, ToolCallFormat
from gateway.openai.unsupported_fields import refuse_more

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16  # parallel calls in one forced answer
# Arguments are written in one line with a space after `:` and `,`, as chat templates show them to the model.
ONE_LINE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
LENIENT = {**ONE_LINE, "lenient": True}  # keywords that cannot be enforced are ignored
MODES = ("none", "auto", "required")
RESPONSE_FORMAT = "response_format"  # field for the format of text that is not a call
check_object, check_string, check_bool = (
    wire.FIELDS[name].check for name in ("chat_template_kwargs", "text", "stream")
)


@dataclass(frozen=True)
class Tools:
    """Tools of one chat. Without `calls` its answers contain text only."""

    tools: Sequence[Mapping[str, Any]] = ()  # passed to the chat template
    calls: ToolCallFormat | None = None
    forced: Sequence[Mapping[str, Any]] = ()  # functions of which at least one must be called
    is_parallel: bool = True

    @property
    def names(self) -> Collection[str]:
        """Return the names of the tools, if only they distinguish a call from text."""
        return [tool["function"]["name"] for tool in self.tools] if self.calls and self.calls.bare else ()

    def fields(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of the model's request, beside its other `options`, and what of the schemas of functions is
        not enforced in them."""
        if not self.tools:
            return {}, ()
        assert self.calls
        unenforced: tuple[str, ...] = ()
        kwargs = {**options.get("chat_template_kwargs", {}), "tools": self.tools}
        fields: dict[str, Any] = {"chat_template_kwargs": kwargs}
        if self.calls.has_special_token:
            fields["skip_special_tokens"] = options.get("skip_special_tokens", False)
        output_fields = [name for name in wire.STRUCTURED_OUTPUT_FIELDS if name in options]
        if self.forced and output_fields not in ([], [RESPONSE_FORMAT]):
            raise InvalidRequest(
                "`{field}` cannot be combined with a `tool_choice` that forces a call", field=output_fields[0]
            )
        if self.forced:
            fields["guided_grammar"], unenforced = self._grammar(self.calls, self.forced)
        elif output_fields == [RESPONSE_FORMAT] and self.calls.is_enforceable:
            words = wire.STRUCTURED_OUTPUT_FIELDS[RESPONSE_FORMAT](RESPONSE_FORMAT, options[RESPONSE_FORMAT])
            if words and words.kind == "json":
                functions = [tool["function"] for tool in self.tools]
                fields["guided_grammar"], unenforced = self._grammar(self.calls, functions, words)
        if "guided_grammar" in fields and output_fields:
            fields[RESPONSE_FORMAT] = {"type": "text"}  # the grammar enforces it instead
        return fields, unenforced

    def _grammar(
        self, calls: ToolCallFormat, known: Sequence[Mapping[str, Any]], words: wire.StructuredOutput | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Return the grammar of calls of these functions, or words of this form, and what is not enforced of schemas.
        Where the model may answer in words, only a function that asks for it (`strict`) has all of its schema."""
        unenforced: list[str] = []
        before, between, after = map(_quoted, calls.forced)
        more = f"({between} call){{0,{MAX_FORCED_CALLS - 1}}}" if self.is_parallel else ""
        functions = [f"function{index}" for index in range(len(known))]
        or_words = f"words | {calls.marker} " if words else ""
        rules = [f"start: {or_words}{before} call {more} {after}", f"call: {' | '.join(functions)}"]
        for rule, function in zip(functions, known, strict=True):
            around = [(_quoted(before), _quoted(after)) for before, after in calls.around(function["name"])]
            is_strict = function.get("strict") is True if words else function.get("strict") is not False
            arguments = _arguments(function, is_strict)
            unenforced += [f"{wire.shown(function['name'])}: {each}" for each in arguments.unenforced]
            schema = _in_one_line(arguments.value, ONE_LINE if is_strict else LENIENT)
            ways = " | ".join(f"{before} {rule}_arguments {after}" for before, after in around)
            label = _label(f"function {wire.shown(function['name'])}")
            rules += [f"{rule}: {ways}", f"{rule}_arguments: %json {schema} {label}"]
        if words:
            rules.append(f"words: %json {_in_one_line(words.value, ONE_LINE)} {_label(RESPONSE_FORMAT)}")
        return "\n".join(rules), tuple(unenforced)


def read_tools(body: Mapping[str, Any], syntax: OutputSyntax) -> Tools:
    """Return the tools of a chat. Raise InvalidRequest."""
    given = body.get("tools")
    if given is None or given == []:
        if body.get("tool_choice", "none") != "none":
            text = "`{field}` is {value}, which needs `tools`"
            raise InvalidRequest(text, field="tool_choice", value=wire.shown(body["tool_choice"]))
        check_bool("parallel_tool_calls", body.get("parallel_tool_calls", True))
        return Tools()
    choice, tools = _allowed(body.get("tool_choice", "auto"), _checked_tools(given))
    is_parallel = check_bool("parallel_tool_calls", body.get("parallel_tool_calls", True))
    if choice == "none":
        return Tools()
    forced = _forced(choice, [tool["function"] for tool in tools])
    calls = syntax.calls
    if forced and not (calls and calls.is_enforceable):
        calls = FORMATS["llama3_json"]
    if calls is None:
        text = (
            "`{field}` are not known to the chat template of this model: only a `tool_choice` that forces a call works"
        )
        raise InvalidRequest(f"{text}, or TOOL_CALL_PARSER says how the model writes them", field="tools")
    is_named = isinstance(choice, dict)  # a named function is called once, as at OpenAI
    return Tools(tools, calls, forced, is_parallel and not is_named)


def _checked_tools(given: Any) -> list[dict[str, Any]]:
    tools = wire.objects("tools", given)
    refuse_more("tools", len(tools), MAX_TOOLS)
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            text = f"`{{field}}[{at}]` must be of type `function`, it is {{value}}"
            raise InvalidRequest(text, field="tools", value=wire.shown(tool))
        function = wire.within("tools", f"[{at}].function", check_object, tool.get("function"))
        name = check_function(function, f"[{at}].function")
        _arguments(function, False, f"[{at}]")
        if name in names:
            text = "`{field}` has more than one with the name {value}: the arguments of a call could not be assigned"
            raise InvalidRequest(text, field="tools", value=wire.shown(name))
        names.add(name)
    return tools


def check_function(function: Mapping[str, Any], place: str) -> str:
    """Return the name of a function. `place` is its path in `tools`. Raise InvalidRequest."""
    for key, check in (("description", check_string), ("strict", check_bool)):
        if function.get(key) is not None:
            wire.within("tools", f"{place}.{key}", check, function[key])
    return wire.within("tools", f"{place}.name", check_string, function.get("name"))


def _allowed(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return the choice and the tools.

    OpenAI's `allowed_tools` names some of the tools and how to choose among them.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools
    allowed = check_object("tool_choice", choice.get("allowed_tools"))
    mode, wanted = allowed.get("mode"), allowed.get("tools")
    names = [_name(each) for each in wanted] if isinstance(wanted, list) else []
    named = [tool for tool in tools if _name(tool) in names]
    if mode not in ("auto", "required") or not named or len(named) < len(names):
        text = "`{field}` must have a `mode` of {limit} and name some of the `tools`, it has {value}"
        raise InvalidRequest(text, field="tool_choice", value=wire.shown(allowed), limit=["auto", "required"])
    return mode, named


def _name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _forced(choice: Any, functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if choice == "required":
        return functions
    if choice == "auto":
        return []
    if named := [function for function in functions if function["name"] == _name(choice)]:
        return named
    text = "`{field}` must be one of {limit} or name one of the `tools`, it is {value}"
    raise InvalidRequest(text, field="tool_choice", value=wire.shown(choice), limit=list(MODES))


def _parameters(function: Mapping[str, Any]) -> Any:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _arguments(function: Mapping[str, Any], is_strict: bool, place: str = "[]") -> wire.StructuredOutput:
    """Return the form of a function's arguments. Raise InvalidRequest that names the function."""
    check = wire.json_schema if is_strict else wire.lenient_json_schema
    try:
        return wire.within("tools", f"{place}.function.parameters", check, _parameters(function))
    except InvalidRequest as error:
        named = f"Function {escape_braces(wire.shown(function['name']))}: {error.text}"
        raise InvalidRequest(named, **error.cause) from None


def _in_one_line(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options})


def _label(name: str) -> str:
    """Return the comment that an error of the model has instead of the rule (engine/text/compile_errors.py)."""
    return f"// {json.dumps(name)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def with_parsed_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message whose tool calls have objects as arguments. Clients send text; chat templates expect objects.
    `index` is its place in the messages."""
    if not (calls := message.get("tool_calls")):
        return message
    if not isinstance(calls, list) or not all(_name(call) for call in calls):
        place = f"`{{field}}[{index}].tool_calls`"
        text = f"{place} must be a list of calls, each of a `function` with a `name`, it is {{value}}"
        raise InvalidRequest(text, field="messages", value=wire.shown(calls))
    return {**message, "content": message.get("content") or "", "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        return call
