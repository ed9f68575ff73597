"""The OpenAPI document of the service port. It is made of what serves: the routes, what protocols say of their fields,
the kinds of errors, and answers that the code itself writes for the shapes of theirs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiohttp import web

from engine import __version__
from engine.errors import KINDS, RequestError
from engine.wire import Final, Usage
from gateway import endpoints, server_info, stored_responses
from gateway.api_keys import InvalidApiKey
from gateway.protocol import ClientProtocol, RequestContext
from gateway.triton import metadata as triton

Json = dict[str, Any]

ABOUT = (
    "A field that is not named here is refused if it looks like a misspelling of one that is, or if another API has it "
    "and it would change the answer; any other is accepted without effect. `null` is like an absent field."
)
HTTP_ERRORS = {408: "the body was not complete in time", 413: "the body is larger than MAX_BODY_BYTES"}
OF_FACTS = (401, 404, 500, 503, 504)
AN_ERROR = RequestError("internal error")
AN_ANSWER = Final(
    *("1", "Paris.", [7, 8], 0, Usage(5, 2), 3), finish_reason="stop", tokens_all="Paris.", tokens_all_ids=[7, 8]
)


def openapi_document(app: web.Application, protocols: Sequence[ClientProtocol], unguarded: Collection[str]) -> Json:
    schemas: Json = {}
    paths: Json = {}
    for route in app.router.routes():
        if route.resource is None or route.method == "HEAD":
            continue
        path = route.resource.canonical
        speaking = [each for each in protocols if path in each.paths]
        operation = _exchange(path, speaking, schemas) if speaking else _plain(path)
        operation["responses"] |= _errors(path, route.method, path in unguarded)
        operation["summary"] = str(route.handler.__doc__).partition("\n")[0]
        if named := re.findall(r"\{(\w+)\}", path):
            in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **in_path} for name in named]
        if path in unguarded:
            operation["security"] = [{}]
        paths.setdefault(path, {})[route.method.lower()] = operation
    schemas["Error"] = {"anyOf": [_shape(each.error(AN_ERROR, RequestContext("/", "", [each]))) for each in protocols]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "LLM server", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # the first: a server without keys
    }


def _exchange(path: str, speaking: Sequence[ClientProtocol], schemas: Json) -> Json:
    """A request for an answer of the model, in any of the protocols."""
    requests, answers, examples, streams = [], [], {}, {}
    for protocol in speaking:
        example = protocol.example(path)
        exchange = protocol.parse(example, RequestContext(path, "default", [protocol]))
        exchange.gather(0, AN_ANSWER)
        name = f"{protocol.name}{path.replace('/', '.')}"
        request, answer = _object(protocol.fields(path), protocol.needs(path)), _shape(exchange.whole())
        for field in answer["properties"].keys() & request["properties"].keys():  # it repeats what was asked
            answer["properties"][field] = request["properties"][field]
        requests.append(_named(schemas, f"{name}.request", request))
        answers.append(_named(schemas, f"{name}.answer", answer))
        examples[protocol.name] = {"value": example}
        streams[protocol.content_type] = {"schema": {"description": "with `stream`"}}  # of each event, say some readers
    body = {"application/json": {"schema": {"anyOf": requests}, "examples": examples}}
    content = {"application/json": {"schema": {"anyOf": answers}}, **streams}
    return {"requestBody": {"required": True, "content": body}, "responses": {"200": _response("the answer", content)}}


def _plain(path: str) -> Json:
    """Any other path: `facts`, `questions` and `stored` know what is asked and told there."""
    samples, content = {**server_info.SAMPLES, **triton.SAMPLES, **endpoints.SAMPLES, **stored_responses.SAMPLES}, {}
    if path in samples:
        content = {"application/json": {"schema": _shape(samples[path])}}
    elif kind := {**server_info.TEXTS, **endpoints.TEXTS}.get(path):
        content = {kind: {"schema": {"type": "string"}}}
    operation: Json = {"responses": {"200": _response("the answer", content)}}
    if path in endpoints.FIELDS:
        body = {"application/json": {"schema": _object(endpoints.FIELDS[path], endpoints.NEEDS[path])}}
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
        texts = {code: texts[code] for code in OF_FACTS if code != 404 or "{" in path}
    if is_unguarded:
        del texts[401]
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(code): _response(text, content) for code, text in sorted(texts.items())}


def _response(description: str, content: Json) -> Json:
    return {"description": description, **({"content": content} if content else {})}


def _named(schemas: Json, name: str, schema: Json) -> Json:
    """A reference to it, under the name that it has already if another path has the same."""
    known = next((each for each, other in schemas.items() if other == schema), name)
    schemas[known] = schema
    return {"$ref": f"#/components/schemas/{known}"}


def _object(fields: Mapping[str, Json], needs: Collection[str]) -> Json:
    """With any of what it needs."""
    properties = {name: _or_null(schema) for name, schema in fields.items()}
    any_of = [{"required": [name], "properties": {name: fields[name]}} for name in needs]
    return {"type": "object", "properties": properties, "anyOf": any_of}


def _or_null(schema: Json) -> Json:
    """Null is like an absent field."""
    if isinstance(kinds := schema.get("type"), (str, list)):
        return {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "enum": [*schema["enum"], None]} if "enum" in schema else schema


def _shape(sample: Any) -> Json:
    """What is like the sample; None may be anything."""
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
