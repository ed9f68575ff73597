"""The JSON between clients and the model: what a request may hold, and what comes back.

All that the gateway imports of the engine, but for errors, settings, log and address. How it travels through gRPC is in
engine/wire/triton.py, which needs tritonclient.
"""

from engine.wire.answer import (
    TIMES,
    UNLIKELY,
    Answer,
    Delta,
    Failure,
    Final,
    ModelState,
    TokenLogprob,
    Usage,
    glance_at,
    read_answer,
    write_answer,
)
from engine.wire.checks import MAX_LOGPROBS, MAX_REQ_ID_LEN, Check, int_in, kind_of, shown
from engine.wire.fields import FIELDS
from engine.wire.request import (
    PROBE,
    PROBE_PAYLOAD,
    GenerationRequest,
    check_keys,
    only_object,
    parse_request,
    req_id_of,
)

__all__ = [
    "FIELDS",
    "MAX_LOGPROBS",
    "MAX_REQ_ID_LEN",
    "PROBE",
    "PROBE_PAYLOAD",
    "TIMES",
    "UNLIKELY",
    "Answer",
    "Check",
    "Delta",
    "Failure",
    "Final",
    "GenerationRequest",
    "ModelState",
    "TokenLogprob",
    "Usage",
    "check_keys",
    "glance_at",
    "int_in",
    "kind_of",
    "only_object",
    "parse_request",
    "read_answer",
    "req_id_of",
    "shown",
    "write_answer",
]
