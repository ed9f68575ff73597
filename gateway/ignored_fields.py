"""Request fields of OpenAI, Anthropic and other servers that are accepted without effect, with the reasons.

Fields that would change an answer are refused (gateway/openai/unsupported_fields.py).
"""

from __future__ import annotations

from collections.abc import Mapping

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {  # reason -> fields
    "name the client's user; nothing is stored for users": ("user", "safety_identifier"),
    "labels; metrics and logs have none": ("metadata", "custom_labels"),
    "choose between prices, speeds, places and payers, which do not differ here": (
        *("service_tier", "speed", "inference_geo", "billing_policy", "access_programs", "fallback_credit_token"),
    ),
    "about caching; all prompts are cached": (
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control", "session_id"),
    ),
    "choose a server or a worker among several": (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank"),
        "disagg_prefill_dp_rank",
    ),
    "help to guess tokens, which makes no difference to an answer": ("prediction", "ngram_corpus_id"),
    "choose a library for grammars; there is one": ("guided_decoding_backend",),
    "about spaces that tokenizers of this kind never add": ("spaces_between_special_tokens",),
    "how many tokens a response of a stream has; they are sent as they come": (
        *("max_streaming_response_tokens", "stream_interval"),
    ),
    "ask for figures that `usage`, `/metrics` or traces tell": (
        *("collect_metrics", "return_cached_tokens_details", "trace_context", "diagnostics"),
    ),
    "ask for the obfuscation of streams, which is not supported": ("stream_options",),
    "options of fields and tools that are not supported": (
        *("routed_experts_prompt_start", "routed_experts_start_len", "max_tool_calls", "image"),
    ),
    "name other models to try when the requested one declines; only one model is served": ("fallbacks",),
    "act on other paths of their servers only": ("return_token_offsets", "return_mm_kwargs"),
}
NAMES = tuple(name for names in WITHOUT_EFFECT.values() for name in names)
