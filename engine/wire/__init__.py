"""The JSON between clients and the model: what a request may hold, and what comes back.

All that the gateway imports of the engine, but for errors, settings, log and address. How it travels through gRPC is in
engine/wire/triton.py, which needs tritonclient.
"""

from engine.wire.answer import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    TIMES,
    UNLIKELY,
    Aborted,
    Answer,
    Delta,
    Failure,
    Final,
    ModelState,
    OfPrompt,
    TokenLogprob,
    Usage,
    glance_at,
    read_answer,
    write_answer,
)
from engine.wire.checks import (
    MAX_LOGPROBS,
    MAX_REQ_ID_LEN,
    POOLINGS,
    SCORE,
    Check,
    int_in,
    json_object,
    kind_of,
    objects,
    shown,
    within,
)
from engine.wire.fields import FIELDS
from engine.wire.forms import FORMS, Form
from engine.wire.json_schemas import to_follow
from engine.wire.loras import LOAD_LORA, LORA_FIELDS, UNLOAD_LORA, Loras
from engine.wire.meanings import MEANINGS, described, plain
from engine.wire.owner import OWNER, Owner, owner_of, payload_with_owner, with_owner
from engine.wire.request import (
    ABORT,
    DETOKENIZE,
    METRICS,
    PROBE,
    PROBE_PAYLOAD,
    QUESTIONS,
    TOKENIZE,
    GenerationRequest,
    check_keys,
    may_be_urgent,
    misspelt,
    only_object,
    parse_request,
    req_id_of,
)
from engine.wire.schema import schema_of
from engine.wire.shared import SHARE, SHARED, as_line, lines_of, shared_of
from engine.wire.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS, Detokenized, Tokenized, checked
