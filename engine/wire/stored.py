"""Responses that the model process stores: the key of a request that asks for it, questions about one, their answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from engine.errors import InvalidRequest, RequestError
from engine.wire import checks
from engine.wire.delta import Delta, Final

STORE = "_store"  # of a request: an object with the fields of Storing
STORED = "_stored"  # a request with this key set is answered with a StoredResponse: its `id`, and what to do with it
RETRIEVE, CANCEL, DELETE = ACTIONS = ("retrieve", "cancel", "delete")
QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED, CANCELLED, DELETED = (
    *("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    "deleted",
)


@dataclass(frozen=True, slots=True)
class Storing:
    """How a response is stored."""

    about: Mapping[str, Any]  # what the gateway needs to write it again; the model does not read it
    is_background: bool = False  # it goes on without its client, who is answered with a StoredResponse at once
    is_streamed: bool = False  # in the background: the client gets the answer as it grows instead, until it leaves


class StoredResponse(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """A response as far as it has come."""

    response_id: str
    status: str
    request: str  # JSON: what is stored `about` it, and its messages
    answer: Delta | Final | None = None  # from its beginning; a Final when it is complete
    error: RequestError | None = None  # of one that has failed
    is_end: ClassVar[bool] = True

    def asked(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return what is stored about the response, and the messages of its request."""
        about, messages = json.loads(self.request)
        return about, messages

    def fields(self) -> dict[str, Any]:
        answer = self.answer and self.answer.fields()
        error = self.error and {"kind": self.error.kind, "text": self.error.text, **self.error.cause}
        told = {"response_id": self.response_id, "status": self.status, "request": self.request}
        return {"is_end": 1, **told, "answer": answer, "error": error}


def storing_of(body: dict[str, Any]) -> Storing | None:
    """Take it from the body; None: the response is not stored. Raises InvalidRequest."""
    given = body.pop(STORE, None)
    if given is None:
        return None
    checks.json_object(STORE, given)
    flags = [checks.boolean(STORE, given.get(name, False)) for name in ("is_background", "is_streamed")]
    return Storing(checks.json_object(STORE, given.get("about")), *flags)


def stored_question(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the id and the action of the question. Raises InvalidRequest."""
    given = checks.json_object(STORED, body[STORED])
    action = given.get("action")
    if action not in ACTIONS:
        text = "the action of `{field}` is {value}, it must be one of {limit}"
        raise InvalidRequest(text, field=STORED, value=checks.shown(action), limit=[*ACTIONS])
    return checks.req_id("id", given.get("id")), action
