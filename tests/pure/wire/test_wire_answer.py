"""Tests of the answers of the model: they become JSON and back without changes, and errors have their texts."""

import json

import pytest
from msgspec.structs import replace

from engine import wire
from engine.errors import (
    KINDS,
    Cancelled,
    ChatTemplateError,
    InvalidRequest,
    Overloaded,
    RequestError,
    UnknownAnswer,
    error_of,
    queue_full,
)

DELTA = wire.Delta("a", "é\n", [7, 8], 3, wire.Usage(5, 2), 2**64 - 1, inference_time_cost=0.25)
FINAL = wire.Final(
    "a",
    "b",
    [],
    2,
    wire.Usage(5, 3, cached_tokens=4),
    1,
    finish_reason="stop",
    stop_reason="END",
    tokens_all="é\nb",
    tokens_all_ids=[7, 8],
)
LIKELY = wire.TokenLogprob(8, "x", (120,), -0.25)
LOGPROBS = (wire.TokenLogprob(7, "\ufffd", (0xE4, 0xBD), -0.5, (LIKELY,)), LIKELY, wire.TokenLogprob(9))
STATE = wire.ModelState(ready=False, reason="the engine is starting", num_open=3)


@pytest.mark.parametrize(
    "answer",
    [
        DELTA,
        FINAL,
        replace(DELTA, logprobs=()),
        replace(FINAL, logprobs=LOGPROBS, return_all_tokens=True),
        replace(DELTA, index=3),
        replace(DELTA, reasoning="may", max_dec_len=5),
        replace(FINAL, index=15, is_end=False),
        replace(DELTA, times=dict.fromkeys(wire.TIMES, "now")),
        STATE,
        wire.ModelState(ready=True, engine_silent_s=1.5, loras=["one"]),
        wire.LoraList(["one"]),
    ],
)
def test_an_answer_comes_back_as_it_was(answer):
    assert wire.read_answer(wire.write_answer(answer)) == answer


def test_an_answer_is_a_list_with_one_object_and_keeps_its_letters():
    payload = wire.native_json(DELTA)
    assert "é\\n".encode() in payload
    assert json.loads(payload) == [
        {
            "req_id": "a",
            "index": 0,
            "is_end": 0,
            "token_ids": [7, 8],
            "token": "é\n",
            "send_idx": 3,
            "usage": {"prompt_tokens": 5, "completion_tokens": 2},
            "inference_time_cost": 0.25,
            "infer_seed": 2**64 - 1,
            "return_all_tokens": False,
            "error_msg": "",
            "error_code": 0,
        }
    ]


def test_the_last_answer_has_all_of_it():
    [fields] = json.loads(wire.native_json(FINAL))
    assert (fields["is_end"], fields["finish_reason"], fields["stop_reason"]) == (1, "stop", "END")
    assert json.loads(wire.native_json(replace(FINAL, is_end=False)))[0] == {**fields, "is_end": 0}
    assert (fields["tokens_all"], fields["tokens_all_ids"], fields["tokens_all_num"]) == ("é\nb", [7, 8], 3)
    assert fields["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4}


def test_a_logprob_of_nan_is_returned_as_the_least_likely():
    assert [wire.finite_logprob(number) for number in (float("-inf"), float("nan"), -1.5)] == [-9999.0, -9999.0, -1.5]


def test_a_failure_is_a_bare_object_with_code_and_kind_and_the_keys_of_a_delta():
    fields = json.loads(wire.native_json(wire.Failure(RequestError("too many"), "a")))
    assert fields.pop("timestamp") > 0
    assert fields == {
        "req_id": "a",
        "index": 0,
        "is_end": 1,
        "token": "",
        "token_ids": [],
        "send_idx": 0,
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
        "infer_seed": None,
        "error_msg": "too many",
        "error_code": 500,
        "error_type": "internal",
        "version": "4.6",
    }


def test_a_failure_comes_back_with_its_cause_and_its_place_in_the_answer():
    error = Overloaded("{value} of {limit}", value=3, limit=2)
    given = wire.Failure(error, "a", 7, wire.Usage(5, 9), 1)
    read = wire.read_answer(wire.write_answer(given))
    assert (type(read.error), str(read.error), read.error.cause) == (Overloaded, "3 of 2", {"value": 3, "limit": 2})
    assert replace(read, error=error) == given
    assert wire.read_answer(wire.write_answer(wire.Failure(Cancelled("gone")))).req_id is None


def test_a_failure_can_be_sent_whatever_its_text_quotes():
    read = wire.read_answer(wire.write_answer(wire.Failure(InvalidRequest("role \ud800 is unknown"), "a")))
    assert str(read.error) == "role \ud800 is unknown"
    assert json.loads(wire.native_json(read))["error_msg"] == "role ? is unknown"
    huge = wire.Failure(InvalidRequest("{field} is {value}", field="topp", value=10**40))
    assert wire.read_answer(wire.write_answer(huge)).error.value == 10**40


def test_the_state_of_the_model_is_an_answer_too():
    [fields] = json.loads(wire.native_json(STATE))
    assert (fields["is_end"], fields["ready"], fields["num_open"]) == (1, False, 3)
    assert fields["reason"] == "the engine is starting"


# --- errors


def test_every_kind_of_error_crosses_a_border_as_itself():
    for kind, error in KINDS.items():
        assert type(error_of(kind, "text")) is error
        assert 400 <= error.code <= 599
    assert type(error_of("of tomorrow", "text")) is RequestError
    codes = [error.code for error in KINDS.values() if error.kind not in ("prompt_too_long", "model_not_found")]
    assert len(set(codes)) == len(codes)


def test_an_error_is_worded_with_the_names_that_its_client_knows():
    error = InvalidRequest("{field} {value} exceeds {max_dec_len} {limit}", field="min_dec_len", value=1.5, limit=1.0)
    assert str(error) == "min_dec_len 1.5 exceeds max_dec_len 1"
    names = {"min_dec_len": "min_tokens", "max_dec_len": "max_tokens"}
    assert error.message(names) == "min_tokens 1.5 exceeds max_tokens 1"
    assert str(queue_full(4, 3)) == "4 requests are waiting, at most MAX_CACHED_TASK_NUM(3) may"


def test_text_of_a_client_stays_unchanged_in_an_error_message():
    quoted = InvalidRequest("{field} is {value}", field="text", value="{max_dec_len} {0} {")
    assert quoted.message({"max_dec_len": "max_tokens"}) == "text is {max_dec_len} {0} {"
    assert str(InvalidRequest("{field} {0} {")) == "{field} {0} {"
    blamed = ChatTemplateError("refused: {field} {0} {").blaming("messages")
    assert (type(blamed), str(blamed), blamed.field) == (ChatTemplateError, "refused: {field} {0} {", "messages")
    blamed = UnknownAnswer("no response {value} of {limit}", value='"{0}"', limit=2.0).blaming("previous_response_id")
    assert (str(blamed), blamed.field) == ('no response "{0}" of 2', "previous_response_id")
