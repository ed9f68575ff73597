"""Responses of the model to the gateway: msgspec structs, encoded as tagged msgpack arrays. Their native JSON is a list
with one object, or a bare object for a failure.

The model calls `write_answer`, the gateway `read_answer` and, for its clients, `native_json`. JSON field names are
FastDeploy's where it has them. Independent of tokenizers, Triton and HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from engine.errors import RequestError, error_of
from engine.wire.delta import Delta, Final, Usage
from engine.wire.loras import LoraList
from engine.wire.stored_response import StoredResponse
from engine.wire.tokens import DetokenizeResponse, TokenizeResponse

VERSION = "4.6"  # of FastDeploy, whose error object this is
# Shared, because it runs once per token: json.dumps would create an encoder for each call.
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """Refusal of a request, or the end of one that failed, with all its choices. Its JSON has the fields of a delta for
    clients that expect them; its counts are sums over all choices."""

    error: RequestError
    req_id: str | None = None  # None: the request has no valid req_id
    send_idx: int = 0
    usage: Usage = Usage()
    infer_seed: int | None = None
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {
            "req_id": self.req_id,
            "index": 0,
            "is_end": 1,
            "token_ids": [],
            "token": "",
            "send_idx": self.send_idx,
            "usage": self.usage.fields(),
            "infer_seed": self.infer_seed,
            "error_msg": str(self.error),
            "error_code": self.error.code,
            "error_type": self.error.kind,
            **{f"error_{name}": value for name, value in self.error.cause.items()},
            **({"retry_after": self.error.retry_after_s} if self.error.retry_after_s else {}),
            "version": VERSION,
            "timestamp": time.time(),
        }


class ModelState(msgspec.Struct, frozen=True, tag="state", array_like=True):
    """Response to a probe: readiness, limits and statistics of the model."""

    ready: bool
    reason: str = ""  # why it is not ready
    model_len: int = 0
    max_seq_len: int = 0
    max_dec_len: int = 0
    num_labels: int = 0  # of the classifier; 0: the model has none and generates text
    num_running: int = 0
    num_waiting: int = 0
    num_blocks_held: int = 0
    num_open: int = 0
    engine_silent_s: float = 0.0
    engine_step_s: float = 0.0  # duration of the running step so far
    num_restarts: int = 0
    loras: list[str] | None = None  # names of the loaded adapters
    metrics: list[Any] | None = None  # samples for gateway/metrics.py, if requested
    last_requests: list[Any] | None = None  # recently ended requests, the latest first, if requested
    num_waiting_tokens: int = 0  # prompt tokens of the waiting requests
    reads_images: bool = False
    model_hash: str = ""  # of the exported model's manifest and config; equal on machines that serve the same model
    engines: list[tuple[float, float]] = []  # engine_silent_s and engine_step_s of each engine if there are several
    fingerprint: int = 0  # of the arithmetic of the engine: servers that differ in it compute different answers
    usage: dict[str, tuple[int, float]] = {}  # open requests and recent tokens of API keys with limits, by name
    num_prefill_instances: int = 0  # connected ones, of a decode instance
    cache_port: int = 0  # where other replicas get cached blocks; 0: nowhere
    is_stopping: bool = False  # it does not become ready again
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, **msgspec.structs.asdict(self)}


class Aborted(msgspec.Struct, frozen=True, tag="aborted", array_like=True):
    """Response to an abort request."""

    req_id: str
    aborted: bool  # False: the owner has no such open request
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, "req_id": self.req_id, "aborted": self.aborted}


Answer = (
    Delta | Final | Failure | ModelState | Aborted | TokenizeResponse | DetokenizeResponse | LoraList | StoredResponse
)


def native_json(answer: Answer, names: Mapping[str, str] | None = None) -> bytes:
    """Return the JSON of a response as native clients get it. `names` maps native names of fields to those by which the
    client has called them, for the message of an error."""
    if not isinstance(answer, Failure):
        return JSON_ENCODER.encode([answer.fields()]).encode()
    fields = answer.fields()
    if answer.error.cause:
        fields["error_msg"] = answer.error.message(names or {})
        fields["error_template"] = answer.error.text  # for protocols with other field names
    # The text may quote the output of a chat template with a lone surrogate.
    return JSON_ENCODER.encode(fields).encode(errors="replace")


def write_error(error: RequestError) -> str:
    """Return the error as JSON, because it may quote numbers of any size and lone surrogates, which msgpack lacks."""
    return json.dumps([error.kind, error.text, error.retry_after_s, error.cause])


def read_error(_: type, written: str) -> RequestError:
    """Return the error that `write_error` has encoded."""
    kind, text, retry_after_s, cause = json.loads(written)
    return error_of(kind, text, retry_after_s, **cause)


write_answer = msgspec.msgpack.Encoder(enc_hook=write_error).encode
read_answer = msgspec.msgpack.Decoder(Answer, dec_hook=read_error).decode
