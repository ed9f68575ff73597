"""Request fields that would change the answer and are not supported.

They are refused by name, as is a field that looks like a misspelling of a supported one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine import wire
from engine.errors import InvalidRequest
from gateway.ignored_fields import NAMES as WITHOUT_EFFECT

# field -> values that are accepted because they ask for the default; null, false and empty values always are
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "audio", "web_search_options", "suffix", "prompt_embeds"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "early_stopping"), ()),
    **dict.fromkeys(("chat_template", "documents", "min_characters"), ()),
    **dict.fromkeys(("logits_processors", "logits_processors_args", "custom_logit_processor"), ()),
    **dict.fromkeys(("stop_regex", "no_stop_trim", "lora_path", "vllm_xargs", "watermarking"), ()),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "logprob_token_ids", "repetition_detection"), ()),
    **dict.fromkeys(("extra_body", "mirostat", "dry_multiplier", "top_a", "dynatemp_range"), ()),
    "tfs_z": (1,),
    **dict.fromkeys(("moderation", "whitespace_pattern", "guided_whitespace_pattern", "disaggregate_info"), ()),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_meta_info", "session_params"), ()),
    **dict.fromkeys(("custom_params", "images_config", "media_io_kwargs", "mm_hashes", "response_max_tokens"), ()),
    **dict.fromkeys(("prompt_token_ids", "completion_token_ids", "disable_chat_template"), ()),
    **dict.fromkeys(("temp_scaled_logprobs", "top_p_normalized_logprobs", "include_draft_logprobs"), ()),
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "samplers", "lora", "n_probs"), ()),
    **dict.fromkeys(("sampling_params", "options", "nvext"), ()),  # objects that have fields in other APIs
    "return_prompt_text": (),
    "truncation_side": ("left",),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
REFUSED_METADATA = {"enable_thinking", "chat_template_kwargs", "reasoning_max_tokens"}  # in FastDeploy's `metadata`
REFUSED_IF_EMPTY = ("web_search_options",)  # fields whose empty object is a request as well
# The same for answers in content blocks
UNSUPPORTED_IN_BLOCKS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "use_beam_search"), ()),
    **dict.fromkeys(("return_tokens_as_token_ids",), ()),
    **dict.fromkeys(("n", "best_of"), (1,)),
}
UNSUPPORTED_IN_CHATS = ("echo", "add_special_tokens", "prompt")  # unsupported in chats
UNSUPPORTED_IN_COMPLETIONS = (
    *("messages", "tools", "top_logprobs", "reasoning_effort", "enable_thinking"),
    *("add_generation_prompt", "continue_final_message"),
)
# Fields for which only true is supported
ONLY_TRUE = ("separate_reasoning", "stream_reasoning", "include_logprobs_decode_token")
# Unsupported fields of embeddings and scores, by vLLM's names
UNSUPPORTED_POOLING_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("messages", "mm_processor_kwargs"), ()),
    **{"truncation_side": ("left",), "padding": ("do_not_pad",)},
    **{"embed_dtype": ("float32", "float"), "endianness": ("native", "little")},
}
# Native name -> OpenAI's
NAMES = {name: field.aliases[-1] for name, field in wire.FIELDS.items() if field.aliases} | {
    **{"req_id": "request_id", "lora_name": "model"}
}
# Names of OpenAI's fields in other APIs, for paths that have these fields
OTHER_API_NAMES = {
    **{"instructions": "messages", "input": "messages", "max_output_tokens": "max_tokens", "n_predict": "max_tokens"},
    **{"thinking": "enable_thinking", "thinking_budget": "reasoning_max_tokens", "reasoning": "reasoning_effort"},
    **dict.fromkeys(("output_config", "output_format", "format"), "response_format"),
    **{"repeat_penalty": "repetition_penalty", "grammar": "guided_grammar", "rid": "request_id"},
    **{"num_predict": "max_tokens", "min_new_tokens": "min_tokens", "random_seed": "seed", "stop_words": "stop"},
    **{"guided_decoding": "structured_outputs", "num_beams": "use_beam_search", "think": "enable_thinking"},
    **{"max_new_tokens": "max_tokens", "extra_key": "cache_salt", "return_prompt_token_ids": "return_token_ids"},
}


def refuse(body: dict[str, Any], is_chat: bool) -> None:
    """Raise InvalidRequest for an unsupported field of a chat or a completion. `body` contains no nulls."""
    name, path = ("prompt", "/v1/completions") if is_chat else ("messages", "/v1/chat/completions")
    if isinstance(body.get(name), str | list) and body[name]:
        raise InvalidRequest(f"`{{field}}` is a field of requests to {path}, not of this path", field=name)
    refuse_any(body, {**REFUSED, **dict.fromkeys(UNSUPPORTED_IN_CHATS if is_chat else UNSUPPORTED_IN_COMPLETIONS, ())})
    if inner := REFUSED_METADATA & set(labels if isinstance(labels := body.get("metadata"), dict) else ()):
        text = "`{field}` has {value}, which acts beside it only, as a field of the request"
        raise InvalidRequest(text, field="metadata", value=min(inner))
    refuse_false(body, ONLY_TRUE if is_chat else (*ONLY_TRUE, "add_special_tokens"))


def refuse_any(body: dict[str, Any], refused: Mapping[str, Collection[Any]]) -> None:
    """Raise InvalidRequest if a field of `refused` has a value other than its harmless ones."""
    for name, harmless in refused.items():
        value = body.get(name)
        if (value or name in REFUSED_IF_EMPTY and value == {}) and value not in harmless:
            raise InvalidRequest("`{field}` is not supported, it is {value}", field=name, value=wire.shown(value))


def refuse_false(body: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise InvalidRequest if one of these fields is false."""
    for name in names:
        if body.get(name) is False:
            raise InvalidRequest("`{field}` cannot be false", field=name, value=False)


def check_spelling(
    body: dict[str, Any], known: Collection[str], others: Collection[str] = (), called: Mapping[str, str] = NAMES
) -> None:
    """Raise InvalidRequest for a field that is misspelt or has another protocol's name.

    `known` are the supported fields of the path, `others` further names that exist, and `called` maps names in other
    protocols to those of this one.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(called.keys() & given.keys() - set(known)):
        text = f"`{name}` is a field of another protocol, its name here is `{{field}}`"
        raise InvalidRequest(text, field=called[name], value=wire.shown(given[name]))
    elsewhere = {*others, *WITHOUT_EFFECT, *REFUSED, *UNSUPPORTED_IN_CHATS, *UNSUPPORTED_IN_COMPLETIONS, *ONLY_TRUE}
    for problem in wire.misspelt(given, known, elsewhere):
        raise problem


def check_parts(name: str, value: Mapping[str, Any], parts: Mapping[str, wire.Check]) -> None:
    """Raise InvalidRequest if the object in the field `name` has an unknown or wrong part."""
    for problem in wire.misspelt(value, parts):
        raise problem
    for part, check in parts.items():
        if value.get(part) is not None:
            wire.within(name, f".{part}", check, value[part])


def refuse_more(name: str, count: int, limit: int) -> None:
    """Raise InvalidRequest if `count` exceeds `limit`."""
    if count > limit:
        text = "`{field}` has {value} items, the limit is {limit}"
        raise InvalidRequest(text, field=name, value=count, limit=limit)
