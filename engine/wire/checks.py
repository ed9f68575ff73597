"""Checks of request fields. A check takes the name that the client used and the value, and returns the value to use. It
raises InvalidRequest, which names the field, the value and the limit."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from engine.errors import InvalidRequest
from engine.sampling_parameters import Parameter
from engine.wire.images import IMAGE, UNSUPPORTED, ImagePartError, checked_part, path_of
from engine.wire.schema import ID, IDS, MESSAGE, Check, accepts

MAX_STOP_SEQUENCES = 64  # and bad words
MAX_STOP_LEN = 1024  # characters
MAX_TOKEN_IDS = 1024  # stop tokens, banned tokens, or tokens with a bias
REASONING_NAMES = ("reasoning_content", "reasoning")  # of a message; the second is that of newer versions of vLLM
MAX_MESSAGES = 10_000  # checks and chat template take some microseconds per message, however short it is
MAX_LOGPROBS = 20
MAX_REQ_ID_LEN = 256
MAX_N = 16  # answers to one prompt
POOLINGS = ("last", "mean")
SCORE = "score"  # another value of `pooling`: the output of the classifier for the last token
TEXTS = ("refusal", "input_text", "output_text")  # kinds of parts that are text for the model, as in OpenAI's APIs
TOKEN_ID = re.compile("[0-9]{1,10}")

SHORT_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN}


def shown(value: Any) -> str:
    """Return a client's value for an error message: escaped, and at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= 80 else f"{text[:77]}..."


def brief(value: Any) -> Any:
    """Return a client's value for `value` of an error: numbers and booleans unchanged, anything else by `shown`."""
    return value if isinstance(value, bool) or _is_number(value) else shown(value)


def kind_of(value: Any) -> str:
    """Return the name of the JSON type of a value, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


def refusal(key: str, rest: str, value: Any = None, limit: Any = None) -> InvalidRequest:
    """Return the error of the field `key`; `rest` follows its name in the message."""
    return InvalidRequest(f"The `{{field}}` {rest}", field=key, value=value, limit=limit)


def within(key: str, place: str, check: Check, value: Any) -> Any:
    """Check a part of the field `key`. Errors name the field and `place`, the path of the part in it."""
    try:
        return check(key, value)
    except InvalidRequest as error:
        raise InvalidRequest(error.text.replace("{field}", "{field}" + place), **error.cause) from None


@accepts(type="string")
def string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(key, "in input parameters must be a string, it is {value}", kind_of(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refusal(key, "in input parameters must be valid Unicode, it has a lone surrogate") from None
    return value


@accepts(type="string", minLength=1)
def filled_string(key: str, value: Any) -> str:
    if not string(key, value):
        raise refusal(key, "in input parameters cannot be empty")
    return value


@accepts(type=["string", "integer"], minLength=1, maxLength=MAX_REQ_ID_LEN)
def req_id(key: str, value: Any) -> str:
    return short_name(key, str(value) if _is_int(value) else value)


@accepts(type="string", minLength=1, maxLength=MAX_REQ_ID_LEN)
def short_name(key: str, value: Any) -> str:
    text = filled_string(key, value)
    if len(text) > MAX_REQ_ID_LEN:
        raise refusal(key, "has {value} characters, the limit is {limit}", len(text), MAX_REQ_ID_LEN)
    return text


@accepts(type="boolean")
def boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise refusal(key, "must be a boolean, it is {value}", brief(value))
    return bool(value)


@accepts(type="integer", minimum=1)
def positive_int(key: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise refusal(key, "must be an integer and greater than 0, it is {value}", brief(value))
    return value


@accepts(anyOf=[{"type": "integer", "minimum": 1}, {"enum": [-1]}])
def truncation(key: str, value: Any) -> int:
    return -1 if _is_int(value) and value == -1 else positive_int(key, value)


@accepts(type="integer", minimum=0)
def max_len(key: str, value: Any) -> int:
    if not _is_int(value) or value < 0:
        raise refusal(key, "must be an integer and at least 0, it is {value}", brief(value))
    return value


def int_in(low: int, high: int) -> Check:
    """Return the check of an integer from `low` to `high`."""

    @accepts(type="integer", minimum=low, maximum=high)
    def check(key: str, value: Any) -> int:
        if not _is_int(value) or not low <= value <= high:
            raise refusal(key, "must be an integer in {limit}, it is {value}", brief(value), [low, high])
        return value

    return check


def number_in(low: float, high: float) -> Check:
    """Return the check of a number from `low` to `high`."""

    @accepts(type="number", minimum=low, maximum=high)
    def check(key: str, value: Any) -> float:
        if not _is_number(value) or not low <= value <= high:
            raise refusal(key, "must be in {limit}, it is {value}", brief(value), [low, high])
        return float(value)

    return check


def sampling(parameter: Parameter) -> Check:
    """Return the check of a sampling parameter. Its `off` value becomes the neutral one, and large values are clipped
    if the parameter allows it."""
    is_int, low = parameter.type is int, min(parameter.low, parameter.low if parameter.off is None else parameter.off)
    limits = {"minimum": low} if parameter.is_clipped else {"minimum": low, "maximum": parameter.high}
    limit = None if parameter.is_clipped else [parameter.low, parameter.high]
    is_right = _is_int if is_int else _is_number

    @accepts(type="integer" if is_int else "number", **limits)
    def check(key: str, value: Any) -> float:
        if not is_right(value) or value < low or (value > parameter.high and not parameter.is_clipped):
            raise refusal(key, f"{parameter.needs}, it is {{value}}", brief(value), limit)
        if value == parameter.off:
            return parameter.neutral
        return min(parameter.type(value), parameter.type(parameter.high))

    return check


@accepts(type=["boolean", "integer"], minimum=-1, maximum=MAX_LOGPROBS)
def logprobs(key: str, value: Any) -> int:
    if isinstance(value, bool):
        return 0 if value else -1
    return int_in(-1, MAX_LOGPROBS)(key, value)


def _filled_list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise refusal(key, "in input parameters must be a list, it is {value}", kind_of(value))
    if not value:
        raise refusal(key, "in input parameters cannot be empty")
    return value


@accepts(**IDS, minItems=1)
def ids(key: str, value: Any) -> list[int]:
    _filled_list(key, value)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:  # in C: half the time of a loop
        wrong = next(item for item in value if not _is_int(item) or not 0 <= item < 2**31)
        raise refusal(key, "must hold token ids, {value} is none", brief(wrong))
    return value


@accepts(anyOf=[ID, {**IDS, "maxItems": MAX_TOKEN_IDS}])
def few_ids(key: str, value: Any) -> tuple[int, ...]:
    """Check one or up to MAX_TOKEN_IDS token ids; the limit is low because each id takes time in every step."""
    if value == []:
        return ()
    token_ids = tuple(ids(key, [value] if _is_int(value) else value))
    return _at_most(MAX_TOKEN_IDS, key, token_ids)


@accepts(anyOf=[ID, {**IDS, "minItems": 1, "maxItems": MAX_N}])
def counts(key: str, value: Any) -> tuple[int, ...]:
    """Check numbers of tokens, one per choice; a bare number stands for a single choice."""
    items = [value] if _is_int(value) else _at_most(MAX_N, key, _filled_list(key, value))
    if wrong := [item for item in items if not _is_int(item) or not 0 <= item < 2**31]:
        raise refusal(key, "must be a number of tokens, it is {value}", brief(wrong[0]))
    return tuple(items)


@accepts(anyOf=[IDS, {"type": "array", "items": IDS, "maxItems": MAX_N}])
def answer_ids(key: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Check the token ids of each choice; a flat list stands for a single choice."""
    items = _at_most(MAX_N, key, value) if value and isinstance(value, list) and isinstance(value[0], list) else [value]
    return tuple(() if item == [] else tuple(ids(key, item)) for item in items)


def _at_most(limit: int, key: str, items: Any) -> Any:
    if len(items) > limit:
        raise refusal(key, "has {value} items, the limit is {limit}", len(items), limit)
    return items


@accepts(anyOf=[SHORT_STRING, {"type": "array", "items": SHORT_STRING, "maxItems": MAX_STOP_SEQUENCES}])
def strings(key: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise refusal(key, "must be a string or a list of strings, it is {value}", kind_of(value))
    return tuple(_short_string(key, item) for item in _at_most(MAX_STOP_SEQUENCES, key, items))


def _short_string(key: str, value: Any) -> str:
    text = filled_string(key, value)
    if len(text) > MAX_STOP_LEN:
        raise refusal(key, "has an item of {value} characters, the limit is {limit}", len(text), MAX_STOP_LEN)
    return text


@accepts(type="array", items=MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
def messages(key: str, value: Any) -> list[dict[str, Any]]:
    """Check the messages of a chat. The role of a message defaults to `user`."""
    checked = []
    for index, item in enumerate(_at_most(MAX_MESSAGES, key, _filled_list(key, value))):
        if not isinstance(item, dict):
            text = f"The items in {{field}} must be objects, {{field}}[{index}] is {kind_of(item)}: {{value}}"
            raise InvalidRequest(text, field=key, value=brief(item))
        if item.get("content") is None and isinstance(item.get("refusal"), str):  # an answer that a client sends back
            item = {**item, "content": item["refusal"]}
        if item.get("content") is None and not item.get("tool_calls"):
            if not any(isinstance(item.get(name), str) for name in REASONING_NAMES):
                text = f"The item in {{field}} must include `content`, {{field}}[{index}] has none"
                raise InvalidRequest(text, field=key)
            item = {**item, "content": ""}  # an answer that was cut in its reasoning
        within(key, f"[{index}].role", filled_string, item.get("role", "user"))
        content = item.get("content", "")
        if isinstance(content, list):
            item = {
                **item,
                "content": [_part(key, f"[{index}].content[{at}]", each) for at, each in enumerate(content)],
            }
        elif content is not None:
            within(key, f"[{index}].content", string, content)
        checked.append({"role": "user", **item})
    return checked


def _part(key: str, place: str, part: Any) -> dict[str, Any]:
    """Check one content part. `place` is its path in the messages."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        within(key, f"{place}.text", string, part.get("text"))
        return part
    if kind in TEXTS:
        name = "refusal" if kind == "refusal" else "text"
        return {"type": "text", "text": within(key, f"{place}.{name}", string, part.get(name))}
    if kind == IMAGE:
        try:
            return checked_part(part, place)
        except ImagePartError as error:
            text = f"The `{{field}}{path_of(part, place)}` {error.problem}"
            raise InvalidRequest(text, field=key, value=brief(error.value)) from None
    if kind in UNSUPPORTED:
        text = f"The `{{field}}{place}` is of type {{value}}, which is not supported: parts are of type text or {IMAGE}"
        raise InvalidRequest(text, field=key, value=kind)
    text = f"The `{{field}}{place}` must be a part of type `text` or `{IMAGE}`, it is {{value}}"
    raise InvalidRequest(text, field=key, value=brief(part))


@accepts(
    type="object",
    propertyNames={"pattern": "^[0-9]{1,9}$"},
    additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    maxProperties=MAX_TOKEN_IDS,
)
def logit_bias(key: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise refusal(key, "must be an object of token id and bias, it is {value}", kind_of(value))
    for token_id, bias in _at_most(MAX_TOKEN_IDS, key, value).items():
        if not TOKEN_ID.fullmatch(token_id) or int(token_id) >= 2**31:
            raise refusal(key, "must have token ids as keys, {value} is none", shown(token_id))
        within(key, f".{token_id}", number_in(-100, 100), bias)
    return tuple((int(token_id), float(bias)) for token_id, bias in value.items())


@accepts(type="object")
def json_object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal(key, "must be an object, it is {value}", kind_of(value))
    return value


@accepts(type="array", items={"type": "object"})
def objects(key: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise refusal(key, "must be a list, it is {value}", kind_of(value))
    return [within(key, f"[{index}]", json_object, item) for index, item in enumerate(value)]


PIXELS = ("min_pixels", "max_pixels")  # of `mm_processor_kwargs`; FastDeploy writes image_ in front of them
MAX_PIXELS = 1 << 26
PIXEL_COUNT = {"type": "integer", "minimum": 1, "maximum": MAX_PIXELS}


@accepts(type="object", properties={**dict.fromkeys((*PIXELS, *(f"image_{each}" for each in PIXELS)), PIXEL_COUNT)})
def mm_processor_kwargs(key: str, value: Any) -> dict[str, int]:
    """Check the limits of the pixels of an image, and return them by their names in PIXELS. Other options are those of
    videos and of other processors, which do not change how an image is read here."""
    limits: dict[str, int] = {}
    for name, each in json_object(key, value).items():
        own = name.removeprefix("image_")
        if own in PIXELS and each is not None:
            limits[own] = within(key, f".{name}", int_in(1, MAX_PIXELS), each)
    return limits


@accepts(enum=["fastdeploy", "openai"])
def response_type(key: str, value: Any) -> str:
    if value not in ("fastdeploy", "openai"):
        raise refusal(key, "must be either `fastdeploy` or `openai`.", brief(value))
    return value


@accepts(enum=[*POOLINGS, SCORE])
def pooling(key: str, value: Any) -> str:
    if value not in (*POOLINGS, SCORE):
        raise refusal(key, "must be one of {limit}, it is {value}", brief(value), [*POOLINGS, SCORE])
    return value


def anything(key: str, value: Any) -> Any:
    return value
