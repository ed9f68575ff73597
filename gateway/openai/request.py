"""Translation of OpenAI's requests to the model's: one native request per prompt.

It is independent of HTTP.

OpenAI's names are aliases in the wire contract, so most fields are forwarded under their own names and keep them in
messages. Fields that are not supported are in unsupported_fields.py; unknown fields are ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from engine.sampling_parameters import PARAMETERS
from engine.wire import MAX_LOGPROBS, MAX_REQ_ID_LEN, STRUCTURED_OUTPUT_FIELDS, Check, int_in
from gateway.openai.output_parser import OutputParser
from gateway.openai.output_syntax import NO_SYNTAX, OutputSyntax
from gateway.openai.prompts import Prompts, read_prompts, sources_of
from gateway.openai.tools import Tools, read_tools, with_parsed_arguments
from gateway.openai.unsupported_fields import NAMES, check_parts, refuse

MAX_CHOICES = 128  # largest number of prompts times n

# OpenAI's fields and those that clients of vLLM and SGLang send
FORWARDED_FIELDS = (
    *(each.openai_name for each in PARAMETERS),
    *("seed", "stop", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "bad_words_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "chat_template_kwargs", "cache_salt", "priority"),
    *(
        *STRUCTURED_OUTPUT_FIELDS,
        "guided_decoding_disable_any_whitespace",
        "reasoning_max_tokens",
        "thinking_token_budget",
    ),
    *("best_of", "use_beam_search", "length_penalty", "truncate_prompt_tokens", "mm_processor_kwargs"),
)
UNSET = {"min_tokens": 0, "thinking_token_budget": -1}  # the same as not given
PROMPT_OUTPUT_FIELDS = ("prompt_logprobs", "return_token_ids")  # forwarded as well; these add fields to the response
# Of `structured_outputs`, as newer versions of vLLM's clients send it
STRUCTURED = {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")} | {
    "structural_tag": "structural_tag",
    "disable_any_whitespace": "guided_decoding_disable_any_whitespace",
}
IMPLIED_OPTIONS = ("disable_fallback", "disable_additional_properties")
TEMPLATE_FLAGS = ("add_generation_prompt", "continue_final_message", "enable_thinking")  # of a chat
# Forwarded as given, because the checked values are no JSON
UNPARSED_FIELDS = {"logit_bias", *STRUCTURED_OUTPUT_FIELDS}
CHECKS = {key: field.check for name, field in wire.FIELDS.items() for key in (name, *field.aliases)}
check_bool, check_string, check_object = CHECKS["stream"], CHECKS["system"], CHECKS["chat_template_kwargs"]
STREAM_OPTIONS = dict.fromkeys(("include_usage", "continuous_usage_stats"), check_bool)
check_positive, check_num_top = CHECKS["min_tokens"], int_in(0, MAX_LOGPROBS)
check_name = CHECKS["cache_salt"]  # a short string, because every event repeats the model's name


@dataclass(frozen=True)
class CompletionRequest:
    """Validated request for one or several choices. `requests` has the model's request for each prompt, in order."""

    answer_id: str
    model: str
    is_chat: bool
    requests: list[dict[str, Any]]
    prompts: Prompts
    n: int  # choices per prompt
    with_logprobs: bool
    as_token_ids: bool  # logprobs name tokens by their ids
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float | None
    names: Mapping[str, str]  # field of the model -> the client's name of it
    tools: Tools = Tools()
    syntax: OutputSyntax = NO_SYNTAX  # syntax of the answers
    include_reasoning: bool = True
    unenforced: tuple[str, ...] = ()  # schema keywords that are not enforced, if the client allows that

    def reader(self) -> OutputParser:
        """Return a parser of one answer."""
        return OutputParser(self.syntax, bool(self.tools.forced), self.include_reasoning, self.tools.names)


def parse(
    body: dict[str, Any], is_chat: bool, default_model: str, syntax: OutputSyntax = NO_SYNTAX
) -> CompletionRequest:
    """Return the validated request.

    Raise InvalidRequest for the first field that is wrong, by the client's name of it.
    """
    body = {key: value for key, value in body.items() if value is not None}
    refuse(body, is_chat)
    if body.get("store"):
        text = "`{field}` is not supported, only answers of /v1/responses are stored"
        raise InvalidRequest(text, field="store", value=wire.shown(body["store"]))
    _spread(body)
    n = _checked(body, "n", CHECKS["n"], 1)
    options, unenforced = _options(body, is_chat)
    tools = read_tools(body, syntax) if is_chat else Tools()
    of_tools, of_functions = tools.fields(options)
    options |= of_tools
    sources = [chat_source(body)] if is_chat else sources_of("prompt", body, MAX_CHOICES)
    prompts = read_prompts(body, sources, options, is_chat)
    if len(sources) * n > MAX_CHOICES:
        text = f"{len(sources)} {{field}}s times n={n} exceed the limit of {{limit}}"
        raise InvalidRequest(text, field="prompt", value=len(sources) * n, limit=MAX_CHOICES)
    if n > 1:
        options["n"] = n
    timeout_s = _checked(body, "timeout", CHECKS["timeout"], None)
    if timeout_s:
        options["timeout"] = timeout_s
    answer_id = _answer_id(body, is_chat, len(sources))
    stream = _checked(body, "stream", check_bool, False)
    stream_options = _checked(body, "stream_options", check_object, {})
    if stream_options and not stream:
        raise InvalidRequest("`{field}` needs `stream` to be true", field="stream_options", value=True)
    check_parts("stream_options", stream_options, STREAM_OPTIONS)
    return CompletionRequest(
        answer_id=answer_id,
        model=model_of(body, default_model),
        is_chat=is_chat,
        requests=_requests(answer_id, sources, options),
        prompts=prompts,
        n=n,
        with_logprobs="logprobs" in options,
        as_token_ids=_checked(body, "return_tokens_as_token_ids", check_bool, False),
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        timeout_s=timeout_s,
        names=_names(body, is_chat) | ({"guided_grammar": "tools"} if "guided_grammar" in of_tools else {}),
        tools=tools,
        syntax=replace(syntax, calls=tools.calls) if is_chat else NO_SYNTAX,
        include_reasoning=_checked(body, "include_reasoning", check_bool, True),
        unenforced=(*unenforced, *of_functions),
    )


def _names(body: dict[str, Any], is_chat: bool) -> dict[str, str]:
    source = "messages" if is_chat else "prompt"
    names = NAMES | {name: name for name in NAMES if name in body}  # if a field has two names, use the client's
    names |= dict.fromkeys(("text", "input_ids", "messages"), source)
    if "structured_outputs" in body:
        names |= dict.fromkeys(STRUCTURED.values(), "structured_outputs")
    if "prompt_logprobs" not in body:  # then it was set by `echo`
        names |= {"prompt_logprobs": "logprobs"}
    return names | {"max_dec_len": "max_completion_tokens"} if "max_completion_tokens" in body else names


def _spread(body: dict[str, Any]) -> None:
    """Copy the parts of `structured_outputs` into the equivalent fields of `body`."""
    for given, value in _checked(body, "structured_outputs", check_object, {}).items():
        name = STRUCTURED.get(given, given)
        if given == "json_object":
            name, value = "response_format", {"type": "json_object"} if value else None
        elif given in IMPLIED_OPTIONS:
            continue
        elif given not in STRUCTURED and value is not None:
            text = "`{field}` has {value}, known are {limit}"
            limit = ["json_object", *STRUCTURED]
            raise InvalidRequest(text, field="structured_outputs", value=wire.shown(given), limit=limit)
        if value is not None:
            wire.within("structured_outputs", f".{given}", CHECKS[name], value)  # errors name the client's field
            body[name] = value


def _options(body: dict[str, Any], is_chat: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what all prompts share, in the wire's fields, and what of a schema is not enforced. Values are kept as
    they are, zeros too."""
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}  # OpenAI's defaults, not the native ones
    unenforced: tuple[str, ...] = ()
    for name in (*FORWARDED_FIELDS, *PROMPT_OUTPUT_FIELDS):
        if name in body and not (name in UNSET and body[name] == UNSET[name]):
            checked = _checked(body, name, CHECKS[name])
            if checked is not None:
                options[name] = body[name] if name in UNPARSED_FIELDS else checked
            if isinstance(checked, wire.StructuredOutput):
                unenforced += checked.unenforced
    for name in ("max_tokens", "max_completion_tokens"):  # the later one wins, as it does at OpenAI
        if name in body:
            options["max_tokens"] = _checked(body, name, CHECKS["max_tokens"])
            options["cut_max_dec_len"] = True  # many clients send the limit of some other model
    if is_chat and (variables := _template_variables(body)):
        options["chat_template_kwargs"] = variables
    if (logprobs := _chat_logprobs(body) if is_chat else _logprobs(body)) is not None:
        options["logprobs"] = logprobs
    return options, unenforced


def _template_variables(body: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template, some of which have their own request fields."""
    variables = dict(_checked(body, "chat_template_kwargs", check_object, {}))
    for name in TEMPLATE_FLAGS:
        if name in body:
            variables[name] = check_bool(name, body[name])
    if variables.get("add_generation_prompt") and variables.get("continue_final_message"):
        text = "`{field}` and `add_generation_prompt` cannot both be true"
        raise InvalidRequest(text, field="continue_final_message", value=True)
    if "reasoning_effort" in body:
        effort = variables["reasoning_effort"] = _checked(body, "reasoning_effort", check_string)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    wanted = _checked(body, "logprobs", check_bool, False)
    num_top = _checked(body, "top_logprobs", check_num_top, 0)
    if num_top and not wanted:
        raise InvalidRequest("`{field}` needs `logprobs` to be true", field="top_logprobs", value=num_top)
    return num_top if wanted else None


def _logprobs(body: dict[str, Any]) -> int | None:
    if body.get("logprobs", False) is False:
        return None
    return _checked(body, "logprobs", check_num_top)


def tokenize_body(body: dict[str, Any], chat_of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a tokenize request for the prompt of `body`, whose chat `chat_of` returns."""
    chat = chat_of({name: value for name, value in body.items() if value is not None})
    return {**chat, **chat_source(chat), "mm_processor_kwargs": body.get("mm_processor_kwargs")}


def chat_source(body: dict[str, Any]) -> dict[str, Any]:
    """Return the model's `messages` field of a chat. Raise InvalidRequest."""
    if "messages" not in body:
        raise InvalidRequest("`{field}` is missing", field="messages")
    messages = _checked(body, "messages", CHECKS["messages"])
    with_calls = [with_parsed_arguments(each, index) for index, each in enumerate(messages)]
    return {"messages": [_as_templates_have_it(each) for each in with_calls]}


def _as_templates_have_it(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "developer":
        message = {**message, "role": "system"}
    reasoning = message.get("reasoning")  # newer versions of vLLM call it so
    return {"reasoning_content": reasoning, **message} if isinstance(reasoning, str) else message


def _requests(answer_id: str, sources: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    req_ids = [_req_id(answer_id, index, len(sources)) for index in range(len(sources))]
    return [{**source, **options, "req_id": req_id} for source, req_id in zip(sources, req_ids, strict=True)]


def _answer_id(body: dict[str, Any], is_chat: bool, num_prompts: int) -> str:
    default = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    answer_id = _checked(body, "request_id", CHECKS["req_id"], default)
    limit = MAX_REQ_ID_LEN - len(_req_id("", num_prompts - 1, num_prompts))
    if len(answer_id) > limit:
        text = f"The `{{field}}` has {{value}} characters, the limit with {num_prompts} prompts is {{limit}}"
        raise InvalidRequest(text, field="request_id", value=len(answer_id), limit=limit)
    return answer_id


def _req_id(answer_id: str, index: int, num_prompts: int) -> str:
    return answer_id if num_prompts == 1 else f"{answer_id}-{index}"


def model_of(body: dict[str, Any], default: str) -> str:
    """Return the model's name for the response: the requested one, or `default`."""
    return default if body.get("model") in (None, "") else check_name("model", body["model"])


def _checked(body: dict[str, Any], name: str, check: Check, default: Any = None) -> Any:
    return default if body.get(name) is None else check(name, body[name])
