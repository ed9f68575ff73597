"""From OpenAI's request to the model's: one native request a choice. Knows nothing of HTTP, answers or streams.

OpenAI's names are aliases in the wire contract, so most fields pass under their own name and keep it in messages.
What would change the answer and cannot be done is refused by name; anything else that is unknown is ignored.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine import wire
from engine.errors import InvalidRequest, RequestError
from engine.wire.fields import MAX_LOGPROBS, MAX_REQ_ID_LEN, Check

# Native name -> OpenAI's, of a prompt and what goes with it below
NAMES = {name: field.aliases[-1] for name, field in wire.FIELDS.items() if field.aliases} | {"req_id": "request_id"}
NAMED = re.compile(r"`(\w+)`|\b([a-z]+_[a-z_]+)\b")  # a field in a text of the model; no word of English
QUOTE = re.compile('"|the chat template refused')  # what follows may be the client's or a template's own words
MAX_N = 16
MAX_CHOICES = 128  # prompts times n

# OpenAI's fields and those that clients of vLLM and SGLang send
PASSED_ON = (
    *("temperature", "top_p", "seed", "stop", "logit_bias", "frequency_penalty", "presence_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "chat_template_kwargs"),
)
CHECKS = {key: field.check for name, field in wire.FIELDS.items() for key in (name, *field.aliases)}
A_BOOL, A_STRING, AN_OBJECT = CHECKS["stream"], CHECKS["system"], CHECKS["chat_template_kwargs"]
# field -> the values, besides null, false and the empty ones, that ask for nothing special
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "audio", "web_search_options", "suffix", "prompt_embeds"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "use_beam_search", "continue_final_message"), ()),
    **dict.fromkeys(("chat_template", "documents", "truncate_prompt_tokens"), ()),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "length_penalty": (1,),
}


class InvalidParameter(InvalidRequest):
    """InvalidRequest with the name of the field, for OpenAI's `param`."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Completion:
    """A checked request for one or several choices; `requests` holds the model's request of each, in order."""

    answer_id: str
    model: str
    is_chat: bool
    requests: list[dict[str, Any]]
    echoes: list[str]  # what each choice's text begins with
    n: int  # choices a prompt
    with_logprobs: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float | None
    names: dict[str, str]  # of the model's fields -> as the client calls them

    def in_clients_words(self, error: RequestError) -> RequestError:
        """A refusal of the model that names fields as the client does, the first of them also as `param`. What names
        none is about the prompt: all else was checked here."""
        if error.code >= 500:
            return error
        text = str(error)
        quote = QUOTE.search(text)
        ours, theirs = (text[: quote.start()], text[quote.start() :]) if quote else (text, "")
        found = [self.names[name] for match in NAMED.findall(ours) for name in match if name in self.names]
        told = type(error)(NAMED.sub(self._renamed, ours) + theirs)
        if found or isinstance(error, InvalidRequest):
            told.param = found[0] if found else self.names["text"]
        return told

    def _renamed(self, match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return match[0].replace(name, self.names.get(name, name))


def parse(body: dict[str, Any], is_chat: bool, default_model: str) -> Completion:
    """Raises InvalidParameter for the first field that is wrong."""
    body = {key: value for key, value in body.items() if value is not None}
    _refuse(body)
    n = _int(body, "n", 1, 1, MAX_N)
    if _int(body, "best_of", n, 1, 1000) > n:
        raise InvalidParameter("best_of", f"`best_of` above `n` is not supported: {body['best_of']} > {n}")
    options = _options(body, is_chat)
    sources, echoes = ([_chat_source(body)], [""]) if is_chat else _prompt_sources(body)
    if len(sources) * n > MAX_CHOICES:
        raise InvalidParameter("prompt", f"{len(sources)} prompts times n={n} exceed the limit of {MAX_CHOICES}")
    answer_id = _answer_id(body, is_chat, len(sources) * n)
    stream_options = _checked(body, "stream_options", AN_OBJECT, {})
    return Completion(
        answer_id=answer_id,
        model=_model(body, default_model),
        is_chat=is_chat,
        requests=list(_requests(answer_id, sources, n, options)),
        echoes=[echo for echo in echoes for _ in range(n)],
        n=n,
        with_logprobs="logprobs" in options,
        stream=_checked(body, "stream", A_BOOL, False),
        include_usage=_checked(stream_options, "include_usage", A_BOOL, False),
        continuous_usage=_checked(stream_options, "continuous_usage_stats", A_BOOL, False),
        timeout_s=_checked(body, "timeout", CHECKS["timeout"], None),
        names=_names(body, is_chat),
    )


def _names(body: dict[str, Any], is_chat: bool) -> dict[str, str]:
    source = "messages" if is_chat else "prompt"
    names = {name: name for name in wire.FIELDS} | NAMES | dict.fromkeys(("text", "input_ids", "prompt"), source)
    return names | {"max_dec_len": "max_completion_tokens"} if "max_completion_tokens" in body else names


def _refuse(body: dict[str, Any]) -> None:
    for name, harmless in REFUSED.items():
        value = body.get(name)
        if value and value not in harmless:
            raise InvalidParameter(name, f"`{name}` is not supported, it is {wire.shown(value)}")


def _options(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """What all choices share, in the wire's fields. Values are kept as they are, zeros too."""
    options = {"temperature": 1.0, "top_p": 1.0}  # OpenAI's defaults, not the native ones
    for name in PASSED_ON:
        if name in body and not (name == "min_tokens" and body[name] == 0):
            options[name] = _checked(body, name, CHECKS[name])
    for name in ("max_tokens", "max_completion_tokens"):  # the later one wins, as it does at OpenAI
        if name in body:
            options["max_tokens"] = _checked(body, name, CHECKS["max_tokens"])
    if (logprobs := _chat_logprobs(body) if is_chat else _logprobs(body)) is not None:
        options["logprobs"] = logprobs
    if "logit_bias" in options:
        options["logit_bias"] = body["logit_bias"]  # the checked one is no longer an object
    return options


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    wanted = _checked(body, "logprobs", A_BOOL, False)
    num_top = _int(body, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if num_top and not wanted:
        raise InvalidParameter("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    return num_top if wanted else None


def _logprobs(body: dict[str, Any]) -> int | None:
    return None if body.get("logprobs", False) is False else _int(body, "logprobs", 0, 0, MAX_LOGPROBS)


def _chat_source(body: dict[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        raise InvalidParameter("messages", "`messages` is missing")
    messages = _checked(body, "messages", CHECKS["messages"])
    return {"messages": [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]}


def _prompt_sources(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    if "prompt" not in body:
        raise InvalidParameter("prompt", "`prompt` is missing")
    prompt = body["prompt"]
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list)))
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list) or not prompts:
        raise InvalidParameter("prompt", "`prompt` must be a text, a list of token ids, or a list of either")
    if not _checked(body, "echo", A_BOOL, False):
        return [_prompt_source(each) for each in prompts], [""] * len(prompts)
    if body.get("logprobs", False) is not False or not all(isinstance(each, str) for each in prompts):
        raise InvalidParameter("echo", "`echo` is supported for prompts given as text and without `logprobs` only")
    return [_prompt_source(each) for each in prompts], prompts


def _prompt_source(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        text = _checked({"prompt": prompt}, "prompt", CHECKS["text"])
        return {"text": text, "apply_chat_template": False}
    return {"input_ids": _checked({"prompt": prompt}, "prompt", CHECKS["input_ids"])}


def _requests(answer_id: str, sources: list[Any], n: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each choice of a prompt has its own seed; the first has the client's, so n=1 is the first of n=2."""
    num_choices = len(sources) * n
    for index in range(num_choices):
        choice = {**sources[index // n], **options}
        choice["req_id"] = _choice_id(answer_id, index, num_choices)
        if index % n and "seed" in options:
            choice["seed"] = (options["seed"] + index % n) % 2**63
        yield choice


def _answer_id(body: dict[str, Any], is_chat: bool, num_choices: int) -> str:
    default = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    answer_id = _checked(body, "request_id", CHECKS["req_id"], default)
    limit = MAX_REQ_ID_LEN - len(_choice_id("", num_choices - 1, num_choices))
    if len(answer_id) > limit:
        text = f"The `request_id` has {len(answer_id)} characters, the limit with {num_choices} choices is {limit}"
        raise InvalidParameter("request_id", text)
    return answer_id


def _choice_id(answer_id: str, index: int, num_choices: int) -> str:
    return answer_id if num_choices == 1 else f"{answer_id}-{index}"


def _model(body: dict[str, Any], default: str) -> str:
    return _checked(body, "model", A_STRING, "") or default


def _checked(body: dict[str, Any], name: str, check: Check, default: Any = None) -> Any:
    if body.get(name) is None:
        return default
    try:
        return check(name, body[name])
    except InvalidRequest as error:
        raise InvalidParameter(name, str(error)) from None


def _int(body: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidParameter(name, f"The `{name}` must be an integer in [{low}, {high}], it is {wire.shown(value)}")
    return value
