"""Requests to the Triton model: a list with one JSON object. Independent of tokenizers, Triton and HTTP.

Field names and error texts are FastDeploy's where it has them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.sampling_parameters import PARAMETERS, PENALTIES, SamplingParameters
from engine.wire.checks import MAX_N, SCORE, kind_of, shown
from engine.wire.fields import FIELDS
from engine.wire.images import ImagePart, take_images
from engine.wire.loras import LORA_FIELDS
from engine.wire.owner import OWNER
from engine.wire.shared_answers import SHARE, SHARED
from engine.wire.stored_response import STORE, STORED
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS, StructuredOutput

PROBE = "probe"  # a request with this key set is answered at once with the ModelState, with METRICS also its metrics
PROBE_PAYLOAD = b'[{"probe":true}]'  # this exact text is answered without parsing
METRICS = "metrics"
ABORT = (
    "abort"  # a request with this key set ends the one with the req_id that it accepts, and is answered with Aborted
)
MAX_URGENT_BYTES = 16 << 10  # of a probe or an abort: a req_id, however escaped
# A request with one of these fields is answered with a TokenizeResponse or a DetokenizeResponse.
TOKENIZE, DETOKENIZE = "tokenize", "detokenize"
GATEWAY_KEYS = (SHARE, SHARED, STORE, STORED, OWNER)  # only gateways may set these
# Text that may contain GATEWAY_KEYS: their names, escaped letters, and the null bytes of UTF-16 and UTF-32.
MAY_HAVE_GATEWAY_KEYS = re.compile(b"|".join([*(key.encode() for key in GATEWAY_KEYS), rb"\\u00[4-7]", rb"\0"]))
# Keys of requests that do not generate text, and keys that only the gateway may set
CONTROL_KEYS = (PROBE, ABORT, SHARE, SHARED, TOKENIZE, DETOKENIZE, STORE, STORED, *LORA_FIELDS)
MAX_KEYS = 1000  # fields of a request, including unknown ones
MAX_UNKNOWN_KEYS = 100  # unknown fields that are compared with ours for misspellings
MAX_MISSPELT_LEN = 40  # characters; comparing longer keys takes long, and ours are shorter
NAMES = [key for name, field in FIELDS.items() for key in (name, *field.aliases)]
UNSUPPORTED_BY_BEAM_SEARCH = (  # fields that change logits or constrain tokens
    *("bad_words", "bad_words_token_ids", "logit_bias", "structured_output", "pooling", "reasoning_max_tokens"),
)
EXCLUSIVE = ("topp", "infer_seed")
IGNORED = (
    "stream",
    "return_usage",
    "response_type",
    "response_timeout",
    "enable_text_truncate",
    "model",
)

# Fields of other servers that would change the answer and are not supported
REFUSED = (
    *("min_characters", "logits_processors", "logits_processors_args", "suffix", "echo"),
    *("top_logprobs", "structured_outputs", "functions", "stop_regex", "chat_template"),
    *("json_schema", "regex", "ebnf"),
)
FOREIGN_LENGTHS = ("max_new_tokens", "max_completion_tokens")  # names of `max_dec_len` in other protocols
TEMPLATE_VARIABLES = ("tools", "documents", "add_generation_prompt", "continue_final_message", "enable_thinking")


def may_be_urgent(payload: bytes) -> bool:
    """Return whether the text may be a probe, an abort, a shared stream or an action on a stored response, which are
    handled before other requests. Only parsing it can tell for certain."""
    keys = (PROBE, ABORT, SHARE, STORED)
    return len(payload) <= MAX_URGENT_BYTES and any(b'"%s"' % key.encode() in payload for key in keys)


@dataclass(frozen=True)
class GenerationRequest:
    """Request for text or prompt outputs, checked field by field. None stands for a field that is not given."""

    req_id: str
    parameters: SamplingParameters = SamplingParameters()  # sampling parameters that the ops implement
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    images: tuple[ImagePart, ...] = ()  # of the messages, which have their digests
    mm_processor_kwargs: dict[str, int] | None = None  # limits of the pixels of each image
    system: str | None = None
    apply_chat_template: bool = True  # of `text`; false continues the text as it stands
    chat_template_kwargs: dict[str, Any] | None = None
    max_dec_len: int | None = None
    cut_max_dec_len: bool = False  # reduce max_dec_len if it does not fit; otherwise that is an error
    min_dec_len: int | None = None
    n: int = 1
    best_of: int | None = None  # candidates (or beams, with use_beam_search) from which the best n are returned
    use_beam_search: bool = False
    length_penalty: float = 1.0
    infer_seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_sequences: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # -1: none, 0: of the chosen token, k: and of the k likeliest
    prompt_logprobs: int = -1  # the same, of the tokens of the prompt
    return_token_ids: bool = False  # return token ids of the prompt and the stop token
    pooling: str | None = None  # return the embedding of the prompt or its SCORE, and no answer
    text_pair: str | None = None  # scored together with `text`
    truncate_prompt_tokens: int | None = None  # keep so many tokens at the end of the prompt; -1: as many as fit
    structured_output: StructuredOutput | None = None  # from one of STRUCTURED_OUTPUT_FIELDS
    reasoning_max_tokens: int | None = None  # limit of the reasoning before the answer
    guided_decoding_disable_any_whitespace: bool | None = None  # in JSON; None: the server's setting
    traceparent: str | None = None  # W3C trace context
    cache_salt: str | None = None  # requests with different salts share no cached blocks
    lora_name: str | None = None  # of an adapter
    return_all_tokens: bool = False
    benchmark: bool = False
    timeout: float | None = None  # seconds for the first token; 0: as if not given
    priority: int = 0  # lower is earlier
    # Resumption of an answer
    resume_from: tuple[int, ...] | None = None  # for each choice: tokens that the client has
    answer_ids: tuple[tuple[int, ...], ...] = ()  # known tokens of each choice

    @property
    def is_chosen(self) -> bool:
        """Return whether the choices are selected among more candidates when all of them have finished."""
        return self.use_beam_search or (self.best_of or 1) > self.n

    @property
    def is_repeatable(self) -> bool:
        """Return whether repeating the request gives the same answer."""
        is_greedy = self.parameters.temperature == 0 or self.parameters.top_k == 1
        return self.use_beam_search or self.infer_seed is not None or is_greedy

    @property
    def is_continuation(self) -> bool:
        """Return whether the answer continues the text of the prompt, rather than starting a new turn."""
        if self.text is not None and not self.apply_chat_template:
            return True
        return bool((self.chat_template_kwargs or {}).get("continue_final_message"))

    @property
    def source(self) -> str:
        """Name of the field that contains the prompt."""
        if self.input_ids is not None:
            return "input_ids"
        return "messages" if self.text is None else "text"


def parse_request(body: dict[str, Any]) -> GenerationRequest:
    """Check the body of a request. Raises one InvalidRequest that lists all problems."""
    problems: list[InvalidRequest] = []
    values: dict[str, Any] = {}
    for name, field in FIELDS.items():
        keys = [key for key in (name, *field.aliases) if body.get(key) is not None]
        try:
            if len(keys) > 1 and name in EXCLUSIVE:
                raise InvalidRequest("Only one of {value} should be set", field=name, value=str(tuple(keys)))
            if keys:
                values[name] = field.check(keys[0], body[keys[0]])
        except InvalidRequest as error:
            problems.append(error)
    if body.get("req_id") is None:
        problems.append(InvalidRequest("The input parameters should contain `{field}`.", field="req_id"))
    if all(body.get(name) is None for name in ("text", "input_ids", "messages")):
        text = "The input parameters should contain either `{field}`, `{input_ids}` or `{messages}`"
        problems.append(InvalidRequest(text, field="text"))
    problems += misspelt(body, NAMES, (PROBE, OWNER)) + _check_counts(values) + _take_structured_output(values)
    problems += _check_beam_search(values) + _check_foreign_fields(body)
    if "text_pair" in values and ("text" not in values or "input_ids" in values or values.get("pooling") != SCORE):
        problems.append(InvalidRequest("The `{field}` needs `{text}`, and `pooling` to be `score`", field="text_pair"))
    if problems:
        raise problems[0] if len(problems) == 1 else _combined(problems)
    for name in IGNORED:
        values.pop(name, None)
    values |= _images(values)
    parameters: Any = {each.name: values.pop(each.field, each.default) for each in PARAMETERS}
    return GenerationRequest(**values, parameters=SamplingParameters(**parameters))


def _images(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of messages, which may have images, with these apart."""
    if "messages" not in values:
        return {}
    messages, images = take_images(values["messages"])
    return {"messages": messages, "images": images}


def _check_beam_search(values: dict[str, Any]) -> list[InvalidRequest]:
    """Return the problems of fields that do not go with beam search or `best_of`."""
    n, best_of = values.get("n", 1), values.get("best_of", MAX_N)
    if best_of < n:
        text = "The `{field}` is {value}, fewer than `{n}`, which is {limit}"
        return [InvalidRequest(text, field="best_of", value=best_of, limit=n)]
    if values.get("use_beam_search"):
        text = "The `{field}` cannot be combined with `{use_beam_search}`"
        names = [each.field for each in PENALTIES if values.get(each.field, each.neutral) != each.neutral]
        names += [name for name in UNSUPPORTED_BY_BEAM_SEARCH if values.get(name)]
        return [
            InvalidRequest(text, field=values[name].field if name == "structured_output" else name) for name in names
        ]
    if values.get("length_penalty", 1) != 1:
        text = "The `{field}` needs `{use_beam_search}`"
        return [InvalidRequest(text, field="length_penalty", value=values["length_penalty"])]
    return []


def _check_foreign_fields(body: dict[str, Any]) -> list[InvalidRequest]:
    text = "The `{field}` is not supported, it is {value}"
    problems = [InvalidRequest(text, field=name, value=shown(body[name])) for name in REFUSED if body.get(name)]
    text = "`{value}` is a field of another protocol, its name here is `{field}`"
    problems += [InvalidRequest(text, field="max_dec_len", value=name) for name in FOREIGN_LENGTHS if body.get(name)]
    text = "The `{field}` is a variable of the chat template, it belongs into `{chat_template_kwargs}`"
    return problems + [InvalidRequest(text, field=name) for name in TEMPLATE_VARIABLES if body.get(name) is not None]


def _take_structured_output(values: dict[str, Any]) -> list[InvalidRequest]:
    """Move the constraint from whichever field requests it to `structured_output`, and return the problems."""
    found = [output for name in STRUCTURED_OUTPUT_FIELDS if (output := values.pop(name, None))]
    if len(found) > 1:
        names = str(tuple(output.field for output in found))
        return [InvalidRequest("Only one of {value} should be set", field=found[0].field, value=names)]
    if not found:
        return []
    [values["structured_output"]] = found
    if "min_dec_len" in values:
        text = f"The `{{field}}` cannot be combined with `{{{found[0].field}}}`, whose grammar ends the answer"
        return [InvalidRequest(text, field="min_dec_len", value=values["min_dec_len"])]
    return []


def only_object(payload: bytes | str) -> dict[str, Any]:
    """Return the object of the JSON text `[{...}]` or `{...}`. Raises InvalidRequest."""
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request is not valid JSON: {error}") from None
    if isinstance(body, dict):
        return check_keys(body)
    if not isinstance(body, list):
        raise InvalidRequest(f"the request must be a list with one object, it is {kind_of(body)}")
    if len(body) != 1:
        text = "request data should not be empty and query num {value} should be {limit}"
        raise InvalidRequest(text, value=len(body), limit=1)
    if not isinstance(body[0], dict):
        raise InvalidRequest(f"the request must be a list with one object, its item is {kind_of(body[0])}")
    return check_keys(body[0])


def without_gateway_keys(payload: bytes) -> bytes:
    """Return the JSON text of a client without GATEWAY_KEYS. It is parsed only if it may contain some, because parsing
    takes long. Raises InvalidRequest."""
    if not MAY_HAVE_GATEWAY_KEYS.search(payload):
        return payload
    body = only_object(payload)
    return json.dumps([{name: value for name, value in body.items() if name not in GATEWAY_KEYS}]).encode()


def check_keys(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body if it has at most MAX_KEYS fields. Raises InvalidRequest."""
    if len(body) > MAX_KEYS:
        text = "the request has {value} fields, the limit is {limit}"
        raise InvalidRequest(text, value=len(body), limit=MAX_KEYS)
    return body


def req_id_of(body: dict[str, Any]) -> str | None:
    """Return the `req_id` of an unchecked body for an error response; None if it has no valid one."""
    try:
        return FIELDS["req_id"].check("req_id", body.get("req_id"))
    except InvalidRequest:
        return None


def _combined(problems: list[InvalidRequest]) -> InvalidRequest:
    """Return one error with the messages of all problems and the field of the first one."""
    return InvalidRequest("; ".join(each.as_template() for each in problems), **problems[0].cause)


def _check_counts(values: dict[str, Any]) -> list[InvalidRequest]:
    n = values.get("n", 1)
    return [
        InvalidRequest("The `{field}` is for {value} answers, `n` is {limit}", field=name, value=len(given), limit=n)
        for name in ("resume_from", "answer_ids")
        if (given := values.get(name)) and len(given) != n
    ]


def misspelt(body: Mapping[str, Any], known: Collection[str], others: Collection[str] = ()) -> list[InvalidRequest]:
    """Return a problem for each key that looks like a misspelling of a `known` one. Other unknown keys are allowed,
    because clients send many; keys in `others` are not compared."""
    problems = []
    unknown = sorted(key for key in body.keys() - set(known) - set(others) if len(key) <= MAX_MISSPELT_LEN)
    for key in unknown[:MAX_UNKNOWN_KEYS]:
        if close := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
            text = "unknown field {value}, did you mean `{field}`?"
            problems.append(InvalidRequest(text, field=close[0], value=shown(key)))
    return problems
