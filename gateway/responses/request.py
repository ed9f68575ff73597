"""Translation of a response request into a chat completion request.

Fields that chats have too are validated there, the others here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from gateway.openai.output_syntax import OutputSyntax
from gateway.openai.request import check_bool, check_object, check_positive, check_string
from gateway.openai.request import parse as parse_chat
from gateway.openai.tools import check_function
from gateway.openai.unsupported_fields import NAMES as NAMES_OF_CHAT
from gateway.openai.unsupported_fields import REFUSED as REFUSED_IN_CHATS
from gateway.openai.unsupported_fields import UNSUPPORTED_IN_BLOCKS, check_parts, refuse, refuse_any, refuse_more
from gateway.responses.answer import ResponseIdentity, ResponsesExchange
from gateway.responses.fields import CHAT_FIELDS, INCLUDED, REFUSED

Json = dict[str, Any]
MAX_METADATA = 16  # as OpenAI has it; several events repeat them
CLIENT_NAMES = {  # of the chat's fields, those with another name here
    **{"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
    **{"response_format": "text", "reasoning_effort": "reasoning"},
}
# The same in errors, which name the part of the field
ERROR_NAMES = CLIENT_NAMES | {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}
NAMES = {**{native: CLIENT_NAMES.get(name, name) for native, name in NAMES_OF_CHAT.items()}, **CLIENT_NAMES}
NAMES |= {"system": "instructions", "output_config": "text", "thinking": "reasoning"}


def parse(body: Json, model_name: str, syntax: OutputSyntax, before: Sequence[Json] = ()) -> ResponsesExchange:
    """Return the exchange of a request.

    `before` are the messages that `input` continues. Raise InvalidRequest, by the chat's names of the fields.
    """
    body = {name: value for name, value in body.items() if value is not None}
    is_background = check_bool("background", body.get("background", False))
    is_stored = check_bool("store", body.get("store", is_background))
    if is_background and not is_stored:
        text = "`{field}` is {value}, but a `background` response is always stored"
        raise InvalidRequest(text, field="store", value="false")
    exchange = exchange_of(body, chat_of(body, before), ResponseIdentity(), model_name, syntax)
    if is_stored:
        exchange.store(body, is_background)
    return exchange


def exchange_of(
    body: Json, source: Json, identity: ResponseIdentity, model_name: str, syntax: OutputSyntax
) -> ResponsesExchange:
    """Return the exchange of a request with the messages and tools in `source`. Raise InvalidRequest."""
    refuse(body, is_chat=True)
    refuse_any(body, {**UNSUPPORTED_IN_BLOCKS, **REFUSED})
    included = body.get("include", [])
    if not isinstance(included, list) or any(each not in INCLUDED for each in included):
        text = "`{field}` may hold {limit}, which do nothing here, it is {value}"
        raise InvalidRequest(text, field="include", value=wire.shown(included), limit=[*INCLUDED])
    chat = {name: body[name] for name in CHAT_FIELDS if name in body} | source
    chat.setdefault("request_id", f"resp_{uuid.uuid4().hex}")
    metadata = check_object("metadata", body.get("metadata", {}))
    refuse_more("metadata", len(metadata), MAX_METADATA)
    if not all(isinstance(value, str) for value in metadata.values()):
        text = "`{field}` may hold text only, it is {value}"
        raise InvalidRequest(text, field="metadata", value=wire.shown(metadata))
    if "max_output_tokens" in body:
        chat["max_tokens"] = check_positive("max_output_tokens", body["max_output_tokens"])
    if "tool_choice" in body and ("tools" in chat or body["tool_choice"] != "auto"):  # the default, without tools, too
        chat["tool_choice"] = _choice(body["tool_choice"])
    text, reasoning = (check_object(name, body.get(name, {})) for name in ("text", "reasoning"))
    check_parts("text", text, {"format": check_object, "verbosity": check_string})
    check_parts("reasoning", reasoning, {"effort": check_string, "summary": check_string})
    refuse_any(text, {"verbosity": REFUSED_IN_CHATS["verbosity"]})
    if text_format := text.get("format"):
        chat["response_format"] = _text_format(text_format)
    if effort := reasoning.get("effort"):
        chat["reasoning_effort"] = effort
    return ResponsesExchange(parse_chat(chat, True, model_name, syntax), ERROR_NAMES, body, identity)


def chat_of(body: Json, before: Sequence[Json] = ()) -> Json:
    """Return the fields that determine the prompt: the messages and the tools."""
    return {"messages": _messages(body, before), **tools_of(body)}


def tools_of(body: Json) -> Json:
    """Return the `tools` field of the chat, or nothing if there are none. Raise InvalidRequest."""
    tools = [_tool(each, f"[{at}]") for at, each in enumerate(wire.objects("tools", body.get("tools") or []))]
    return {"tools": tools} if tools else {}


def _messages(body: Json, before: Sequence[Json]) -> list[Json]:
    messages = [*instructions_of(body), *before]
    given = body.get("input")
    if given is None:
        raise InvalidRequest("`{field}` is missing", field="input")
    if given in ("", []):
        raise InvalidRequest("`{field}` cannot be empty", field="input", value=given)
    if not isinstance(given, str | list):
        text = "`{field}` must be a text or a list of items, it is {value}"
        raise InvalidRequest(text, field="input", value=wire.shown(given))
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    add_items(messages, given)
    return messages


def instructions_of(body: Json) -> list[Json]:
    """Return the system message of the instructions, or nothing."""
    if "instructions" not in body:
        return []
    return [{"role": "system", "content": check_string("instructions", body["instructions"])}]


def add_items(messages: list[Json], items: Any) -> None:
    """Append the messages for these input items. Raise InvalidRequest."""
    for index, item in enumerate(wire.objects("input", items)):
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in ITEMS:
            text = "`{field}` may have items of {limit}, not {value}"
            raise InvalidRequest(text, field="input", value=wire.shown(kind), limit=[*ITEMS])
        ITEMS[kind](item, messages, f"[{index}]")
    for message in messages:  # an answer that was cut in its reasoning has nothing else
        message.setdefault("content", "")


def _message(item: Json, messages: list[Json], place: str) -> None:
    said = {"role": item.get("role", "user"), "content": _content(item.get("content"), f"{place}.content")}
    messages.append({**_of_answer(messages, item), **said})


def _of_answer(messages: list[Json], item: Json) -> Json:
    """Return the fields of the message before `item`, and remove that message, if it is the reasoning of the same
    answer.
    """
    is_next = item.get("role") == "assistant" and messages and "content" not in messages[-1]
    return messages.pop() if is_next else {}


def _reasoning(item: Json, messages: list[Json], place: str) -> None:
    parts = [
        wire.within("input", f"{place}.{name}", wire.objects, item.get(name) or []) for name in ("content", "summary")
    ]
    texts = [each.get("text") for each in chain(*parts)]
    if texts := [each for each in texts if isinstance(each, str)]:
        messages.append({"role": "assistant", "reasoning_content": "\n".join(texts)})


def _call(item: Json, messages: list[Json], place: str) -> None:
    function = {name: _text_of(item, name, place) for name in ("name", "arguments")}
    call = {"id": _text_of(item, "call_id", place), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("content", "")
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _output(item: Json, messages: list[Json], place: str) -> None:
    call_id, output = _text_of(item, "call_id", place), _content(item.get("output"), f"{place}.output")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _text_of(item: Json, name: str, place: str) -> str:
    return wire.within("input", f"{place}.{name}", check_string, item.get(name))


ITEMS: dict[str, Callable[[Json, list[Json], str], None]] = {  # called with the place of the item in `input`
    **{"message": _message, "function_call": _call, "function_call_output": _output, "reasoning": _reasoning}
}


def _content(content: Any, place: str) -> Any:
    """Return the text parts and images in the chat's form. Parts of other kinds are kept, and refused by the chat."""
    if not isinstance(content, list):
        return content
    texts = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
    parts = []
    for at, part in enumerate(wire.within("input", place, wire.objects, content)):
        if part.get("type") == "input_image":
            parts.append(_image(part, f"{place}[{at}]"))
            continue
        name = texts.get(part["type"]) if isinstance(part.get("type"), str) else None
        parts.append({"type": "text", "text": part.get(name)} if name else part)
    return parts


def _image(part: Json, place: str) -> Json:
    if part.get("file_id") is not None:
        text = f"`{{field}}{place}.file_id` is not supported: files cannot be uploaded, send a data URL as `image_url`"
        raise InvalidRequest(text, field="input", value=wire.shown(part["file_id"]))
    return wire.image_part(part.get("image_url"), f"{place}.image_url", part.get("detail"))


def _tool(tool: Json, place: str) -> Json:
    if tool.get("type") != "function":
        text = f"`{{field}}{place}` must be of type `function`, it is {{value}}"
        raise InvalidRequest(text, field="tools", value=wire.shown(tool))
    check_function(tool, place)
    wire.within("tools", f"{place}.parameters", check_object, tool.get("parameters") or {})
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in known if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = [_choice(each) for each in wire.objects("tool_choice", choice.get("tools"))]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _text_format(text_format: Json) -> Json:
    if text_format.get("type") != "json_schema":
        return text_format
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in text_format.items() if name != "type"},
    }
