"""Answers of the model to the gateway: msgspec structs, which travel as tagged msgpack arrays, and their native JSON: a
list with one object, and a bare object for a failure.

`write_answer` is for the model's side, `read_answer` for the gateway, `native_json` for its clients. Field names of the
JSON are the predecessor's where it had them. Nothing here knows tokenizers, Triton or HTTP.
"""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import msgspec

from engine.errors import RequestError, error_of
from engine.wire.delta import Delta, Final, Usage
from engine.wire.loras import Loras
from engine.wire.stored import StoredResponse
from engine.wire.tokens import Detokenized, Tokenized

VERSION = "4.6"  # of the predecessor whose error object this is
# Once a token, so it is kept: json.dumps would make an encoder each time.
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """A refusal, or the end of a request that failed, with all its answers. It has the keys of a delta, for readers
    that expect these; what it counts is of all answers."""

    error: RequestError
    req_id: str | None = None  # None: the request has no valid one
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
    """The answer to a probe."""

    ready: bool
    reason: str = ""  # why not
    model_len: int = 0
    max_seq_len: int = 0
    max_dec_len: int = 0
    num_labels: int = 0  # that the model scores prompts by; 0: it has no head for that, and writes answers
    num_running: int = 0
    num_waiting: int = 0
    num_blocks_held: int = 0
    num_open: int = 0
    engine_silent_s: float = 0.0
    engine_step_s: float = 0.0  # for how long the step that runs has
    num_restarts: int = 0
    loras: list[str] | None = None  # the names of adapters
    metrics: list[Any] | None = None  # when asked for: of each sample what gateway/metrics.py writes
    last_requests: list[Any] | None = None  # the same: what has ended, the latest first, without its words
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, **msgspec.structs.asdict(self)}


class Aborted(msgspec.Struct, frozen=True, tag="aborted", array_like=True):
    """The answer to an abort."""

    req_id: str
    aborted: bool  # False: there is no such request of this owner, or no more
    is_end: ClassVar[bool] = True

    def fields(self) -> dict[str, Any]:
        return {"is_end": 1, "req_id": self.req_id, "aborted": self.aborted}


Answer = Delta | Final | Failure | ModelState | Aborted | Tokenized | Detokenized | Loras | StoredResponse


def native_json(answer: Answer) -> bytes:
    if not isinstance(answer, Failure):
        return JSON_ENCODER.encode([answer.fields()]).encode()
    fields = answer.fields()
    if answer.error.cause:
        fields["error_template"] = answer.error.text  # for who calls fields otherwise
    # The text may quote what a chat template makes of a lone surrogate.
    return JSON_ENCODER.encode(fields).encode(errors="replace")


def write_error(error: RequestError) -> str:
    """Errors quote clients: numbers of any size and lone surrogates, which msgpack does not have."""
    return json.dumps([error.kind, error.text, error.retry_after_s, error.cause])


def read_error(_: type, written: str) -> RequestError:
    kind, text, retry_after_s, cause = json.loads(written)
    return error_of(kind, text, retry_after_s, **cause)


write_answer = msgspec.msgpack.Encoder(enc_hook=write_error).encode
read_answer = msgspec.msgpack.Decoder(Answer, dec_hook=read_error).decode
