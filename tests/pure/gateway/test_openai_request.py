"""OpenAI's requests: what of them reaches the model, what is refused, and how."""

import json
import re

import openai
import pytest

from engine.errors import (
    ChatTemplateError,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TimedOut,
    queue_full,
)
from gateway.native.request import NATIVE_ONLY
from gateway.openai.request import FORWARDED_FIELDS, NAMES, PROMPT_OUTPUT_FIELDS
from tests.pure.gateway_fake import FakeBackend, openai_client, running

CHAT, COMPLETIONS, RESPONSES, ANTHROPICS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MESSAGES = [{"role": "user", "content": "Hello, who are you"}]
A_CHAT = {"model": "default", "messages": MESSAGES}
AGAIN, NO_RETRY = {"retry-after": "1"}, {"x-should-retry": "false"}
A_TOOL = {"type": "function", "function": {"name": "f"}}
A_COMPLETION = {"model": "default", "prompt": "Hello, how are you?"}


def sent(body, path=CHAT):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        gateway.post(path, body)
    [body] = backend.bodies
    del body["req_id"]
    return body


def test_image_parts_reach_the_model_with_their_places():
    url = "data:image/png;base64,aGk="
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
    body = sent({"messages": [*MESSAGES, {"role": "user", "content": parts}], "mm_processor_kwargs": {"max_pixels": 9}})
    assert body["messages"][1]["content"][1] == {**parts[1], "path": "[1].content[1].image_url"}
    assert body["mm_processor_kwargs"] == {"max_pixels": 9}


def test_openais_defaults_are_not_the_native_ones():
    assert sent(A_COMPLETION, COMPLETIONS) == {
        "text": "Hello, how are you?",
        "apply_chat_template": False,
        "temperature": 1.0,
        "top_p": 1.0,
    }


def test_zeros_and_falses_are_honoured_and_nulls_are_not_given():
    zeros = {
        "temperature": 0,
        "top_p": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 0,
        "top_k": 0,
        "min_p": 0,
        "skip_special_tokens": False,
        "ignore_eos": False,
    }
    nothing = {"stop": None, "max_tokens": None, "n": None, "logprobs": None, "tools": None, "stream_options": None}
    assert sent({**A_CHAT, **zeros, **nothing, "min_tokens": 0}) == {"messages": MESSAGES, **zeros}


def test_every_extension_that_clients_of_other_servers_send_reaches_the_model():
    extensions = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "cache_salt": "team a",
        "bad_words": ["x"],
        "bad_words_token_ids": [5],
        "logit_bias": {"7": -100},
        "stop": ["a", "b"],
        "seed": 9,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
    }
    assert sent({**A_CHAT, **extensions}) == {"messages": MESSAGES, "temperature": 1.0, "top_p": 1.0, **extensions}


def test_the_newer_name_of_max_tokens_wins():
    assert sent({**A_CHAT, "max_tokens": 5, "max_completion_tokens": 7})["max_tokens"] == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "reported"),
    [
        (CHAT, {**A_CHAT, "max_tokens": 4096}, "50"),
        (CHAT, {**A_CHAT, "max_completion_tokens": 4096}, "50"),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 4096}, "50"),
        ("/v1/messages", {**A_CHAT, "max_tokens": 4096}, "50"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4096}, "50"),
        (CHAT, A_CHAT, None),
        (CHAT, {"text": "a", "max_dec_len": 4096}, None),
    ],
)
def test_a_header_tells_that_the_length_of_an_answer_was_reduced(path, body, reported, stream):
    backend = FakeBackend("a", finish_reason="length")
    backend.max_dec_len = 50
    with running(backend) as gateway:
        status, headers, payload = gateway.send("POST", path, {**body, "stream": stream})
    assert (status, headers["X-Reduced-Max-Tokens"]) == (200, reported)
    assert re.search(rb'"length"|"max_tokens"|"max_output_tokens"', payload)


@pytest.mark.parametrize(("asked", "sent_on"), [(0, 0), (2, 2), (False, None), (None, None)])
def test_a_completion_with_logprobs_0_asks_for_those_of_the_tokens_themselves(asked, sent_on):
    assert sent({**A_COMPLETION, "logprobs": asked}, COMPLETIONS).get("logprobs") == sent_on


def test_logprobs_that_are_not_wanted_do_not_forbid_an_echo():
    assert sent({**A_COMPLETION, "logprobs": False, "echo": True}, COMPLETIONS)["text"] == A_COMPLETION["prompt"]


def test_arguments_of_the_chat_template_have_fields_of_their_own():
    kwargs = sent({**A_CHAT, "add_generation_prompt": False, "reasoning_effort": "high"})["chat_template_kwargs"]
    assert kwargs == {"add_generation_prompt": False, "reasoning_effort": "high"}
    assert sent({**A_CHAT, "enable_thinking": False})["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent({**A_CHAT, "truncate_prompt_tokens": 9})["truncate_prompt_tokens"] == 9
    asked = {"continue_final_message": True, "reasoning_effort": "none", "chat_template_kwargs": {"x": 1}}
    kwargs = sent({**A_CHAT, **asked})["chat_template_kwargs"]
    assert kwargs == {"x": 1, "continue_final_message": True, "reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    ("path", "field", "other"), [(CHAT, "prompt", "/v1/completions"), (COMPLETIONS, "messages", "/v1/chat/completions")]
)
def test_the_field_of_the_other_path_is_refused_with_that_path(path, field, other):
    body = {**(A_CHAT if path == CHAT else A_COMPLETION), field: ["Hi"]}
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused(path, body)
    message = f"`{field}` is a field of requests to {other}, not of this path"
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, message, field)


def test_messages_reach_the_template_with_its_field_names():
    developer, thinker = {"role": "developer", "content": "be short"}, {"role": "assistant", "content": "a"}
    body = sent({"messages": [developer, {**thinker, "reasoning": "b"}, {**thinker, "reasoning": None}]})
    assert body["messages"][0] == {"role": "system", "content": "be short"}
    assert [each.get("reasoning_content") for each in body["messages"]] == [None, "b", None]


def test_harmless_fields_are_ignored():
    harmless = {
        "user": "u",
        "metadata": {},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "suffix": "",
        "something": "else",
        "function_call": "auto",
        "verbosity": "medium",
        "include_reasoning": True,
        "add_special_tokens": False,
        "prompt_cache_key": "k",
        "stream_options": {},
        "truncation_side": "left",
        "session_id": "s",
        "stream_interval": 4,
        "return_token_offsets": False,
        "thinking_token_budget": -1,
        "structured_outputs": {
            "disable_fallback": True,
            "disable_additional_properties": True,
            "whitespace_pattern": None,
        },
    }
    assert sent({**A_CHAT, **harmless}) == {"messages": MESSAGES, "temperature": 1.0, "top_p": 1.0}


def test_any_model_name_is_taken_and_none_is_the_served_one():
    with running(FakeBackend("a"), served_model_name="mine") as gateway:
        assert gateway.post(CHAT, {**A_CHAT, "model": "gpt-\u4f60"})["model"] == "gpt-\u4f60"
        assert gateway.post(CHAT, {"messages": MESSAGES})["model"] == "mine"


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tools": [A_TOOL]}, "tools"),
        (CHAT, {"tools": [A_TOOL], "tool_choice": "never"}, "tool_choice"),
        (CHAT, {"tools": [A_TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        (CHAT, {"tools": [A_TOOL] * 129, "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": [A_TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"tool_choice": "auto", "tools": []}, "tool_choice"),
        (CHAT, {"parallel_tool_calls": "auto"}, "parallel_tool_calls"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (CHAT, {"guided_json": "{"}, "guided_json"),
        (CHAT, {"guided_choice": []}, "guided_choice"),
        (CHAT, {"structured_outputs": {"xml": 1}}, "structured_outputs"),
        (COMPLETIONS, {"tools": [A_TOOL]}, "tools"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"temprature": 1}, "temperature"),
        (CHAT, {"max_output_tokens": 5}, "max_tokens"),
        (CHAT, {"instructions": "Be short."}, "messages"),
        (CHAT, {"thinking": {"type": "enabled"}}, "enable_thinking"),
        (CHAT, {"output_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"extra_body": {"top_k": 1}}, "extra_body"),
        (CHAT, {"tfs_z": 0.5}, "tfs_z"),
        (COMPLETIONS, {"n_predict": 5}, "max_tokens"),
        (COMPLETIONS, {"mirostat": 2}, "mirostat"),
        (COMPLETIONS, {"max_token": 1}, "max_tokens"),
        (COMPLETIONS, {"max_dec_len": 1}, "max_tokens"),
        (CHAT, {"logits_processors": ["x"]}, "logits_processors"),
        (CHAT, {"min_characters": 5}, "min_characters"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"continue_final_message": 7}, "continue_final_message"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"prompt": "Hi"}, "prompt"),
        (CHAT, {"tools": {}}, "tools"),
        (COMPLETIONS, {"messages": MESSAGES}, "messages"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"separate_reasoning": False}, "separate_reasoning"),
        (COMPLETIONS, {"add_special_tokens": False}, "add_special_tokens"),
        (COMPLETIONS, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"top_p": 2}, "top_p"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream_options": []}, "stream_options"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 1.5}, "logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"model": 5}, "model"),
        (CHAT, {"model": "\ud800"}, "model"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (CHAT, {"return_prompt_text": True}, "return_prompt_text"),
        (CHAT, {"truncation_side": "right"}, "truncation_side"),
        (CHAT, {"logprob_token_ids": [3]}, "logprob_token_ids"),
        (CHAT, {"repetition_detection": {"min_count": 3}}, "repetition_detection"),
        (CHAT, {"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        (CHAT, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        (COMPLETIONS, {"best_of": 17}, "best_of"),
        (COMPLETIONS, {"early_stopping": True}, "early_stopping"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ],
)
def test_unsupported_fields_are_refused_by_name(path, fields, param):
    backend = FakeBackend("a")
    with running(backend) as gateway:
        status, answer = gateway.refused(path, {**(A_CHAT if path == CHAT else A_COMPLETION), **fields})
    assert (status, set(answer)) == (400, {"error"})
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_request")
    assert param in error["message"]
    assert backend.bodies == []


AMBIGUOUS = "the arguments of a call could not be assigned"
NO_CALLS = "`messages[1].tool_calls` must be a list of calls, each of a `function` with a `name`"


def test_a_refusal_says_where_in_a_field_it_is_wrong():
    streamed = {"stream": True, "stream_options": {"include_usage": "yes"}}
    misspelt = {"stream": True, "stream_options": {"include_usgae": True}}
    function = {"type": "function", "function": {"name": "f", "parameters": 5}}
    with running(FakeBackend("a"), tool_call_parser="hermes") as gateway:
        for fields, text in (
            (streamed, 'The `stream_options.include_usage` must be a boolean, it is "yes"'),
            (misspelt, 'unknown field "include_usgae", did you mean `include_usage`?'),
            ({"tools": [{"type": "x"}]}, '`tools[0]` must be of type `function`, it is {"type": "x"}'),
            (
                {"guided_choice": ["a", 5]},
                "The `guided_choice[1]` in input parameters must be a string, it is a number",
            ),
            ({"guided_choice": []}, "The `guided_choice` must be a list of strings, it is empty"),
            (
                {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": "x"}]},
                f'{NO_CALLS}, it is "x"',
            ),
            (
                {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
                f"{NO_CALLS}, it is [{{}}]",
            ),
            ({"tools": [5]}, "The `tools[0]` must be an object, it is a number"),
            ({"tools": [{"type": "function"}]}, "The `tools[0].function` must be an object, it is null"),
            (
                {"tools": [function]},
                'Function "f": The `tools[0].function.parameters` must be an object, it is a number',
            ),
            ({"tools": [A_TOOL] * 2}, f'`tools` has more than one with the name "f": {AMBIGUOUS}'),
        ):
            assert gateway.refused(CHAT, {**A_CHAT, **fields})[1]["error"]["message"] == text


def test_a_refusal_says_which_of_several_prompts_is_wrong():
    with running(FakeBackend("a")) as gateway:
        for path, name in ((COMPLETIONS, "prompt"), ("/v1/embeddings", "input")):
            for given, text in (
                (["a", None], f"`{name}[1]` must be a text or a list of token ids, it is null"),
                (["a", ""], f"The `{name}[1]` in input parameters cannot be empty"),
                ([[1], [-1]], f"The `{name}[1]` must "),
            ):
                error = gateway.refused(path, {name: given})[1]["error"]
                assert (error["param"], error["message"][: len(text)]) == (name, text)


def test_of_several_names_of_a_field_a_refusal_of_the_model_has_the_clients():
    budget, output_format = (InvalidRequest("{field}", field=name) for name in ("reasoning_max_tokens", "guided_regex"))
    for error, fields in (
        (budget, {"reasoning_max_tokens": 5}),
        (budget, {"thinking_token_budget": 5}),
        (output_format, {"guided_regex": "a"}),
        (output_format, {"structured_outputs": {"regex": "a"}}),
    ):
        with running(FakeBackend(error)) as gateway:
            answer = gateway.refused(CHAT, {**A_CHAT, **fields})[1]["error"]
        assert [answer["param"], answer["message"]] == [*fields] * 2


def test_the_format_of_an_answer_reaches_the_model_as_it_was_given():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for output_format in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"response_format": {"type": "json_object"}},
        {"guided_json": schema, "guided_decoding_disable_any_whitespace": True},
        {"guided_json": json.dumps(schema)},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a"'},
    ):
        assert {**sent({**A_CHAT, **output_format}), **output_format} == sent({**A_CHAT, **output_format})
        assert {**sent({**A_COMPLETION, **output_format}, COMPLETIONS), **output_format} == sent(
            {**A_COMPLETION, **output_format}, COMPLETIONS
        )


def test_structured_outputs_are_the_fields_that_say_the_same():
    asked = {"structured_outputs": {"regex": "a+", "json": None, "disable_any_whitespace": True}}
    sent_on = sent({**A_CHAT, **asked})
    assert (sent_on["guided_regex"], sent_on["guided_decoding_disable_any_whitespace"]) == ("a+", True)
    assert sent({**A_CHAT, "structured_outputs": {"json_object": True}})["response_format"] == {"type": "json_object"}


def wrong(text, field, **cause):
    return InvalidRequest(text, field=field, **cause)


TOO_LONG = "Input text is too long, input_ids_len (9) + {field} ({value}) > max_seq_len (8)"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "error", "text", "param"),
    [
        (A_CHAT, wrong("{field}({value})", "max_dec_len", value=5), "max_tokens(5)", "max_tokens"),
        (
            {**A_CHAT, "max_completion_tokens": 5},
            wrong("{field}({value})", "max_dec_len", value=5),
            "max_completion_tokens(5)",
            "max_completion_tokens",
        ),
        (
            A_CHAT,
            wrong("{field}({value}) exceeds {max_dec_len}({limit}).", "min_dec_len", value=5, limit=4),
            "min_tokens(5) exceeds max_tokens(4).",
            "min_tokens",
        ),
        (
            A_CHAT,
            PromptTooLong(TOO_LONG, field="max_dec_len", value=5),
            "input_ids_len (9) + max_tokens (5)",
            "max_tokens",
        ),
        (A_CHAT, PromptTooLong("of input token({value})", field="messages", value=9), "token(9)", "messages"),
        (A_COMPLETION, PromptTooLong("has {value} bytes", field="text", value=9), "has 9 bytes", "prompt"),
        (A_COMPLETION, wrong("The `{field}` holds", "input_ids"), "The `prompt` holds", "prompt"),
        (A_CHAT, wrong("The `{field}` holds", "messages"), "The `messages` holds", "messages"),
        (A_CHAT, wrong("The `{field}` holds", "eos_token_ids"), "The `stop_token_ids` holds", "stop_token_ids"),
        (A_CHAT, wrong("The `{field}` holds", "logit_bias"), "The `logit_bias` holds", "logit_bias"),
        (
            A_CHAT,
            wrong("`{field}` item {value} has", "bad_words", value='"`topp` {max_dec_len}"'),
            '`bad_words` item "`topp` {max_dec_len}" has',
            "bad_words",
        ),
        (
            A_CHAT,
            ChatTemplateError("the chat template refused the messages: `topp` {topp}").blaming("messages"),
            "messages: `topp` {topp}",
            "messages",
        ),
        (A_CHAT, InvalidRequest("it needs 9 KV blocks"), "it needs 9 KV blocks", "messages"),
        (
            A_CHAT,
            DuplicateRequest("The {field} {value} already exists", field="req_id", value='"req_id"'),
            'The request_id "req_id" already',
            "request_id",
        ),
        (A_CHAT, queue_full(1, 0), "1 requests are waiting", None),
        (A_CHAT, EngineUnavailable("of max_dec_len"), "of max_dec_len", None),
    ],
)
def test_a_refusal_of_the_model_names_fields_as_the_client_does(body, error, text, param, stream):
    with running(FakeBackend(error)) as gateway:
        path = COMPLETIONS if "prompt" in body else CHAT
        status, answer = gateway.refused(path, {**body, "stream": stream, "n": 2})
    assert (status, answer["error"]["param"]) == (error.code, param)
    assert text in answer["error"]["message"]


def test_every_alias_of_a_native_field_has_one_that_openais_clients_may_send():
    taken = {*FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS, "max_tokens", "request_id", "model"}
    assert set(NAMES.values()) <= taken


@pytest.mark.parametrize(("num_prompts", "longest"), [(1, 256), (2, 254), (16, 253)])
def test_a_request_id_leaves_room_for_the_number_of_the_prompt(num_prompts, longest):
    backend = FakeBackend("a")
    body = {"prompt": ["hi"] * num_prompts, "n": 2}
    with running(backend) as gateway:
        assert gateway.post(COMPLETIONS, {**body, "request_id": "x" * longest})["id"] == "x" * longest
        status, answer = gateway.refused(COMPLETIONS, {**body, "request_id": "x" * (longest + 1)})
    assert max(len(body["req_id"]) for body in backend.bodies) == 256
    assert (status, answer["error"]["param"]) == (400, "request_id")
    assert f"The `request_id` has {longest + 1} characters, the limit" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "kind", "names", "headers"),
    [
        (PromptTooLong("too long"), "BadRequest", "invalid_request_error context_length_exceeded", {}),
        (DuplicateRequest("twice"), "Conflict", "invalid_request_error duplicate_request", NO_RETRY),
        (Overloaded("full"), "RateLimit", "rate_limit_error overloaded", AGAIN),
        (EngineUnavailable("gone"), "InternalServer", "server_error engine_unavailable", AGAIN),
        (TimedOut("silent"), "InternalServer", "server_error timeout", NO_RETRY),
    ],
)
def test_a_refusal_of_the_model_keeps_its_status(stream, error, kind, names, headers):
    kind = getattr(openai, f"{kind}Error")
    with running(FakeBackend(error)) as gateway, openai_client(gateway) as client, pytest.raises(kind) as caught:
        client.chat.completions.create(**A_CHAT, stream=stream)
    assert caught.value.status_code == error.code
    assert [caught.value.type, caught.value.code] == names.split()
    assert caught.value.body["message"] == str(error)
    answered = caught.value.response.headers
    assert {name: answered[name] for name in (*AGAIN, *NO_RETRY) if name in answered} == headers


def test_a_field_is_the_native_protocols_alone_unless_openais_requests_may_have_it():
    native = """req_id max_dec_len min_dec_len seq_len topp penalty_score frequency_score presence_score infer_seed
        eos_token_ids stop_sequences return_all_tokens return_usage benchmark system response_type response_timeout
        enable_text_truncate apply_chat_template resume_from answer_ids cut_max_dec_len pooling
        text_pair traceparent lora_name"""
    assert set(native.split()) == NATIVE_ONLY
    with running(FakeBackend("a")) as gateway:
        for name in NATIVE_ONLY:
            assert "choices" not in gateway.refused(CHAT, {**A_CHAT, name: 1})[1]


def test_a_request_under_the_documented_base_url_is_never_native():
    with running(FakeBackend("a")) as gateway:
        status, answer = gateway.refused("/v1/chat/completions/completions", {"text": "hi"})
    assert (status, answer["error"]["param"]) == (400, "prompt")


LONE = {"const": "\ud800"}  # has no UTF-8, so it could not be sent to the engine
OF_ANTHROPIC = {"model": "default", "max_tokens": 9, "messages": MESSAGES}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            CHAT,
            {**A_CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": LONE}}},
            "response_format",
        ),
        (CHAT, {**A_CHAT, "guided_json": json.dumps(LONE)}, "guided_json"),
        (CHAT, {**A_CHAT, "structured_outputs": {"json": LONE}}, "structured_outputs"),
        (CHAT, {**A_CHAT, "tools": [{**A_TOOL, "function": {"name": "f", "parameters": LONE}}]}, "tools"),
        (COMPLETIONS, {**A_COMPLETION, "guided_choice": [LONE["const"]]}, "guided_choice"),
        (
            RESPONSES,
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": LONE}}},
            "text.format",
        ),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": LONE}]}, "tools"),
        (
            ANTHROPICS,
            {**OF_ANTHROPIC, "output_config": {"format": {"type": "json_schema", "schema": LONE}}},
            "output_config",
        ),
        (ANTHROPICS, {**OF_ANTHROPIC, "tools": [{"name": "f", "input_schema": LONE}]}, "tools"),
        (CHAT, {**A_CHAT, "tools": [{**A_TOOL, "function": {"name": "f", "description": LONE["const"]}}]}, "tools"),
    ],
)
def test_a_grammar_or_tool_that_is_not_valid_unicode_is_refused_by_the_clients_name_of_it(path, body, field):
    backend = FakeBackend("a")
    with running(backend, tool_call_parser="hermes") as gateway:
        status, refusal = gateway.refused(path, body)
    assert (status, backend.bodies) == (400, [])
    assert f"`{field}" in refusal["error"]["message"] and "lone surrogate" in refusal["error"]["message"]
    assert refusal["error"].get("param", field) == field
