"""OpenAPI document of the service port.

It is generated from the routes, from the fields that the protocols and endpoints declare, from the kinds of errors, and
from sample answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiohttp import web

from engine import __version__
from engine.errors import KINDS, RequestError
from engine.wire import Final, Usage
from gateway.api_keys import InvalidApiKey
from gateway.endpoint import Endpoint
from gateway.protocol import ClientProtocol, RequestContext

Json = dict[str, Any]

ABOUT = (
    "A field that is not named here is refused if it looks like a misspelling of one that is, or if another API has it "
    "and it would change the answer; any other is accepted without effect. `null` is like an absent field."
)
HTTP_ERRORS = {408: "the body was not complete in time", 413: "the body is larger than MAX_BODY_BYTES"}
GET_ERRORS = (401, 404, 500, 503, 504)
SAMPLE_ERROR = RequestError("internal error")
SAMPLE_ANSWER = Final(
    *("1", "Paris.", [7, 8], 0, Usage(5, 2), 3), finish_reason="stop", tokens_all="Paris.", tokens_all_ids=[7, 8]
)


def openapi_document(
    app: web.Application,
    protocols: Sequence[ClientProtocol],
    endpoints: Sequence[Endpoint],
    unguarded: Collection[str],
) -> Json:
    """Return the OpenAPI 3.1 document of `app`, whose other routes are `endpoints`.

    Paths in `unguarded` need no API key.
    """
    described = {(each.method, each.canonical_path): each for each in endpoints}
    schemas: Json = {}
    paths: Json = {}
    for route in app.router.routes():
        if route.resource is None or route.method == "HEAD":
            continue
        path = route.resource.canonical
        speaking = [each for each in protocols if path in each.paths]
        operation = _exchange(path, speaking, schemas) if speaking else _plain(described[route.method, path])
        operation["responses"] |= _errors(path, route.method, path in unguarded)
        operation["summary"] = str(route.handler.__doc__).partition("\n")[0]
        if named := re.findall(r"\{(\w+)\}", path):
            in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **in_path} for name in named]
        if path in unguarded:
            operation["security"] = [{}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    schemas["Error"] = {
        "anyOf": [_shape(each.error(SAMPLE_ERROR, RequestContext("/", "", [each]))) for each in protocols]
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "LLM server", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # the first alternative: a server without API keys
    }


def _exchange(path: str, speaking: Sequence[ClientProtocol], schemas: Json) -> Json:
    """Return the operation of a path that generates, with a schema for each protocol that it accepts."""
    requests, answers, examples, streams = [], [], {}, {}
    for protocol in speaking:
        example = protocol.example(path)
        exchange = protocol.parse(example, RequestContext(path, "default", [protocol]))
        exchange.gather(0, SAMPLE_ANSWER)
        name = f"{protocol.name}{path.replace('/', '.')}"
        request, answer = _object(protocol.fields(path), protocol.needs(path)), _shape(exchange.whole())
        for field in answer["properties"].keys() & request["properties"].keys():  # repeated from the request
            answer["properties"][field] = request["properties"][field]
        _allow_other_forms(request["properties"], answer["properties"])
        requests.append(_named(schemas, f"{name}.request", request))
        answers.append(_named(schemas, f"{name}.answer", answer))
        examples[protocol.name] = {"value": example}
        # No schema: some readers take it for the schema of each event.
        streams[protocol.content_type] = {"schema": {"description": "with `stream`"}}
    body = {"application/json": {"schema": {"anyOf": requests}, "examples": examples}}
    content = {"application/json": {"schema": {"anyOf": answers}}, **streams}
    return {"requestBody": {"required": True, "content": body}, "responses": {"200": _response("the answer", content)}}


def _allow_other_forms(request: Json, answer: Json) -> None:
    """Allow the forms of the answer's properties that differ from the sample because of what a request asks for."""
    if "background" in request:  # it is answered at once, before anything is used
        answer["usage"] = _or_null(answer["usage"])
    if "encoding_format" in request:
        embedding = answer["data"]["items"]["properties"]
        embedding["embedding"] = {"anyOf": [embedding["embedding"], {"type": "string"}]}


def _plain(endpoint: Endpoint) -> Json:
    """Return the operation of an endpoint that does not generate text."""
    is_json = endpoint.content_type == "application/json"
    schema = _shape(endpoint.sample) if is_json else {"type": "string"}
    content = {endpoint.content_type: {"schema": schema}} if endpoint.content_type else {}
    operation: Json = {"responses": {"200": _response("the answer", content)}}
    if endpoint.fields:
        body = {"application/json": {"schema": _object(endpoint.fields, endpoint.needs)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _errors(path: str, method: str, is_unguarded: bool) -> Json:
    kinds: dict[int, list[str]] = {}
    errors: list[type[RequestError]] = [*KINDS.values(), InvalidApiKey]
    for error in errors:
        kinds.setdefault(error.code, []).append(f"`{error.kind}`")
    texts = {code: " or ".join(names) for code, names in kinds.items()}
    if method == "POST":
        texts |= HTTP_ERRORS
    else:
        texts = {code: texts[code] for code in GET_ERRORS if code != 404 or "{" in path}
    if is_unguarded:
        del texts[401]
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(code): _response(text, content) for code, text in sorted(texts.items())}


def _response(description: str, content: Json) -> Json:
    return {"description": description, **({"content": content} if content else {})}


def _named(schemas: Json, name: str, schema: Json) -> Json:
    """Add `schema` under `name`, or reuse an equal one, and return a reference to it."""
    known = next((each for each, other in schemas.items() if other == schema), name)
    schemas[known] = schema
    return {"$ref": f"#/components/schemas/{known}"}


def _object(fields: Mapping[str, Json], needs: Collection[str]) -> Json:
    """Return the schema of an object with these fields, of which at least one in `needs` is required."""
    properties = {name: _or_null(schema) for name, schema in fields.items()}
    any_of = [{"required": [name], "properties": {name: fields[name]}} for name in needs]
    return {"type": "object", "properties": properties, "anyOf": any_of}


def _or_null(schema: Json) -> Json:
    """Return the schema with null allowed, because null means the same as an absent field."""
    if isinstance(kinds := schema.get("type"), (str, list)):
        return {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "enum": [*schema["enum"], None]} if "enum" in schema else schema


def _shape(sample: Any) -> Json:
    """Return a schema that matches values like `sample`. None in the sample matches any value."""
    if isinstance(sample, dict):
        return {
            "type": "object",
            "properties": {name: _shape(value) for name, value in sample.items()},
            "required": [*sample],
        }
    if isinstance(sample, (list, tuple)):
        return {"type": "array", **({"items": _shape(sample[0])} if sample else {})}
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {"type": kinds[type(sample)]} if type(sample) in kinds else {}
