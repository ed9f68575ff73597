"""POST endpoints that do not generate text: abort, tokenize, detokenize, counting tokens, and loading adapters."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohttp import web

from engine import wire
from engine.errors import InvalidRequest
from engine.settings.served import OWN_NAME
from gateway.anthropic.fields import fields as message_fields
from gateway.anthropic.request import chat_of as chat_of_message
from gateway.app_keys import ANTHROPIC, BACKEND, BODY_MEMORY, CONFIG, NATIVE, OPENAI, RESPONSES, served_names
from gateway.body import parse_body, read_payload
from gateway.body_memory import BodyMemoryReservation
from gateway.endpoint import Endpoint
from gateway.http_responses import CONTEXT, json_response
from gateway.openai.request import chat_source, tokenize_body
from gateway.openai.unsupported_fields import refuse_any
from gateway.responses.fields import fields as response_fields
from gateway.responses.request import chat_of as chat_of_response

MAX_ABORT_BYTES = 8 << 10  # enough for a req_id in any escaped form
MAX_LORA_BYTES = 64 << 10  # enough for a name and a path


async def abort(request: web.Request) -> web.Response:
    """End the open request with this `req_id`, whichever worker has it."""
    context = request[CONTEXT]
    async with _body(request, MAX_ABORT_BYTES) as body:
        if "req_id" not in body:
            raise InvalidRequest("`{field}` is missing", field="req_id")
        req_id = wire.FIELDS["req_id"].check("req_id", body["req_id"])
        return json_response((await request.app[BACKEND].abort(req_id, context.owner)).fields())


async def tokenize(request: web.Request) -> web.Response:
    """Return the tokens of a prompt or a chat."""
    return await _tokenize_or_detokenize(request, wire.TOKENIZE)


async def detokenize(request: web.Request) -> web.Response:
    """Return the text of tokens."""
    return await _tokenize_or_detokenize(request, wire.DETOKENIZE)


async def count_tokens(request: web.Request) -> web.Response:
    """Return the number of tokens in the prompt of a message."""
    return json_response(await _count_tokens(request, chat_of_message))


async def count_input(request: web.Request) -> web.Response:
    """Return the number of tokens in the input of a response."""
    return json_response(COUNT | await _count_tokens(request, chat_of_response))


async def _count_tokens(request: web.Request, chat_of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    async with _body(request, request.app[CONFIG].max_body_bytes) as body:
        tokenized = await request.app[BACKEND].tokenize_or_detokenize({wire.TOKENIZE: tokenize_body(body, chat_of)})
        return _count(tokenized)


def _count(answer: wire.TokenizeResponse | wire.DetokenizeResponse) -> dict[str, Any]:
    assert isinstance(answer, wire.TokenizeResponse)
    return {"input_tokens": len(answer.tokens)}


async def _tokenize_or_detokenize(request: web.Request, kind: str) -> web.Response:
    async with _body(request, request.app[CONFIG].max_body_bytes) as body:
        refuse_any(body, {"chat_template": ()})
        if kind == wire.TOKENIZE and body.get("messages") is not None:
            body |= chat_source(body)
        return json_response(
            _without_is_end((await request.app[BACKEND].tokenize_or_detokenize({kind: body})).fields())
        )


async def load_lora(request: web.Request) -> web.Response:
    """Load an adapter from a folder in LORA_DIR."""
    return await _change_loras(request, wire.LOAD_LORA)


async def unload_lora(request: web.Request) -> web.Response:
    """Unload an adapter after the requests that use it have finished."""
    return await _change_loras(request, wire.UNLOAD_LORA)


async def _change_loras(request: web.Request, kind: str) -> web.Response:
    """Load or unload an adapter and answer in vLLM's words."""
    async with _body(request, MAX_LORA_BYTES) as body:
        name = wire.check_fields(body, wire.LORA_FIELDS[kind]).get("lora_name")
        if name in (*served_names(request.app), OWN_NAME):
            raise InvalidRequest("The `{field}` {value} is the model's own", field="lora_name", value=wire.shown(name))
        await request.app[BACKEND].change_loras({kind: body}, request[CONTEXT].owner)
    done = "added" if kind == wire.LOAD_LORA else "removed"
    return web.Response(text=f"Success: LoRA adapter '{name}' {done} successfully.")


def _without_is_end(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "is_end"}


@contextlib.asynccontextmanager
async def _body(request: web.Request, limit: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON body of a request and keep its memory reserved until the end."""
    reservation = BodyMemoryReservation(request.app[BODY_MEMORY])
    try:
        payload = await read_payload(request, limit, reservation)
        async with request.app[BODY_MEMORY].reading(len(payload)):
            body = parse_body(payload)
        yield body
    finally:
        reservation.release()


COUNT = {"object": "response.input_tokens"}
COUNT_SAMPLE = _count(wire.TokenizeResponse([1], 8192))
LORA_HANDLERS = {wire.LOAD_LORA: load_lora, wire.UNLOAD_LORA: unload_lora}
ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "/v1/abort",
        abort,
        "POST",
        sample=wire.Aborted("1", True).fields(),
        fields={"req_id": wire.schema_of(wire.FIELDS["req_id"].check)},
        needs=("req_id",),
        protocol=NATIVE,
    ),
    Endpoint(
        "/tokenize",
        tokenize,
        "POST",
        sample=_without_is_end(wire.TokenizeResponse([1], 8192).fields()),
        fields={name: wire.schema_of(field.check) for name, field in wire.TOKENIZE_FIELDS.items()},
        needs=("prompt", "messages"),
        protocol=OPENAI,
    ),
    Endpoint(
        "/detokenize",
        detokenize,
        "POST",
        sample=_without_is_end(wire.DetokenizeResponse("Hello").fields()),
        fields={name: wire.schema_of(field.check) for name, field in wire.DETOKENIZE_FIELDS.items()},
        needs=("tokens",),
        protocol=OPENAI,
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        count_tokens,
        "POST",
        sample=COUNT_SAMPLE,
        fields={name: message_fields()[name] for name in ("messages", "system", "tools")},
        needs=("messages",),
        protocol=ANTHROPIC,
    ),
    Endpoint(
        "/v1/responses/input_tokens",
        count_input,
        "POST",
        sample=COUNT | COUNT_SAMPLE,
        fields={name: response_fields()[name] for name in ("input", "instructions", "tools")},
        needs=("input",),
        protocol=RESPONSES,
    ),
    *(
        Endpoint(
            f"/v1/{kind}",
            LORA_HANDLERS[kind],
            "POST",
            content_type="text/plain",
            fields={name: wire.schema_of(field.check) for name, field in fields.items()},
            needs=("lora_name",),
            protocol=OPENAI,
        )
        for kind, fields in wire.LORA_FIELDS.items()
    ),
)
