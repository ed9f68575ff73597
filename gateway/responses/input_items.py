"""Input items of a stored response, which the model process has as the messages of a chat. Independent of HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from engine import wire
from engine.errors import InvalidRequest

Json = dict[str, Any]
DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # items of a page, as OpenAI has them
ASCENDING, DESCENDING = ORDERS = ("asc", "desc")


def input_items(messages: Sequence[Json], ids: str) -> list[Json]:
    """Return the items of these messages in their order. `ids` is the prefix of their ids."""
    items = chain.from_iterable(map(_items_of, messages))
    return [{"id": f"{prefix}{ids}in{index:04x}", **item} for index, (prefix, item) in enumerate(items)]


def page_of(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Return the list object of the page that `limit`, `order` and `after` of the query ask for.

    Raise InvalidRequest.
    """
    order, after = query.get("order", DESCENDING), query.get("after")
    if order not in ORDERS:
        text = "`{field}` is {value}, it must be one of {limit}"
        raise InvalidRequest(text, field="order", value=wire.shown(order), limit=[*ORDERS])
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    ordered = [*items] if order == ASCENDING else [*items][::-1]
    begin = 0
    if after is not None:
        places = [place for place, item in enumerate(ordered, 1) if item["id"] == after]
        if not places:
            text = "`{field}` is {value}, which is no id of an input item of this response"
            raise InvalidRequest(text, field="after", value=wire.shown(after))
        [begin] = places
    page = ordered[begin : begin + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = begin + limit < len(ordered)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_LIMIT):
        text = "`{field}` is {value}, it must be a number from 1 to {limit}"
        raise InvalidRequest(text, field="limit", value=wire.shown(given), limit=MAX_LIMIT)
    return int(given)


def _items_of(message: Json) -> Iterator[tuple[str, Json]]:
    """Yield the items of one message, each with the prefix of its id."""
    role, content = message["role"], message.get("content")
    done = {"status": "completed"}
    if role == "tool":
        output = content if isinstance(content, str) else _parts(content or [], "input_text")
        yield "fco_", {"type": "function_call_output", **done, "call_id": message.get("tool_call_id"), "output": output}
        return
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
    if reasoning:
        thoughts = [{"type": "reasoning_text", "text": reasoning}]
        yield "rs_", {"type": "reasoning", **done, "summary": [], "content": thoughts}
    if content or not (reasoning or calls):
        kind = "output_text" if role == "assistant" else "input_text"
        parts = _parts([{"type": "text", "text": content}] if isinstance(content, str) else content or [], kind)
        yield "msg_", {"type": "message", **done, "role": role, "content": parts}
    for call in calls:
        name, arguments = (call["function"].get(key) for key in ("name", "arguments"))
        if not isinstance(arguments, str):  # chat templates read an object
            arguments = json.dumps(arguments, ensure_ascii=False)
        yield "fc_", {"type": "function_call", **done, "call_id": call.get("id"), "name": name, "arguments": arguments}


def _parts(parts: Sequence[Json], kind: str) -> list[Json]:
    """Return parts of a message's content as those of an item, with text of this kind."""
    more: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    found = []
    for part in parts:
        if part.get("type") == "image_url":
            image = part["image_url"]
            found.append({"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")})
        else:
            found.append({"type": kind, "text": part.get("text", ""), **more})
    return found
