"""Fields of a request: names, aliases and checks."""

from __future__ import annotations

from typing import NamedTuple

from engine.sampling_parameters import PARAMETERS
from engine.wire import checks
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS


class Field(NamedTuple):
    """Aliases and check of one field."""

    aliases: tuple[str, ...]  # the first name that is present wins; the last alias is OpenAI's
    check: checks.Check


FIELDS: dict[str, Field] = {
    "req_id": Field((), checks.req_id),
    "text": Field((), checks.filled_string),
    "input_ids": Field((), checks.ids),
    "messages": Field((), checks.messages),
    "system": Field((), checks.string),
    "apply_chat_template": Field((), checks.boolean),
    "chat_template_kwargs": Field((), checks.json_object),
    "max_dec_len": Field(("seq_len", "max_tokens"), checks.max_len),
    "cut_max_dec_len": Field((), checks.boolean),
    "min_dec_len": Field(("min_tokens",), checks.positive_int),
    **{each.field: Field(each.aliases, checks.sampling(each)) for each in PARAMETERS},
    "n": Field((), checks.int_in(1, checks.MAX_N)),
    "best_of": Field((), checks.int_in(1, checks.MAX_N)),
    "use_beam_search": Field((), checks.boolean),
    "length_penalty": Field((), checks.number_in(-10, 10)),
    "infer_seed": Field(("seed",), checks.int_in(-(2**63), 2**64 - 1)),
    "eos_token_ids": Field(("stop_token_ids",), checks.few_ids),
    "ignore_eos": Field((), checks.boolean),
    "stop_sequences": Field(("stop",), checks.strings),
    "include_stop_str_in_output": Field((), checks.boolean),
    "skip_special_tokens": Field((), checks.boolean),
    "bad_words": Field((), checks.strings),
    "bad_words_token_ids": Field((), checks.few_ids),
    "logit_bias": Field((), checks.logit_bias),
    "logprobs": Field((), checks.logprobs),
    "prompt_logprobs": Field((), checks.logprobs),
    "return_token_ids": Field((), checks.boolean),
    "pooling": Field((), checks.pooling),
    "text_pair": Field((), checks.filled_string),
    "truncate_prompt_tokens": Field((), checks.truncation),
    **{name: Field((), check) for name, check in STRUCTURED_OUTPUT_FIELDS.items()},
    "reasoning_max_tokens": Field(("thinking_token_budget",), checks.int_in(1, 10**6)),
    "guided_decoding_disable_any_whitespace": Field((), checks.boolean),
    "traceparent": Field((), checks.short_name),
    "cache_salt": Field((), checks.short_name),
    "mm_processor_kwargs": Field((), checks.mm_processor_kwargs),
    "lora_name": Field((), checks.short_name),
    "resume_from": Field((), checks.counts),
    "answer_ids": Field((), checks.answer_ids),
    "return_all_tokens": Field((), checks.boolean),
    "benchmark": Field((), checks.boolean),
    "stream": Field((), checks.boolean),
    "return_usage": Field((), checks.boolean),
    "response_type": Field((), checks.response_type),
    "timeout": Field((), checks.number_in(0, 1e9)),
    "priority": Field((), checks.int_in(-100, 100)),
    "response_timeout": Field((), checks.number_in(0, 1e9)),
    "enable_text_truncate": Field((), checks.boolean),  # prompts are never cut: a prompt that is too long is an error
    "model": Field((), checks.anything),
}
