"""The native protocol: the wire's own objects, one a line or gathered into one answer. Knows nothing of OpenAI.

Streaming is one JSON object a line, media type `application/x-ndjson`, one HTTP chunk a line: what `requests`'
`iter_lines` and `json.loads` read as it arrives. Fields are checked by the model, except the few that act here.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from engine import wire
from gateway import answers
from gateway.backend import Answer, Backend

OF_ONE_RESPONSE = ("token", "token_ids", "is_end", "send_idx", "usage", "logprobs")  # not of the whole answer


async def complete(request: web.Request, body: dict[str, Any], backend: Backend) -> web.StreamResponse:
    settings = request.app[answers.SETTINGS]
    body = {key: value for key, value in body.items() if key != wire.PROBE}
    if body.get("req_id") is None:
        body["req_id"] = str(uuid.uuid4())
    call = request[answers.CALL]
    call.req_id = body["req_id"]
    options = {name: checked(body, name) for name in ("stream", "return_usage", "timeout")}
    responses = backend.generate(body, options["timeout"] or settings.request_timeout_s)
    if options["stream"]:
        received = str(time.time()) if body.get("benchmark") else None
        return await answers.stream(request, _lines(call, responses, received), "application/x-ndjson", _line)
    return answers.answer(await _gather(call, responses, options["return_usage"]))


def checked(body: dict[str, Any], name: str) -> Any:
    """A field that acts in the gateway, under the same rules as the model's. None when not given."""
    value = body.get(name)
    return None if value is None else wire.FIELDS[name].check(name, value)


def _line(fields: dict[str, Any]) -> bytes:
    return answers.dump(fields) + b"\n"


async def _lines(
    call: answers.Call, responses: AsyncGenerator[Answer, None], received: str | None
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(responses):
        async for response in responses:
            if received is not None:
                response["http_received_time"] = received
            response["error_msg"] = ""
            response["error_code"] = 0
            call.num_tokens = response.get("usage", {}).get("completion_tokens", 0)
            yield _line(response)


async def _gather(
    call: answers.Call, responses: AsyncGenerator[Answer, None], return_usage: bool | None
) -> dict[str, Any]:
    texts, logprobs, last = [], [], {}
    async with contextlib.aclosing(responses):
        async for last in responses:
            texts.append(last.get("token", ""))
            logprobs += last.get("logprobs") or []
    usage = last.get("usage", {})
    call.num_tokens = usage.get("completion_tokens", 0)
    fields = {key: value for key, value in last.items() if key not in OF_ONE_RESPONSE}
    fields |= {"result": "".join(texts), "error_msg": "", "error_code": 0}
    fields.setdefault("tokens_all", fields["result"])
    if return_usage:
        fields["usage"] = usage
    if logprobs:
        fields["logprobs"] = logprobs
    return fields
