"""API keys: the owner of the key that a request carries. It is independent of HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from engine.errors import InvalidRequest
from engine.wire import Owner


class InvalidApiKey(InvalidRequest):
    """The API key is missing or wrong."""

    kind = "invalid_api_key"
    code = 401


def authenticate(authorization: str, owners: Mapping[str, Owner]) -> Owner:
    """Return the owner of the key in `authorization`, the value of the header.

    The comparison takes constant time. Raise InvalidApiKey.
    """
    scheme, _, text = authorization.partition(" ")
    given = text.strip().encode("utf-8", "surrogateescape")
    found = [owner for key, owner in owners.items() if hmac.compare_digest(given, key.encode())]
    if scheme.lower() != "bearer" or not found:
        raise InvalidApiKey("the API key is missing or wrong, the header must be `Authorization: Bearer <key>`")
    return found[0]
