"""OpenAPI document as a plain HTML page, without scripts or external resources."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

Json = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.9em ui-monospace, monospace; }
pre { overflow: auto; padding: 0.75rem; border: 1px solid #8886; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; }
td { padding: 0.2rem 0.75rem 0.2rem 0; vertical-align: top; border-top: 1px solid #8884; }
summary { cursor: pointer; }
"""


def openapi_html(document: Json) -> str:
    """Return the HTML page of an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    title = f"{info['title']} {info['version']}"
    operations = [
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{_text(info['description'])} <a href='openapi.json'>openapi.json</a></p>"
        f"{''.join(operations)}</body></html>"
    )


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    examples = [
        f"<p>{escape(protocol)}:</p><pre>{escape(json.dumps(each['value'], indent=2))}</pre>"
        for protocol, each in body.get("examples", {}).items()
    ]
    requests = [_request(each, schemas) for each in schema.get("anyOf", [schema] if schema else [])]
    rows = [[f"<code>{code}</code>", _text(each["description"])] for code, each in operation["responses"].items()]
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_text(operation['summary'])}</p>"
        f"{''.join(examples)}{''.join(requests)}{_folded('answers', rows)}"
    )


def _request(schema: Json, schemas: Json) -> str:
    name = schema.get("$ref", "/fields").rpartition("/")[2]
    fields = schemas.get(name, schema)["properties"]
    rows = []
    for field, each in fields.items():
        default = f"default <code>{escape(json.dumps(each['default']))}</code>; " if "default" in each else ""
        alias = f"another name of `{each['x-alias-of']}`" if "x-alias-of" in each else each.get("description", "")
        rows.append([f"<code>{escape(field)}</code>", escape(_holds(each)), default + _text(alias)])
    return _folded(escape(name), rows)


def _holds(schema: Json) -> str:
    """Describe the values of a field in a few words."""
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_holds, schema["anyOf"])))
    kinds = schema.get("type", [])
    words = " or ".join(kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null")
    if "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema["enum"] if each is not None)
    if "items" in schema:
        words += f" of {_holds(schema['items'])}"
    low, high = schema.get("minimum", ""), schema.get("maximum", "")
    return f"{words} {low}..{high}" if low != "" else words


def _folded(title: str, rows: list[list[str]]) -> str:
    cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<details><summary>{title}</summary><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table></details>"


def _text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
