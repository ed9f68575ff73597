"""Descriptions of the request fields, as in docs/api.md, for the gateway's OpenAPI document."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

from engine.sampling_parameters import PARAMETERS
from engine.wire.fields import FIELDS
from engine.wire.request import GenerationRequest
from engine.wire.schema import Json, schema_of

NO_EFFECT = "accepted without effect; only `truncate_prompt_tokens` cuts a prompt"

FIELD_DESCRIPTIONS = {
    "text": "the prompt: a user turn where the model has a chat template, else continued as it stands",
    "input_ids": "the prompt as token ids",
    "messages": "the prompt as up to 10000 turns with `role` and `content` (a text, or a list of parts of type `text`, "
    "and of type `image_url` where the model reads [images](#images))",
    "mm_processor_kwargs": "`min_pixels` and `max_pixels` of each [image](#images), up to 67108864 and the server's",
    "system": "a system message before the others",
    "apply_chat_template": "of `text`: `false` continues it as it stands",
    "chat_template_kwargs": "an object of variables for the chat template",
    "req_id": "a name of up to 256 characters, unique among open requests; needed over gRPC, random over HTTP",
    "max_dec_len": (
        "longest answer in tokens, up to `MAX_DEC_LEN`; 0: none, the prompt is only read; default: `MAX_DEC_LEN`, or "
        "what is left of the context"
    ),
    "cut_max_dec_len": "reduce a `max_dec_len` for which there is no room to the longest that there is room for",
    "min_dec_len": "shortest answer in tokens; ids that end it cannot be chosen before",
    **{each.field: each.meaning for each in PARAMETERS},
    "n": "1 to 16 answers to the prompt, which is computed once; those that do not fit beside the others wait",
    "best_of": (
        "up to 16 answers that are generated, of which the `n` likeliest are returned: see "
        "[The best](#the-best-of-several)"
    ),
    "use_beam_search": "search for the `n` likeliest answers with `best_of` beams, `n` if that is not given",
    "length_penalty": "-10 to 10, with `use_beam_search`: an answer's logprob is divided by this power of its length",
    "infer_seed": (
        "whole number of 64 bits, random if not given: the same seed gives the same answer; of `n` answers the "
        "second has the seed after it, and so on"
    ),
    "stop_sequences": "a text or a list of up to 64, each of up to 1024 characters: the answer ends before it",
    "include_stop_str_in_output": "the answer ends after the stop text instead",
    "eos_token_ids": "a token id or a list of up to 1024 that end the answer, beside the model's own",
    "ignore_eos": "the model's own end-of-sequence tokens do not end the answer",
    "skip_special_tokens": "leave special tokens out of the text",
    "bad_words": "a text or a list of up to 64 that must not appear",
    "bad_words_token_ids": "a token id or a list of up to 1024 that must not appear",
    "logit_bias": "up to 1024 token ids (as texts) with a bias of -100 to 100 each",
    "logprobs": "-1: none; 0 or `true`: of each token; 1 to 20: also of as many of the likeliest",
    "prompt_logprobs": "the same of each token of the prompt, see [Scores](#scores)",
    "return_token_ids": "add the token ids of the prompt, its text, and the token that ended the answer",
    "pooling": (
        "`last` or `mean`: no answer, but [the embedding](#embeddings) of the prompt; `score`: what the checkpoint's "
        "[head](#scores-of-pairs) makes of it"
    ),
    "text_pair": "with `pooling` `score`: the text that is scored together with `text`",
    "truncate_prompt_tokens": "of a longer prompt only so many tokens are read, the last ones; -1: as many as fit "
    "beside the answer that is asked for (`max_dec_len`, else one token; of one that may be reduced half of the "
    "context at most), `MAX_SEQ_LEN` at most. A text with more bytes than `MAX_SEQ_LEN` of the longest tokens is "
    "refused all the same",
    "guided_json": ("a JSON schema, as an object or a text: [the answer](#structured-output) is JSON that it allows"),
    "guided_regex": "a regular expression that the whole answer matches",
    "guided_choice": "a list of up to 4096 texts: the answer is one of them",
    "guided_grammar": "a grammar, Lark's or EBNF: the answer follows it",
    "allowed_token_ids": "a list of 1 to 1024 token ids: the answer has no others, and ends only by one of them",
    "structural_tag": (
        "a `format`, [a tree of texts and structures](#structural-tags); or `structures`, a list of `begin`, `schema` "
        "and `end`, and `triggers`: in free text, where a trigger occurs, one of the structures that begin so follows"
    ),
    "response_format": (
        "OpenAI's: `type` is `text`, `json_object` (any object, or what a `schema` or `value` beside it allows), "
        "`json_schema` with `json_schema.schema`, or `structural_tag`"
    ),
    "reasoning_max_tokens": (
        "1 to 1000000: so many tokens the model may think, then its thought is ended and it answers; needs "
        "`REASONING_PARSER`, and a model to which `</think>` is one token"
    ),
    "guided_decoding_disable_any_whitespace": (
        "JSON without whitespace between its parts; default: `GUIDED_DECODING_DISABLE_ANY_WHITESPACE`"
    ),
    "traceparent": "W3C's: the span of which those of this request are [a part](operation.md#traces)",
    "cache_salt": (
        "a text of up to 256 characters: cached prompts are shared only with requests that give the same, so that "
        "response times do not reveal what others have asked"
    ),
    "lora_name": "the name of an [adapter](lora.md) that is loaded: it answers, not the model alone",
    "resume_from": (
        "the request was asked before, and so many tokens of its answer have come: [it goes on after them](#after-"
        "a-lost-connection); with `n` a list"
    ),
    "answer_ids": "the token ids of the answer as far as it is known, with `n` a list of lists: it goes on after them",
    "return_all_tokens": "one response at the end (of each of `n` answers) instead of a stream",
    "stream": "HTTP only: lines as they come instead of one object",
    "return_usage": "HTTP only, without `stream`: add `usage`",
    "timeout": (
        "seconds from the request's arrival to its first token, waiting included; over HTTP also between "
        "responses; 0: the default, which gRPC does not have"
    ),
    "priority": "-100 to 100, lower is earlier, see [Scheduling order](#scheduling-order)",
    "benchmark": "add time stamps to the answer",
    **dict.fromkeys(("model", "response_type", "response_timeout", "enable_text_truncate"), NO_EFFECT),
}


def field_schemas() -> dict[str, Json]:
    """Return the JSON Schema, with description and default, of each field of a native request and of its aliases."""
    defaults = native_defaults()
    found: dict[str, Json] = {}
    for name, field in FIELDS.items():
        default = {"default": defaults[name]} if name in defaults else {}
        schema = {**schema_of(field.check), "description": strip_links(FIELD_DESCRIPTIONS.get(name, "")), **default}
        found |= {each: schema if each == name else {**schema, "x-alias-of": name} for each in (name, *field.aliases)}
    return found


def native_defaults() -> dict[str, Any]:
    """Return the default values of the fields of a native request that have one."""
    own = {f.name: f.default for f in fields(GenerationRequest) if f.name != "parameters"}
    given = own | {each.field: each.default for each in PARAMETERS}
    return {name: value for name, value in given.items() if value not in (None, (), MISSING)}


def strip_links(text: str) -> str:
    """Replace Markdown links by their text, as their targets are not in the OpenAPI document."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
