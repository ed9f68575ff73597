"""What the gateway asks of a protocol, and what is known of an HTTP request while it is answered.

A protocol is a folder beside this file and a line in app.py; docs/adding.md has the steps. It translates: from a body
to requests of the model, from the model's answers to its own objects. Of HTTP and gRPC it knows nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import RequestError
from engine.settings.config import Config
from engine.wire import Delta, Owner, StoredResponse


class Exchange(Protocol):
    """One readable request and its answer in the making, which is either streamed or gathered."""

    requests: list[dict[str, Any]]  # the model's, one a prompt
    answer_id: str  # by which the client knows the answer; may change until the first byte is sent
    names: Mapping[str, str]  # of the model's fields, where its client calls them otherwise
    stream: bool
    timeout_s: float | None  # for an answer of the model; None: the gateway's

    @property
    def num_tokens(self) -> int:
        """Generated so far, for the log."""
        ...

    def event(self, index: int, answer: Delta) -> bytes:
        """What a stream says of an answer to `requests[index]`, the end of the stream with the last; may be nothing.
        One request may have several answers, `answer.index` says of which it is."""
        ...

    def gather(self, index: int, answer: Delta) -> None:
        """Keeps what `whole` needs of an answer to `requests[index]`."""
        ...

    def whole(self) -> dict[str, Any]:
        """The object of an answer in one piece, when every request has had its last one."""
        ...


@dataclass(eq=False)
class RequestContext:
    """One HTTP request: for its protocol, for errors and for the log."""

    path: str
    model_name: str  # the served one
    protocols: Sequence[ClientProtocol]  # that it may speak: one when that is known
    headers: Mapping[str, str] = field(default_factory=dict)  # of the request
    req_id: str | None = None  # for errors, as soon as its protocol has found it
    request_id: str = ""  # for the response's header and the log
    given_id: str = ""  # the one that the client's header chooses for the answer
    max_tokens: int | None = None  # the longest answer that there is room for, if the client asked for more
    has_begun: bool = False  # the response's headers are sent
    exchange: Exchange | None = None
    owner: Owner = Owner()  # of the key that it carries
    traceparent: str = ""  # of its span, where it is traced
    late_status: int | None = None  # of a failure after the first byte
    previous: StoredResponse | None = None  # that the request goes on with
    num_labels: int = 0  # by which the model scores prompts, where that is asked
    config: Config = field(default_factory=Config)  # the server's


class ClientProtocol(Protocol):
    name: str  # for the log
    paths: Collection[str]  # where its requests are posted; a path may have several protocols
    content_type: str  # of a stream

    def fields(self, path: str) -> Mapping[str, dict[str, Any]]:
        """What a request may have, as JSON Schema by name: for the document at /openapi.json."""
        ...

    def needs(self, path: str) -> Collection[str]:
        """Of these fields a request must have one."""
        ...

    def example(self, path: str) -> dict[str, Any]:
        """A body of one of its requests."""
        ...

    def speaks(self, body: dict[str, Any]) -> bool:
        """Whether a body is one of its requests; the first in app.PROTOCOLS that says so has it."""
        ...

    def parse(self, body: dict[str, Any], context: RequestContext) -> Exchange:
        """Raises InvalidRequest."""
        ...

    def error(self, error: RequestError, context: RequestContext) -> dict[str, Any]:
        """The object of a refusal."""
        ...

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        """The end of a stream that has failed."""
        ...
