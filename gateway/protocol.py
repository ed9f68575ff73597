"""Interfaces of a client protocol, and the state of an HTTP request while it is answered.

A protocol is a package beside this module and one line in app.py; docs/adding.md has the steps. It translates a request
body to requests of the model, and the model's answers to its own objects. It is independent of HTTP and gRPC.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import RequestError
from engine.settings.config import Config
from engine.wire import Delta, Owner, StoredResponse


class Exchange(Protocol):
    """One parsed request and the answer that is built for it, which is either streamed or gathered."""

    requests: list[dict[str, Any]]  # requests to the model, one per prompt
    answer_id: str  # the client's id of the answer; may change until the first byte is sent
    names: Mapping[str, str]  # the client's names of the model's fields, where they differ
    stream: bool
    timeout_s: float | None  # longest wait for an answer of the model; None: the gateway's default

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens generated so far, for the log."""
        ...

    def event(self, index: int, answer: Delta) -> bytes:
        """Return the stream events for one answer to `requests[index]`, with the end of the stream after the last one.

        The result may be empty. If a request has several answers, `answer.index` says which one it is.
        """
        ...

    def gather(self, index: int, answer: Delta) -> None:
        """Record an answer to `requests[index]` for `whole`."""
        ...

    def whole(self) -> dict[str, Any]:
        """Return the complete response object, after the last answer to every request."""
        ...


@dataclass(eq=False)
class RequestContext:
    """State of one HTTP request, for its protocol, for errors and for the log."""

    path: str
    model_name: str  # name of the served model, which answers have
    protocols: Sequence[ClientProtocol]  # candidates; exactly one as soon as the body is read
    headers: Mapping[str, str] = field(default_factory=dict)  # request headers
    other_names: Sequence[str] = ()  # further names of the served model in requests
    req_id: str | None = None  # the request's id for errors, as soon as its protocol has read it
    request_id: str = ""  # for the response's header and the log
    given_id: str = ""  # id of the answer that the client chose in its header
    max_tokens: int | None = None  # reduced limit of the answer's length, if the client asked for more
    has_begun: bool = False  # True once the response's headers are sent
    exchange: Exchange | None = None
    owner: Owner = Owner()  # owner of the API key
    traceparent: str = ""  # W3C trace context of the request's span, if it is traced
    late_status: int | None = None  # status of a failure after the first byte
    previous: StoredResponse | None = None  # stored response that this request continues
    num_labels: int = 0  # labels of the model's classifier; set for score and rerank requests
    config: Config = field(default_factory=Config)  # settings of the server


class ClientProtocol(Protocol):
    """A protocol that clients speak, such as OpenAI's."""

    name: str  # name in the log
    paths: Collection[str]  # paths of its requests; a path may have several protocols
    content_type: str  # media type of a stream

    def fields(self, path: str) -> Mapping[str, dict[str, Any]]:
        """Return the request fields as JSON Schema by name, for the document at /openapi.json."""
        ...

    def needs(self, path: str) -> Collection[str]:
        """Return the fields of which a request must have at least one."""
        ...

    def example(self, path: str) -> dict[str, Any]:
        """Return an example of a request body."""
        ...

    def speaks(self, body: dict[str, Any]) -> bool:
        """Return True if `body` is a request of this protocol.

        The first protocol in app.PROTOCOLS that returns True handles it.
        """
        ...

    def parse(self, body: dict[str, Any], context: RequestContext) -> Exchange:
        """Return the exchange of a request. Raise InvalidRequest."""
        ...

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        """Return the error object."""
        ...

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        """Return the event that ends a failed stream."""
        ...
