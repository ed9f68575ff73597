"""Owner of a request. The gateway, which knows the API keys, adds it to the request; what clients write there is
removed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from engine.errors import InvalidRequest
from engine.settings.keys import Owner

OWNER = "_owner"  # key in the body of a request


def with_owner(body: dict[str, Any], owner: Owner) -> dict[str, Any]:
    """Return `body` with this owner, in place of any that it contains."""
    body = {name: value for name, value in body.items() if name != OWNER}
    return {**body, OWNER: asdict(owner)} if owner != Owner() else body


def payload_with_owner(payload: bytes, owner: Owner) -> bytes:
    """Return the JSON text `payload` of a request without OWNER in UTF-8 with this owner, without parsing it. The owner
    is inserted before the last brace. A text that continues after this brace is no valid request."""
    place = payload.rfind(b"}")
    if place < 0 or not owner.name:
        return payload
    comma = b"" if payload[:place].rstrip().endswith(b"{") else b","
    return payload[:place] + comma + f'"{OWNER}":{json.dumps(asdict(owner))}'.encode() + payload[place:]


def owner_of(body: dict[str, Any]) -> Owner:
    """Return the owner of a request; the anonymous owner if it has none. Raises InvalidRequest."""
    try:
        return Owner(**body.get(OWNER, {}))
    except TypeError:
        raise InvalidRequest("Only gateways may set `{field}`", field=OWNER) from None
