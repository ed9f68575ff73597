"""Whose request it is: the gateway, which knows the keys, tells the model. What a client says of it is dropped."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from engine.errors import InvalidRequest
from engine.settings.keys import Owner

OWNER = "_owner"  # of a request's body


def with_owner(body: dict[str, Any], owner: Owner) -> dict[str, Any]:
    """In place of what the body says of it."""
    body = {name: value for name, value in body.items() if name != OWNER}
    return {**body, OWNER: asdict(owner)} if owner != Owner() else body


def payload_with_owner(payload: bytes, owner: Owner) -> bytes:
    """The same for a text that nobody here reads. Of a name that comes twice JSON takes the last, so what is put before
    the last brace wins; a text in which that does not end the request is refused as none."""
    place, may_say = payload.rfind(b"}"), OWNER.encode() in payload or b"\\u" in payload
    if place < 0 or (not owner.name and not may_say):
        return payload
    comma = b"" if payload[:place].rstrip().endswith(b"{") else b","
    return payload[:place] + comma + f'"{OWNER}":{json.dumps(asdict(owner))}'.encode() + payload[place:]


def owner_of(body: dict[str, Any]) -> Owner:
    try:
        return Owner(**body.get(OWNER, {}))
    except TypeError:
        raise InvalidRequest("The `{field}` is the gateway's to say", field=OWNER) from None
