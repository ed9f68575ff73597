"""Any JSON may be a field or a request: it is taken, or refused with a sentence, as the document says."""

import json

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import wire
from engine.errors import InvalidRequest, RequestError
from engine.serving.tokenization import tokenize_or_detokenize
from engine.text.tokenizer import Tokenizer
from engine.wire import checks, schema_of
from gateway.anthropic.request import chat_of
from gateway.app_keys import ANTHROPIC, RESPONSES
from gateway.body import parse_body
from gateway.json_encoder import dump
from gateway.native.request import is_native
from gateway.native.request import parse as parse_native
from gateway.openai.request import parse as parse_openai
from gateway.openai.request import tokenize_body
from gateway.protocol import RequestContext
from tests.byte_tokenizer import write_tokenizer
from tests.fuzz import (
    GOOD,
    LIMITS,
    any_json,
    bodies,
    choices,
    examples,
    modes,
    payload_of,
    plain,
    tools,
    turns,
)
from tests.pure.service_fakes import an_input_processor

pytestmark = pytest.mark.no_cover  # the lines are reached by other tests, and measuring doubles its time

# JSON Schema takes 5.0 for an integer, the checks do not.
TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
)
Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=TYPES)
VALIDATORS = {name: Validator(schema_of(field.check)) for name, field in wire.FIELDS.items()}
NEAR = [n + d for n in LIMITS for d in (-1, 0, 1)]
SCALARS = [None, True, False, 0.009, 0.01, 0.5, 1.0, 1.5, 2.0, 100.5, *NEAR, *(-n for n in NEAR), "", "a", "1", "text"]
SCALARS += ["a" * (n + d) for n in (64, 256, 1024) for d in (-1, 0, 1)]
BORDERS = [*SCALARS, [], {}, [[]], [{}], *([each] for each in SCALARS), *([[each]] for each in SCALARS)]
BORDERS += [[each] * (n + d) for each in (1, "a", [1]) for n in (16, 64) for d in (-1, 0, 1)]
BORDERS += [{key: each} for key in ("1", "", "-1", "a", "9" * 9, "9" * 11) for each in (None, True, "a", 0.5, 1)]
BORDERS += [{"1": sign * n} for sign in (-1, 1) for n in NEAR]
LONG = [[each] * (1024 + d) for each in (1, "a", [1]) for d in (-1, 0, 1)]
LONG += [{str(n): 1 for n in range(1024 + d)} for d in (-1, 0, 1)]
BORDERS += [[{"role": role, "content": text}] for role in (None, "", "user", 1) for text in (None, "", "Hi", 1, ["Hi"])]


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    return an_input_processor(tokenizer, tokenizer.vocab_size, (64, 48, 32))


def outcome(ask, *arguments):
    """Return the result, or None if the call was refused. Any other error fails the test."""
    try:
        return ask(*arguments)
    except RequestError as error:
        assert str(error) and len(str(error)) < 20_000
        dump(wire.Failure(error).fields())
        wire.write_answer(wire.Failure(error))
        return None


def is_encodable(value):
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def assert_as_its_schema_says(name, value):
    check = wire.FIELDS[name].check
    is_valid = VALIDATORS[name].is_valid(value) or (check is checks.boolean and value in (0, 1))
    try:
        check(name, value)
    except InvalidRequest as error:
        assert error.field == name
        assert name in str(error)
        # More must be right about these than a schema can say.
        assert not is_valid or name in wire.STRUCTURED_OUTPUT_FIELDS, str(error)
    else:
        assert is_valid, value


@pytest.mark.slow
@examples(80)
@given(name=st.sampled_from(list(wire.FIELDS)), value=any_json.filter(is_encodable))
def test_a_field_takes_what_its_schema_does(name, value):
    assert_as_its_schema_says(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", wire.FIELDS)
def test_a_field_takes_of_what_is_at_a_border_what_its_schema_does(name):
    """Chance does not bring each of these to each field."""
    is_long_at_border = "1024" in json.dumps(schema_of(wire.FIELDS[name].check))
    for value in [*BORDERS, *(LONG if is_long_at_border else ())]:
        assert_as_its_schema_says(name, value)


BOUNDED = [name for name, field in wire.FIELDS.items() if "maximum" in schema_of(field.check)]


@pytest.mark.parametrize("name", BOUNDED)
def test_the_bounds_of_a_schema_are_those_of_its_check(name):
    check = wire.FIELDS[name].check
    low, high = schema_of(check)["minimum"], schema_of(check)["maximum"]
    assert outcome(check, name, low) is not None and outcome(check, name, high) is not None
    assert outcome(check, name, low - 1) is None and outcome(check, name, high + 1) is None


@pytest.mark.slow
@examples(40)
@given(body=bodies("text", "req_id", "messages"))
def test_any_object_is_a_request_or_refused(processor, body):
    request = outcome(wire.parse_request, body)
    if request is not None:
        outcome(processor.process, request)


@pytest.mark.slow
@examples(40)
@given(body=bodies("text", "req_id", "messages"))
def test_any_object_may_ask_about_tokens(processor, body):
    for key in (wire.TOKENIZE, wire.DETOKENIZE):
        outcome(tokenize_or_detokenize, {key: body}, processor)
    outcome(tokenize_or_detokenize, body, processor)
    outcome(wire.owner_of, body)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@examples(40)
@given(body=bodies("text", "prompt", "messages", "req_id", "tools", "stream"))
@pytest.mark.slow
def test_any_object_may_come_to_the_gateway(path, body):
    body = json.loads(payload_of(body))
    is_chat = path.startswith("/v1/chat")
    if is_native(body):
        outcome(parse_native, body, RequestContext(path, "default", []))
        return
    completion = outcome(parse_openai, body, is_chat, "default")
    for each in completion.requests if completion else ():
        wire.parse_request(json.loads(json.dumps(each)))  # nothing that the gateway has taken is refused by the model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("protocol", [RESPONSES, ANTHROPIC])
@examples(40)
@given(body=bodies("input", "messages", "max_tokens", "tools", "stream"), turns=st.none() | st.lists(turns, max_size=3))
@pytest.mark.slow
def test_any_object_may_come_to_a_protocol_that_is_a_chat_in_other_words(protocol, body, turns):
    [path] = protocol.paths
    body = json.loads(payload_of({**body, **({"input": turns, "messages": turns, "max_tokens": 5} if turns else {})}))
    call = RequestContext(path, "default", [protocol])
    exchange = outcome(protocol.parse, body, call)
    for each in exchange.requests if exchange else ():
        wire.parse_request(json.loads(json.dumps(each)))
    outcome(tokenize_body, body, chat_of)


@pytest.mark.slow
@examples(40)
@given(given=st.just(GOOD["tools"]) | tools, choice=choices | any_json | modes, parallel=plain)
def test_any_tools_may_be_offered_and_chosen(given, choice, parallel):
    fields = {"tools": given, "tool_choice": choice, "parallel_tool_calls": parallel}
    outcome(parse_openai, {"messages": GOOD["messages"], **fields}, True, "default")


@examples(40)
@given(payload=st.binary() | any_json.map(payload_of) | st.text().map(str.encode))
@example(b"9" * 5000)
@example(b"[" * 100_000)
@example(b'{"a":1}}')
@example("[{}]".encode("utf-16"))
@pytest.mark.slow
def test_any_bytes_may_be_a_body(payload):
    outcome(parse_body, payload)
    outcome(wire.only_object, payload)
    reported = wire.payload_with_owner(payload, wire.Owner("a"))
    body = outcome(wire.only_object, reported)
    assert body is None or body[wire.OWNER]["name"] == "a"
