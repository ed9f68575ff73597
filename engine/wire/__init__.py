"""The JSON between clients and the model: what a request may hold, and what comes back.

All that the gateway imports of the engine, but for errors, settings, log and address. How it travels through gRPC is in
engine/wire/triton.py, which needs tritonclient.
"""

from engine.wire.answer import (
    THOUGHT_END,
    TIMES,
    UNLIKELY,
    Answer,
    Delta,
    Failure,
    Final,
    ModelState,
    TokenLogprob,
    Usage,
    read_answer,
    write_answer,
)
from engine.wire.checks import MAX_LOGPROBS, MAX_REQ_ID_LEN, Check, int_in, kind_of, shown
from engine.wire.fields import FIELDS
from engine.wire.forms import FORMS, Form
from engine.wire.request import PROBE, GenerationRequest, only_object, parse_request, req_id_of

__all__ = [
    "FIELDS",
    "FORMS",
    "MAX_LOGPROBS",
    "MAX_REQ_ID_LEN",
    "PROBE",
    "THOUGHT_END",
    "TIMES",
    "UNLIKELY",
    "Answer",
    "Check",
    "Delta",
    "Failure",
    "Final",
    "Form",
    "GenerationRequest",
    "ModelState",
    "TokenLogprob",
    "Usage",
    "int_in",
    "kind_of",
    "only_object",
    "parse_request",
    "read_answer",
    "req_id_of",
    "shown",
    "write_answer",
]
