"""The JSON between clients and the model: what is taken, what is refused and with which words."""

import difflib
import json
import re

import pytest

from engine import wire
from engine.errors import InvalidRequest
from engine.sampling_parameters import PARAMETERS
from engine.wire.request import MAX_UNKNOWN_KEYS


def parsed(**fields):
    return wire.parse_request({"req_id": "a", "text": "hi", **fields})


def refusal(**fields):
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    return str(caught.value)


# --- the envelope


@pytest.mark.parametrize("payload", ['[{"text": "é"}]', '{"text": "é"}', b'[{"text": "\\u00e9"}]'])
def test_a_request_is_a_list_with_one_object_or_the_object(payload):
    assert wire.only_object(payload) == {"text": "é"}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("[]", "request data should not be empty and query num 0 should be 1"),
        ("[{}, {}]", "request data should not be empty and query num 2 should be 1"),
        ("[1]", "the request must be a list with one object, its item is a number"),
        ('"text"', "the request must be a list with one object, it is a string"),
        ("null", "the request must be a list with one object, it is null"),
        ("[{", "the request is not valid JSON"),
        ("", "the request is not valid JSON"),
        (b"\xff\xfe", "the request is not valid JSON"),
        ("[" * 100_000, "the request is not valid JSON"),
        ('[{"seed": ' + "9" * 5000 + "}]", "the request is not valid JSON"),
    ],
)
def test_anything_else_is_refused(payload, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        wire.only_object(payload)


def test_the_req_id_of_a_wrong_body_is_found_where_there_is_one():
    assert wire.req_id_of({"req_id": "a", "text": 1}) == "a"
    assert wire.req_id_of({"req_id": 7}) == "7"
    for req_id in (None, "", ["a"], "\ud800", "x" * 257):
        assert wire.req_id_of({"req_id": req_id}) is None


# --- fields

A_MESSAGE = {"content": "a"}


def test_missing_fields_have_the_documented_defaults():
    request = parsed()
    assert (request.parameters.top_p, request.parameters.temperature) == (0.7, 0.95)
    assert request.parameters.repetition_penalty == 1.0
    assert not request.parameters.has_penalty
    assert request.infer_seed is None
    assert (request.max_dec_len, request.min_dec_len, request.eos_token_ids, request.logprobs) == (None, None, (), -1)


def test_null_is_like_not_given():
    everything = {name: None for name in wire.FIELDS if name not in ("req_id", "text")}
    assert parsed(**everything) == parsed()


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"req_id": 12}, "req_id", "12"),
        ({"seq_len": 5}, "max_dec_len", 5),
        ({"max_tokens": 5}, "max_dec_len", 5),
        ({"max_dec_len": 4, "seq_len": 5, "max_tokens": 6}, "max_dec_len", 4),  # the first name wins
        ({"seq_len": 5, "max_tokens": 6}, "max_dec_len", 5),
        ({"top_p": 0}, "topp", 0.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"infer_seed": 0}, "infer_seed", 0),
        ({"seed": -5}, "infer_seed", -5),
        ({"top_k": -1}, "top_k", 0),
        ({"eos_token_ids": 5}, "eos_token_ids", (5,)),
        ({"eos_token_ids": [5, 6]}, "eos_token_ids", (5, 6)),
        ({"eos_token_ids": []}, "eos_token_ids", ()),
        ({"stop": "end"}, "stop_sequences", ("end",)),
        ({"stop_sequences": ["a", "b"]}, "stop_sequences", ("a", "b")),
        ({"logit_bias": {"5": -1, "7": 2.5}}, "logit_bias", ((5, -1.0), (7, 2.5))),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", -1),
        ({"logprobs": 20}, "logprobs", 20),
        ({"return_all_tokens": 1}, "return_all_tokens", True),
        ({"text": None, "input_ids": [0, 1]}, "input_ids", [0, 1]),
        ({"frequency_penalty": -2}, "frequency_score", -2.0),
    ],
)
def test_a_field_is_read_under_each_of_its_names(fields, name, value):
    request, parameter = parsed(**fields), {each.field: each.name for each in PARAMETERS}.get(name)
    found = getattr(request.parameters, parameter) if parameter else getattr(request, name)
    assert found == value
    assert type(found) is type(value)


def test_parts_and_refusals_of_an_answer_that_a_client_sends_back_are_text():
    kinds = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
    content = [{"type": kind, name: kind} for kind, name in kinds.items()]
    [message, refused] = parsed(
        text=None, messages=[{"content": content}, {"role": "assistant", "content": None, "refusal": "no"}]
    ).messages
    assert message["content"] == [{"type": "text", "text": kind} for kind in kinds]
    assert refused["content"] == "no"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_an_answer_that_was_cut_in_its_reasoning_has_no_content(name):
    message = {"role": "assistant", "content": None, name: "Hm"}
    [checked] = wire.parse_request({"req_id": "a", "messages": [message]}).messages
    assert checked == {**message, "content": ""}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("req_id", ["x" * 256]),
        ("input_ids", [[0], [2**31 - 1]]),
        ("max_dec_len", [1]),
        ("min_tokens", [1]),
        ("topp", [0, 1]),
        ("min_p", [0, 1]),
        ("temperature", [0, 100]),
        ("repetition_penalty", [0.01, 10]),
        ("frequency_score", [-2, 2]),
        ("presence_penalty", [-2, 2]),
        ("seed", [-(2**63), 2**64 - 1]),
        ("messages", [[{"content": ""}] * 10_000]),
        ("stop_token_ids", [[1] * 1024]),
        ("stop", [["a"] * 64, "a" * 1024]),
        ("bad_words", [["a"] * 64]),
        ("logit_bias", [{"0": -100}, {str(2**31 - 1): 100}, {str(n): 0 for n in range(1024)}]),
        ("logprobs", [-1, 20]),
        ("ignore_eos", [0, 1, False, True]),
        ("timeout", [0, 1e9]),
        ("model", ["any", 5, {}]),
    ],
)
def test_values_just_within_a_limit_are_accepted(name, values):
    for value in values:
        parsed(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("topp", [-0.001, 1.001]),
        ("min_p", [-0.001, 1.001]),
        ("temperature", [100.1]),
        ("penalty_score", [0.009, 10.1]),
        ("frequency_score", [-2.1, 2.1]),
        ("presence_score", [-2.1, 2.1]),
        ("infer_seed", [-(2**63) - 1, 1.5]),
        ("top_k", [-2, 1.5, True]),
        ("logit_bias", [{"0": -101}, {str(2**31): 0}, {"-1": 0}, {"0": "much"}, []]),
        ("logprobs", [-2]),
        ("ignore_eos", [2]),
        ("timeout", [1.1e9]),
    ],
)
def test_values_just_beyond_a_limit_are_refused(name, values):
    for value in values:
        assert f"The `{name}" in refusal(**{name: value})


def test_a_huge_top_k_is_as_good_as_the_largest():
    assert parsed(top_k=2**40).parameters.top_k == 2**31 - 1


def test_a_message_that_calls_tools_needs_no_content():
    message = {"role": "assistant", "tool_calls": [{"type": "function"}], "content": None}
    assert parsed(text=None, messages=[message]).messages == [message]


def test_messages_get_the_role_of_the_user_where_they_have_none():
    messages = parsed(text=None, messages=[{"content": "hi"}, {"role": "assistant", "content": "ho"}]).messages
    assert [message["role"] for message in messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": 5}, "The `text` in input parameters must be a string, it is a number"),
        ({"text": ""}, "The `text` in input parameters cannot be empty"),
        ({"text": "\ud800"}, "The `text` in input parameters must be valid Unicode, it has a lone surrogate"),
        ({"text": None}, "The input parameters should contain either `text`, `input_ids` or `messages`"),
        ({"req_id": None}, "The input parameters should contain `req_id`."),
        ({"req_id": ""}, "The `req_id` in input parameters cannot be empty"),
        ({"req_id": "x" * 257}, "The `req_id` has 257 characters, the limit is 256"),
        ({"system": 1}, "The `system` in input parameters must be a string"),
        ({"input_ids": "1 2"}, "The `input_ids` in input parameters must be a list, it is a string"),
        ({"input_ids": []}, "The `input_ids` in input parameters cannot be empty"),
        ({"input_ids": [1, "2", -1]}, 'The `input_ids` must hold token ids, "2" is none'),
        ({"input_ids": [1, True]}, "The `input_ids` must hold token ids, true is none"),
        ({"input_ids": [-1]}, "The `input_ids` must hold token ids, -1 is none"),
        ({"input_ids": [2**31]}, "The `input_ids` must hold token ids, 2147483648 is none"),
        ({"input_ids": [1.0]}, "The `input_ids` must hold token ids, 1.0 is none"),
        ({"messages": []}, "The `messages` in input parameters cannot be empty"),
        ({"top_k": -5}, "The `top_k` must be an integer of at least -1, where -1 and 0 stand for all tokens, it is -5"),
        ({"messages": [{}] * 10_001}, "The `messages` has 10001 items, the limit is 10000"),
        ({"messages": ["hi"]}, 'The items in messages must be objects, messages[0] is a string: "hi"'),
        ({"messages": [A_MESSAGE, {"role": "user"}]}, "must include `content`, messages[1] has none"),
        ({"messages": [A_MESSAGE, {"content": 5}]}, "The `messages[1].content` in input parameters must be a string"),
        ({"messages": [{"role": 1, "content": ""}]}, "The `messages[0].role` in input parameters must be a string"),
        ({"messages": [{"content": [{"type": "text"}]}]}, "The `messages[0].content[0].text` in input parameters must"),
        (
            {"messages": [{"content": [{"type": "image"}]}]},
            "The `messages[0].content[0]` must be a part of type `text` or `image_url`, it is",
        ),
        ({"messages": [{"content": "\udfff"}]}, "must be valid Unicode"),
        (
            {"messages": [{"content": "x"}, {"content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "The `messages[1].content[0].image_url` must be an image as a URL: data:image/png;base64,... or https://...,"
            ' it is "file:///x"',
        ),
        (
            {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "{high}"}}]}]},
            'image_url` must have a `detail` of auto, low or high, it is "{high}"',
        ),
        (
            {"messages": [{"content": [{"type": "text", "text": ""}, {"type": "video_url", "video_url": "x"}]}]},
            "The `messages[0].content[1]` is of type video_url, which is not supported",
        ),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "The `mm_processor_kwargs.max_pixels` must be an integer in [1,"),
        ({"min_dec_len": 0}, "The `min_dec_len` must be an integer and greater than 0, it is 0"),
        ({"max_dec_len": 1.5}, "The `max_dec_len` must be an integer and at least 0, it is 1.5"),
        ({"max_tokens": True}, "The `max_tokens` must be an integer and at least 0, it is true"),
        ({"topp": 1.1}, "The `topp` must be in [0, 1], it is 1.1"),
        ({"topp": 0.5, "top_p": 0.5}, "Only one of ('topp', 'top_p') should be set"),
        ({"infer_seed": 1, "seed": 1}, "Only one of ('infer_seed', 'seed') should be set"),
        ({"seed": 2**64}, "The `seed` must be an integer in"),
        ({"temperature": -0.1}, "The `temperature` must be >= 0"),
        ({"temperature": float("nan")}, "The `temperature` must be >= 0"),
        ({"temperature": "hot"}, 'it is "hot"'),
        ({"penalty_score": 0}, "The `penalty_score` must be greater than 0"),
        ({"frequency_penalty": 2.5}, "The `frequency_penalty` must be in [-2, 2], it is 2.5"),
        ({"eos_token_ids": ["x"]}, 'The `eos_token_ids` must hold token ids, "x" is none'),
        ({"eos_token_ids": [1] * 1025}, "The `eos_token_ids` has 1025 items, the limit is 1024"),
        ({"stop": ["a"] * 65}, "The `stop` has 65 items, the limit is 64"),
        ({"stop": ["a" * 1025]}, "The `stop` has an item of 1025 characters, the limit is 1024"),
        ({"stop": [""]}, "The `stop` in input parameters cannot be empty"),
        ({"stop": {"a": 1}}, "The `stop` must be a string or a list of strings, it is an object"),
        ({"stream": "yes"}, 'The `stream` must be a boolean, it is "yes"'),
        ({"response_type": "xml"}, "The `response_type` must be either `fastdeploy` or `openai`."),
        ({"logit_bias": {"x": 1}}, 'The `logit_bias` must have token ids as keys, "x" is none'),
        ({"logit_bias": {"9" * 5000: 1}}, "The `logit_bias` must have token ids as keys"),
        ({"logit_bias": {"5": 101}}, "The `logit_bias.5` must be in [-100, 100], it is 101"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, "The `logit_bias` has 1025 items, the limit is 1024"),
        ({"logprobs": 21}, "The `logprobs` must be an integer in [-1, 20], it is 21"),
        ({"chat_template_kwargs": []}, "The `chat_template_kwargs` must be an object, it is a list"),
        ({"timeout": -1}, "The `timeout` must be in [0, 1e+09], it is -1"),
        ({"max_token": 5}, 'unknown field "max_token", did you mean `max_tokens`?'),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_value(fields, message):
    assert message in refusal(**fields)


def test_all_problems_are_reported_at_once_and_the_first_is_blamed():
    with pytest.raises(InvalidRequest) as caught:
        parsed(stop={"{limit}": 1}, topp=2, text="")
    assert str(caught.value).count("; ") == 2
    assert "it is an object; " not in str(caught.value).split("; ")[0]
    assert caught.value.cause == {"field": "text"}


def test_several_problems_have_the_field_names_of_the_protocol():
    """Values that look like placeholders are none."""
    with pytest.raises(InvalidRequest) as caught:
        parsed(use_beam_search=True, frequency_penalty=1, topp="{topp}", min_tokens=-1, messages=[{"role": "{n}"}])
    names = {"frequency_score": "frequency_penalty", "topp": "top_p", "min_dec_len": "min_tokens", "n": "N"}
    message = caught.value.message(names)
    for part in (
        "The `frequency_penalty` cannot be combined with `use_beam_search`",
        '"{topp}"',
        "The `min_tokens` must",
    ):
        assert part in message
    assert "score" not in message and "dec_len" not in message and "N" not in message
    assert "The `frequency_score` cannot" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"top_p": 1.5}, {"field": "top_p", "value": 1.5, "limit": [0, 1]}),
        ({"topp": "{field}"}, {"field": "topp", "value": '"{field}"', "limit": [0, 1]}),
        ({"max_dec_len": True}, {"field": "max_dec_len", "value": True}),
        ({"seed": 2**70}, {"field": "seed", "value": str(2**70), "limit": [-(2**63), 2**64 - 1]}),
        ({"temperature": float("nan")}, {"field": "temperature", "value": "NaN", "limit": [0, 100]}),
        ({"stop": ["a"] * 65}, {"field": "stop", "value": 65, "limit": 64}),
        ({"req_id": "x" * 257}, {"field": "req_id", "value": 257, "limit": 256}),
        ({"logit_bias": {"5": 101}}, {"field": "logit_bias", "value": 101, "limit": [-100, 100]}),
        ({"messages": [{"role": 1, "content": ""}]}, {"field": "messages", "value": "a number"}),
        ({"max_token": 5}, {"field": "max_tokens", "value": '"max_token"'}),
        ({"topp": 0.5, "top_p": 0.5}, {"field": "topp", "value": "('topp', 'top_p')"}),
    ],
)
def test_a_refusal_says_field_value_and_limit_to_machines_too(fields, cause):
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert caught.value.cause == cause
    assert json.loads(json.dumps(cause, allow_nan=False)) == cause


def test_unknown_fields_pass_unless_they_look_like_ours():
    assert parsed(user="me", n=1, metadata={"a": 1}, probe=0) == parsed()


def test_fields_of_other_protocols_that_would_change_the_answer_are_refused_by_name():
    assert {"min_characters", "logits_processors"} <= set(wire.request.REFUSED)
    for name in ("max_completion_tokens", "max_new_tokens"):
        assert refusal(**{name: 9}) == f"`{name}` is a field of another protocol, its name here is `max_dec_len`"
    for name in wire.request.REFUSED:
        assert refusal(**{name: [9]}) == f"The `{name}` is not supported, it is [9]"
        parsed(**{name: None}), parsed(**{name: False})
    for name in ("tools", "add_generation_prompt", "continue_final_message", "enable_thinking"):
        assert "belongs into `chat_template_kwargs`" in refusal(**{name: False})
    assert refusal(infer_seed=2**64) and refusal(truncate_prompt_tokens=0) and refusal(truncate_prompt_tokens=-2)
    assert parsed(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1


def test_a_long_value_is_shortened_in_the_message():
    assert len(refusal(temperature="x" * 10_000)) < 200
    assert wire.shown("é\ud800") == '"\\u00e9\\ud800"'


def test_a_deeply_nested_value_is_refused_like_any_other():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert refusal(temperature=nested).startswith("The `temperature` must be >= 0 and at most 100, it is ")


def test_of_very_many_unknown_fields_only_the_first_are_compared():
    fields = {f"field_{n}": n for n in range(MAX_UNKNOWN_KEYS - 1)}
    assert "did you mean `max_tokens`?" in refusal(**fields, max_token=5)
    assert parsed(**fields, field_x=1, max_token=5) == parsed()


@pytest.mark.parametrize("payload", ["{%s}", "[{%s}]"])
def test_a_request_of_very_many_fields_is_refused_at_once(payload):
    fields = ",".join(f'"field{n}":1' for n in range(1001))
    with pytest.raises(InvalidRequest, match="the request has 1001 fields, the limit is 1000"):
        wire.only_object(payload % fields)


def test_an_unknown_field_that_is_longer_than_any_of_ours_is_not_compared(monkeypatch):
    monkeypatch.setattr(difflib, "get_close_matches", None)
    assert parsed(**{"max_tokens" * 5: 1}) == parsed()


def test_images_of_messages_are_apart_from_them():
    """The messages keep a digest of each image, so that a request can be compared without its images."""
    urls = ["data:image/png;base64,aGk=", "https://cat.example/b.png"]
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": urls[0]},
        {"type": "image_url", "image_url": {"url": urls[1], "detail": "low"}, "path": "[7].source"},
    ]
    body = {"req_id": "a", "messages": [{"content": "x"}, {"content": parts}]}
    request = wire.parse_request(body)
    assert request.images == (
        wire.ImagePart(urls[0], "[1].content[1].image_url"),
        wire.ImagePart(urls[1], "[7].source", "low"),
    )
    assert not any(url in str(request.messages) for url in urls)
    assert [part["path"] for part in wire.image_parts(request.messages)] == [each.path for each in request.images]
    assert (
        request.messages
        != wire.parse_request({**body, "messages": [{"content": "x"}, {"content": parts[:2]}]}).messages
    )
    again = wire.put_images(request.messages, request.images)
    assert wire.parse_request({**body, "messages": again}) == request
    assert wire.has_images(body) and wire.has_images({"tokenize": body}) and not wire.has_images({"messages": "x"})


@pytest.mark.parametrize("path", ["{field}", "[0].x{limit}", 5, "x" * 300, "", "[0].a\n"])
def test_an_invalid_path_of_an_image_is_replaced(path):
    part = {"type": "image_url", "image_url": "data:,", "path": path}
    [image] = wire.parse_request({"req_id": "a", "messages": [{"content": [part]}]}).images
    assert image.path == "[0].content[0].image_url"
