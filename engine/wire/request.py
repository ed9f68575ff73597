"""What a client asks of the Triton model: a list with one object. Nothing here knows tokens, Triton or HTTP.

Field names and error texts are the predecessor's where it had them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest, literally
from engine.sampling_parameters import PARAMETERS, PENALTIES, SamplingParameters
from engine.wire.checks import MAX_N, SCORE, kind_of, shown
from engine.wire.fields import FIELDS
from engine.wire.loras import LORA_FIELDS
from engine.wire.owner import OWNER
from engine.wire.shared import SHARE
from engine.wire.stored import STORE, STORED
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS, StructuredOutput

PROBE = "probe"  # a request with this key set is answered at once with the ModelState, with METRICS also its metrics
PROBE_PAYLOAD = b'[{"probe":true}]'  # so written, it is answered before all that waits to be read
METRICS = "metrics"
ABORT = "abort"  # a request with this key set ends the one with the req_id that it holds, and is answered with Aborted
MAX_URGENT_BYTES = 16 << 10  # of a probe or an abort: a req_id, however escaped
TOKENIZE, DETOKENIZE = "tokenize", "detokenize"  # one with this key is answered with Tokenized or Detokenized
# Keys that make a request none for an answer of the model, or that only the gateway may set
QUESTIONS = (PROBE, ABORT, SHARE, TOKENIZE, DETOKENIZE, STORE, STORED, *LORA_FIELDS)
MAX_KEYS = 1000  # of a request, most of them none of ours
MAX_UNKNOWN_KEYS = 100  # that are compared with ours
MAX_MISSPELT_LEN = 40  # characters; a longer key is none of ours, and comparing it takes long
NAMES = [key for name, field in FIELDS.items() for key in (name, *field.aliases)]
NOT_SEARCHED = (  # what changes logits, which a beam search does not
    *("bad_words", "bad_words_token_ids", "logit_bias", "structured_output", "pooling", "reasoning_max_tokens"),
)
EXCLUSIVE = ("topp", "infer_seed")
ACCEPTED_ONLY = (
    "stream",
    "return_usage",
    "response_type",
    "response_timeout",
    "enable_text_truncate",
    "model",
)

# Of others' requests, what would change the answer and is not of this protocol
REFUSED = (
    *("min_characters", "logits_processors", "logits_processors_args", "suffix", "echo"),
    *("top_logprobs", "structured_outputs", "functions", "stop_regex", "chat_template"),
    *("json_schema", "regex", "ebnf"),
)
LENGTHS = ("max_new_tokens", "max_completion_tokens")  # others' names of `max_dec_len`
OF_TEMPLATE = ("tools", "documents", "add_generation_prompt", "continue_final_message", "enable_thinking")


def may_be_urgent(payload: bytes) -> bool:
    """Whether it may be a probe, an abort, a stream or a question about a stored response, which wait for no other
    request; only reading it tells."""
    keys = (PROBE, ABORT, SHARE, STORED)
    return len(payload) <= MAX_URGENT_BYTES and any(b'"%s"' % key.encode() in payload for key in keys)


@dataclass(frozen=True)
class GenerationRequest:
    """One request as its client wrote it, checked field by field. None means: not given, take the default."""

    req_id: str
    parameters: SamplingParameters = SamplingParameters()  # by which its tokens are chosen
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | None = None
    apply_chat_template: bool = True  # of `text`; false continues the text as it stands
    chat_template_kwargs: dict[str, Any] | None = None
    max_dec_len: int | None = None
    cut_max_dec_len: bool = False  # where it is more than there is room for; else that is an error
    min_dec_len: int | None = None
    n: int = 1
    best_of: int | None = None  # answers that are made, or with use_beam_search begun, for n
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
    return_token_ids: bool = False  # of the prompt, and the one that ended the answer
    pooling: str | None = None  # the prompt's embedding is wanted, or its SCORE, and no answer
    text_pair: str | None = None  # scored together with `text`
    truncate_prompt_tokens: int | None = None  # only so many of the prompt, the last ones
    structured_output: StructuredOutput | None = None  # from one of STRUCTURED_OUTPUT_FIELDS
    reasoning_max_tokens: int | None = None  # then its thoughts end
    guided_decoding_disable_any_whitespace: bool | None = None  # in JSON; None: the server's setting
    traceparent: str | None = None  # W3C's: of which span its own are a part
    cache_salt: str | None = None  # requests with another one share no cached blocks
    lora_name: str | None = None  # of an adapter
    return_all_tokens: bool = False
    benchmark: bool = False
    timeout: float | None = None  # seconds for the first token; 0: as if not given
    priority: int = 0  # lower is earlier
    # Of an answer that goes on
    resume_from: tuple[int, ...] | None = None  # tokens that its client has of each answer already
    answer_ids: tuple[tuple[int, ...], ...] = ()  # each answer as far as it is known

    @property
    def is_chosen(self) -> bool:
        """Which answers are told is known at their end."""
        return self.use_beam_search or (self.best_of or 1) > self.n

    @property
    def is_repeatable(self) -> bool:
        """Whether the same request has the same answer once more."""
        is_greedy = self.parameters.temperature == 0 or self.parameters.top_k == 1
        return self.use_beam_search or self.infer_seed is not None or is_greedy

    @property
    def is_continuation(self) -> bool:
        """The answer goes on with the text of the prompt."""
        if self.text is not None and not self.apply_chat_template:
            return True
        return bool((self.chat_template_kwargs or {}).get("continue_final_message"))

    @property
    def source(self) -> str:
        """The field that its prompt comes from."""
        if self.input_ids is not None:
            return "input_ids"
        return "messages" if self.text is None else "text"


def parse_request(body: dict[str, Any]) -> GenerationRequest:
    """Checks the object that `only_object` found. Raises InvalidRequest with every problem, one sentence each."""
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
    problems += misspelt(body, NAMES, (PROBE, OWNER)) + _of_other_count(values) + _take_structured_output(values)
    problems += _of_search(values) + _of_others(body)
    if "text_pair" in values and ("text" not in values or "input_ids" in values or values.get("pooling") != SCORE):
        problems.append(InvalidRequest("The `{field}` needs `{text}`, and `pooling` to be `score`", field="text_pair"))
    if problems:
        raise problems[0] if len(problems) == 1 else _all_of(problems)
    for name in ACCEPTED_ONLY:
        values.pop(name, None)
    parameters: Any = {each.name: values.pop(each.field, each.default) for each in PARAMETERS}
    return GenerationRequest(**values, parameters=SamplingParameters(**parameters))


def _of_search(values: dict[str, Any]) -> list[InvalidRequest]:
    """Several answers of which the best are told: what does not go with them."""
    n, best_of = values.get("n", 1), values.get("best_of", MAX_N)
    if best_of < n:
        text = "The `{field}` is {value}, fewer than `{n}`, which is {limit}"
        return [InvalidRequest(text, field="best_of", value=best_of, limit=n)]
    if values.get("use_beam_search"):
        text = "The `{field}` cannot be kept with `{use_beam_search}`"
        names = [each.field for each in PENALTIES if values.get(each.field, each.neutral) != each.neutral]
        names += [name for name in NOT_SEARCHED if values.get(name)]
        return [
            InvalidRequest(text, field=values[name].field if name == "structured_output" else name) for name in names
        ]
    if values.get("length_penalty", 1) != 1:
        text = "The `{field}` needs `{use_beam_search}`"
        return [InvalidRequest(text, field="length_penalty", value=values["length_penalty"])]
    return []


def _of_others(body: dict[str, Any]) -> list[InvalidRequest]:
    text = "The `{field}` is not supported, it is {value}"
    problems = [InvalidRequest(text, field=name, value=shown(body[name])) for name in REFUSED if body.get(name)]
    text = "`{value}` is another protocol's, here it is `{field}`"
    problems += [InvalidRequest(text, field="max_dec_len", value=name) for name in LENGTHS if body.get(name)]
    text = "The `{field}` is a variable of the chat template, it belongs into `{chat_template_kwargs}`"
    return problems + [InvalidRequest(text, field=name) for name in OF_TEMPLATE if body.get(name) is not None]


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
    """The one object of `[{...}]`; a bare object is taken as well."""
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


def check_keys(body: dict[str, Any]) -> dict[str, Any]:
    """The body, before anybody looks at each of its keys. Raises InvalidRequest."""
    if len(body) > MAX_KEYS:
        text = "the request has {value} fields, the limit is {limit}"
        raise InvalidRequest(text, value=len(body), limit=MAX_KEYS)
    return body


def req_id_of(body: dict[str, Any]) -> str | None:
    """For an error response: the `req_id` of a body that may be wrong; None if there is no valid one."""
    try:
        return FIELDS["req_id"].check("req_id", body.get("req_id"))
    except InvalidRequest:
        return None


def _all_of(problems: list[InvalidRequest]) -> InvalidRequest:
    """One error that tells of each, and blames the first."""
    text = "; ".join(map(str, problems))
    return InvalidRequest(literally(text), **problems[0].cause)


def _of_other_count(values: dict[str, Any]) -> list[InvalidRequest]:
    n = values.get("n", 1)
    return [
        InvalidRequest("The `{field}` is for {value} answers, `n` is {limit}", field=name, value=len(given), limit=n)
        for name in ("resume_from", "answer_ids")
        if (given := values.get(name)) and len(given) != n
    ]


def misspelt(body: Mapping[str, Any], known: Collection[str], others: Collection[str] = ()) -> list[InvalidRequest]:
    """Unknown keys pass (clients send all sorts), unless they look like a known one that would change the answer;
    `others` are known to do nothing."""
    problems = []
    unknown = sorted(key for key in body.keys() - set(known) - set(others) if len(key) <= MAX_MISSPELT_LEN)
    for key in unknown[:MAX_UNKNOWN_KEYS]:
        if close := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
            text = "unknown field {value}, did you mean `{field}`?"
            problems.append(InvalidRequest(text, field=close[0], value=shown(key)))
    return problems
