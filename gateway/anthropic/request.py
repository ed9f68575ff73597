"""Translation of a message request into a chat completion request.

Fields that chats have too are validated there, the others here.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from gateway.anthropic.fields import CHAT_FIELDS, REFUSED
from gateway.openai.output_syntax import OutputSyntax
from gateway.openai.request import (
    CompletionRequest,
    check_bool,
    check_object,
    check_positive,
    check_string,
)
from gateway.openai.request import parse as parse_chat
from gateway.openai.tools import check_function
from gateway.openai.unsupported_fields import UNSUPPORTED_IN_BLOCKS, check_parts, refuse, refuse_any

Json = dict[str, Any]
# Of the chat's fields, those with another name here
CLIENT_NAMES = {
    **{"stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config"},
    **dict.fromkeys(("reasoning_max_tokens", "thinking_token_budget"), "thinking"),
    "max_completion_tokens": "max_tokens",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ROLES = ("user", "assistant", "system")
KINDS = ("enabled", "adaptive", "disabled")  # of thinking


def parse(body: Json, model_name: str, syntax: OutputSyntax) -> CompletionRequest:
    """Return the validated request. Raise InvalidRequest, by the chat's names of the fields."""
    body = {name: value for name, value in body.items() if value is not None}
    refuse(body, is_chat=True)
    refuse_any(body, {**UNSUPPORTED_IN_BLOCKS, **REFUSED})
    if "max_tokens" not in body:
        raise InvalidRequest("`{field}` is missing", field="max_tokens")
    check_positive("max_tokens", body["max_tokens"])
    chat = {**chat_of(body), **{name: body[name] for name in CHAT_FIELDS if name in body}}
    chat.setdefault("request_id", f"msg_{uuid.uuid4().hex}")
    chat["chat_template_kwargs"] = _thinking(body, syntax, chat)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tool_choice" in body:
        chat |= _choice(check_object("tool_choice", body["tool_choice"]), chat.get("tools", []))
    form_name, of_output = _output(body)
    completion = parse_chat({**chat, **of_output}, True, model_name, syntax)
    return replace(completion, names={**completion.names, "response_format": form_name})


def chat_of(body: Json) -> Json:
    """Return the fields that determine the prompt: the messages, the tools, and whether the answer continues the last
    message.
    """
    chat: Json = {"messages": _messages(body)}
    if body.get("tools"):
        chat["tools"] = [_tool(each, f"[{at}]") for at, each in enumerate(wire.objects("tools", body["tools"]))]
    if chat["messages"] and chat["messages"][-1].get("role") == "assistant":
        chat["continue_final_message"] = True
    return chat


def _messages(body: Json) -> list[Json]:
    if "messages" not in body:
        raise InvalidRequest("`{field}` is missing", field="messages")
    system = body.get("system")
    messages: list[Json] = [{"role": "system", "content": _texts("system", system)}] if system else []
    for index, turn in enumerate(wire.objects("messages", body["messages"])):
        messages += _turn(turn, f"[{index}]")
    return messages


def _turn(turn: Json, place: str) -> list[Json]:
    """Return the chat messages of one turn at `place` in the messages.

    Tool results become messages of their own, before the rest of the turn.
    """
    content = turn.get("content")
    if (role := turn.get("role")) not in ROLES:
        text = f"`{{field}}{place}.role` must be one of {{limit}}, it is {{value}}"
        raise InvalidRequest(text, field="messages", value=wire.shown(role), limit=[*ROLES])
    if not isinstance(content, list):
        return [turn]
    message: Json = {"role": role, "content": []}
    results: list[Json] = []
    for at, block in enumerate(wire.within("messages", f"{place}.content", wire.objects, content)):
        kind, place_of_block = block.get("type"), f"{place}.content[{at}]"
        if kind == "tool_result":
            content_of_result = _parts(block.get("content") or "", place_of_block)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content_of_result})
        elif kind == "tool_use":
            arguments = wire.within("messages", f"{place_of_block}.input", check_object, block.get("input"))
            name = wire.within("messages", f"{place_of_block}.name", check_string, block.get("name"))
            function = {"name": name, "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            message["reasoning_content"] = block.get("thinking")
        elif kind != "redacted_thinking":
            message["content"].append(_part(block, place_of_block))
    return results if results and not message["content"] else [*results, message]


def _parts(content: Any, place: str) -> Any:
    """Return the content of a tool result as that of a chat message."""
    if not isinstance(content, list):
        return wire.within("messages", f"{place}.content", check_string, content)
    parts = wire.within("messages", f"{place}.content", wire.objects, content)
    return [_part(each, f"{place}.content[{at}]") for at, each in enumerate(parts)]


def _part(block: Json, place: str) -> Json:
    """Return the part of a chat message for a block of text or an image."""
    if block.get("type") != "image":
        return _text("messages", block, place)
    source = block.get("source")
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return wire.image_part(f"data:{media_type};base64,{data}", f"{place}.source")
        case {"type": "url", "url": str(url)}:
            return wire.image_part(url, f"{place}.source")
    text = (
        f"`{{field}}{place}.source` must be an image of type base64, with media_type and data, or url, it is {{value}}"
    )
    raise InvalidRequest(text, field="messages", value=wire.shown(source))


def _texts(name: str, content: Any) -> Any:
    if not isinstance(content, list):
        return check_string(name, content)
    return [_text(name, each, f"[{at}]") for at, each in enumerate(wire.objects(name, content))]


def _text(name: str, block: Json, place: str) -> Json:
    if block.get("type") != "text":
        text = f"`{{field}}{place}` must be a block of text, an image, thinking or a tool, it is {{value}}"
        raise InvalidRequest(text, field=name, value=wire.shown(block))
    return {"type": "text", "text": wire.within(name, f"{place}.text", check_string, block.get("text"))}


def _tool(tool: Json, place: str) -> Json:
    if tool.get("type", "custom") not in ("custom", None):
        text = f"`{{field}}{place}` must be of type `custom`, it is {{value}}"
        raise InvalidRequest(text, field="tools", value=wire.shown(tool))
    name = check_function(tool, place)
    schema = wire.within("tools", f"{place}.input_schema", check_object, tool.get("input_schema") or {})
    function = {"name": name, "parameters": schema}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Json, tools: list[Json]) -> Json:
    kind = choice.get("type")
    if kind == "tool" and tools and choice.get("name") not in [tool["function"]["name"] for tool in tools]:
        text = "`{field}` must name one of the `tools`, it is {value}"
        raise InvalidRequest(text, field="tool_choice", value=wire.shown(choice))
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        wanted = CHOICES[kind]
    else:
        text = "`{field}` must have a `type` of {limit}, it is {value}"
        raise InvalidRequest(text, field="tool_choice", value=wire.shown(kind), limit=[*CHOICES, "tool"])
    is_one = choice.get("disable_parallel_tool_use") or False
    is_one = wire.within("tool_choice", ".disable_parallel_tool_use", check_bool, is_one)
    return {"tool_choice": wanted, "parallel_tool_calls": not is_one}


def _thinking(body: Json, syntax: OutputSyntax, chat: Json) -> Json:
    """Return the variables of the chat template.

    Reasoning is returned only to clients that ask for it; otherwise it is turned off if the template supports that.
    """
    thinking = check_object("thinking", body.get("thinking", {}))
    kind = thinking.get("type", "disabled")
    if kind not in KINDS:
        text = "`{field}` must have a `type` of {limit}, it is {value}"
        raise InvalidRequest(text, field="thinking", value=wire.shown(kind), limit=[*KINDS])
    variables = dict(check_object("chat_template_kwargs", body.get("chat_template_kwargs", {})))
    if (budget := thinking.get("budget_tokens")) is not None:
        wire.within("thinking", ".budget_tokens", check_positive, budget)
    if kind == "enabled" and syntax.reasoning != "never":
        chat["reasoning_max_tokens"] = budget
    if kind == "disabled":
        chat["include_reasoning"] = False
        if syntax.reasoning == "may":
            variables.setdefault("enable_thinking", False)
    return variables


def _output(body: Json) -> tuple[str, Json]:
    """Return the field that holds the output format, and the chat's fields for the format and the effort."""
    config = check_object("output_config", body.get("output_config", {}))
    check_parts("output_config", config, {"format": check_object, "effort": check_string})
    fields: Json = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    name, place, output_format = "output_config", ".format", config.get("format")
    if output_format is None:
        name, place, output_format = "output_format", "", body.get("output_format")
    if output_format is not None:
        if wire.within(name, place, check_object, output_format).get("type") != "json_schema":
            text = f"`{{field}}{place}` may have the type `json_schema` only, it is {{value}}"
            raise InvalidRequest(text, field=name, value=wire.shown(output_format))
        check = wire.schema_check(name, place, output_format)
        wire.within(name, f"{place}.schema", check, output_format.get("schema"))
        schema = {"schema": output_format["schema"], "strict": output_format.get("strict")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return name, fields
