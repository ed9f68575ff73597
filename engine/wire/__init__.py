"""The JSON between clients and the model: what a request may hold, and what comes back.

All that the gateway imports of the engine, but for errors, log and address.
"""

from engine.wire.fields import FIELDS, kind_of, shown
from engine.wire.request import (
    PROBE,
    GenerationRequest,
    delta,
    failure,
    model_state,
    only_object,
    parse_request,
    read_answer,
    req_id_of,
)

__all__ = [
    "FIELDS",
    "PROBE",
    "GenerationRequest",
    "delta",
    "failure",
    "kind_of",
    "model_state",
    "only_object",
    "parse_request",
    "read_answer",
    "req_id_of",
    "shown",
]
