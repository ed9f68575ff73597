"""Trace spans in OpenTelemetry's protocol, OTLP over HTTP as JSON, sent to OTEL_EXPORTER_OTLP_ENDPOINT. Sending never
blocks callers: spans that the collector does not accept in time are dropped. Independent of requests."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import secrets
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine import __version__
from engine.settings.config import Config
from engine.settings.served import names_in

log = logging.getLogger(__name__)

MAX_WAITING = 4096  # spans; further ones are dropped
MAX_AT_ONCE = 512
GATHER_S = 1.0  # before what has come is sent
TIMEOUT_S = 5.0
FINAL_RESPONSES_S = 2.0
COMPLAIN_EVERY_S = 60.0
INTERNAL, SERVER = 1, 2  # kinds
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Context(NamedTuple):
    """Trace context of a span, as in W3C's `traceparent`."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @classmethod
    def read(cls, traceparent: str | None) -> Context:
        """Return the context of a `traceparent` header; a new trace without a parent if it is missing or invalid."""
        found = TRACEPARENT.fullmatch(traceparent or "")
        if not found or not (int(found[1], 16) and int(found[2], 16)):
            return cls(secrets.token_hex(16), "")
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))

    def child(self) -> Context:
        return self._replace(span_id=secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


class Span(NamedTuple):
    name: str
    own: Context
    parent_id: str
    start: float  # seconds since the epoch
    end: float
    attributes: dict[str, Any] = {}  # noqa: RUF012 - never modified
    kind: int = INTERNAL
    error: str = ""

    def fields(self) -> dict[str, Any]:
        return {
            "traceId": self.own.trace_id,
            "spanId": self.own.span_id,
            **({"parentSpanId": self.parent_id} if self.parent_id else {}),
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": str(int(self.start * 1e9)),
            "endTimeUnixNano": str(int(max(self.start, self.end) * 1e9)),
            "attributes": _attributes(self.attributes),
            "status": {"code": 2, "message": self.error} if self.error else {},
        }


class Tracer:
    """Sends spans from a thread of its own."""

    def __init__(self, config: Config, process: str):
        self.model_name = names_in(config.served_model_name)[0]
        self._url = config.otlp_endpoint.rstrip("/") + "/v1/traces"
        self._headers = config.otlp_header_fields
        about = {"service.name": config.otlp_service_name, "service.version": __version__, "process.pid": os.getpid()}
        self._resource = {"attributes": _attributes({**about, "service.instance.id": process})}
        self._waiting: queue.Queue[Span | None] = queue.Queue(MAX_WAITING)
        self._num_lost, self._complained_at = 0, -COMPLAIN_EVERY_S
        self._thread = threading.Thread(target=self._send_forever, name="tracer", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, process: str) -> Tracer | None:
        return cls(config, process) if config.otlp_endpoint else None

    def send(self, spans: Sequence[Span]) -> None:
        """Queue spans for sending and return at once. Spans that do not fit the queue are dropped and counted."""
        try:
            for span in spans:
                self._waiting.put_nowait(span)
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        try:
            self._waiting.put_nowait(None)
            self._thread.join(FINAL_RESPONSES_S)
        except queue.Full:
            pass

    def _send_forever(self) -> None:
        goes_on = True
        while goes_on:
            spans: list[Span | None] = [self._waiting.get()]
            deadline = time.monotonic() + GATHER_S
            while spans[-1] is not None and len(spans) < MAX_AT_ONCE and (left := deadline - time.monotonic()) > 0:
                try:
                    spans.append(self._waiting.get(timeout=left))
                except queue.Empty:
                    break
            goes_on = spans[-1] is not None
            self._post([span.fields() for span in spans if span])

    def _post(self, spans: Sequence[dict[str, Any]]) -> None:
        if not spans:
            return
        scope = {"scope": {"name": "llm-server"}, "spans": spans}
        body = json.dumps({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            urllib.request.urlopen(urllib.request.Request(self._url, body, headers), timeout=TIMEOUT_S).close()
        except Exception as error:  # also what is no HTTP
            self._num_lost += len(spans)
            if time.monotonic() - self._complained_at > COMPLAIN_EVERY_S:
                self._complained_at = time.monotonic()
                log.warning("%d spans are lost: OTEL_EXPORTER_OTLP_ENDPOINT: %s", self._num_lost, error)


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
