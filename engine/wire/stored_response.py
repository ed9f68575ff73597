"""Responses stored by the model process: options of a request, actions on a stored response, and their result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from engine.errors import InvalidRequest, RequestError
from engine.wire import checks
from engine.wire.delta import Delta, Final

STORE = "_store"  # key of a request: an object with the fields of StoreOptions
STORED = "_stored"  # key of a request for a StoredResponse: an object with its `id` and an `action`
RETRIEVE, CANCEL, DELETE = ACTIONS = ("retrieve", "cancel", "delete")
QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED, CANCELLED, DELETED = (
    *("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    "deleted",
)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of storing a response."""

    about: Mapping[str, Any]  # data for the gateway to render the response again; opaque to the model
    is_background: bool = False  # it continues without its client, which gets a StoredResponse at once
    is_streamed: bool = False  # in the background: the client gets a stream instead, until it disconnects


class StoredResponse(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Current state of a stored response."""

    response_id: str
    status: str
    request: str  # JSON: [about, messages]
    answer: Delta | Final | None = None  # all tokens so far; a Final when it is complete
    error: RequestError | None = None  # if it has failed
    is_end: ClassVar[bool] = True

    def request_parts(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the gateway's data (`StoreOptions.about`) and the messages of the request."""
        about, messages = json.loads(self.request)
        return about, messages

    def fields(self) -> dict[str, Any]:
        answer = self.answer and self.answer.fields()
        error = self.error and {"kind": self.error.kind, "text": self.error.text, **self.error.cause}
        head = {"response_id": self.response_id, "status": self.status, "request": self.request}
        return {"is_end": 1, **head, "answer": answer, "error": error}


def storing_of(body: dict[str, Any]) -> StoreOptions | None:
    """Remove the options from the body and return them; None: the response is not stored. Raises InvalidRequest."""
    given = body.pop(STORE, None)
    if given is None:
        return None
    checks.json_object(STORE, given)
    flags = [checks.boolean(STORE, given.get(name, False)) for name in ("is_background", "is_streamed")]
    return StoreOptions(checks.json_object(STORE, given.get("about")), *flags)


def stored_action_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the response id and the action of a request with the key STORED. Raises InvalidRequest."""
    given = checks.json_object(STORED, body[STORED])
    action = given.get("action")
    if action not in ACTIONS:
        text = "the action of `{field}` is {value}, it must be one of {limit}"
        raise InvalidRequest(text, field=STORED, value=checks.shown(action), limit=[*ACTIONS])
    return checks.req_id("id", given.get("id")), action
