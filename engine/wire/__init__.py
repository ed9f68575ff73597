"""Protocol between the gateway and the model: requests as JSON, responses as msgpack.

Besides errors, settings, log and address this is the only package of the engine that the gateway imports. The transport
by gRPC is in engine/wire/triton.py, which needs tritonclient.
"""

from engine.wire.answer import Aborted, Answer, Failure, ModelState, native_json, read_answer, write_answer
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
from engine.wire.delta import (
    MIN_LOGPROB,
    REASONING_BEGIN,
    REASONING_END,
    TIMES,
    Delta,
    Final,
    PromptDetails,
    TokenLogprob,
    Usage,
    finite_logprob,
)
from engine.wire.field_descriptions import FIELD_DESCRIPTIONS, field_schemas, native_defaults, strip_links
from engine.wire.fields import FIELDS
from engine.wire.images import ImagePart, has_images, image_part, image_parts, is_image_part, put_images, take_images
from engine.wire.loras import LOAD_LORA, LORA_FIELDS, UNLOAD_LORA, LoraList
from engine.wire.owner import OWNER, Owner, owner_of, payload_with_owner, with_owner
from engine.wire.request import (
    ABORT,
    CONTROL_KEYS,
    DETOKENIZE,
    GATEWAY_KEYS,
    METRICS,
    PROBE,
    PROBE_PAYLOAD,
    TOKENIZE,
    GenerationRequest,
    check_keys,
    may_be_urgent,
    misspelt,
    only_object,
    parse_request,
    req_id_of,
    without_gateway_keys,
)
from engine.wire.schema import schema_of
from engine.wire.shared_answers import SHARE, SHARED, SharedAnswers, read_shared, shared_of, write_shared
from engine.wire.stored_response import (
    CANCEL,
    CANCELLED,
    COMPLETED,
    DELETE,
    DELETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    RETRIEVE,
    STORE,
    STORED,
    StoredResponse,
    StoreOptions,
    stored_action_of,
    storing_of,
)
from engine.wire.structured_output import StructuredOutput, json_schema, lenient_json_schema
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS, schema_check
from engine.wire.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS, DetokenizeResponse, TokenizeResponse, check_fields
