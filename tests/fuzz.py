"""Strategies of hypothesis for requests of clients: any JSON, and bodies with our fields in which some of it occurs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from engine import wire
from gateway.openai.request import FORWARDED_FIELDS
from gateway.openai.unsupported_fields import REFUSED

# A run is the same each time; FUZZ=long is for who wants to search.
ANY = list(HealthCheck)
settings.register_profile("same", derandomize=True, deadline=None, database=None, suppress_health_check=ANY)
settings.register_profile("long", derandomize=False, deadline=None, suppress_health_check=ANY)
PROFILE = settings.get_profile(os.environ.get("FUZZ", "same"))
INSIDE = ("/dev/shm", "llm_server_", "unix:", "ipv4:", "Traceback", str(Path(__file__).resolve().parents[1]), ".sock")


def examples(count: int) -> settings:
    """Return the number of examples of a test; a search uses fifty times as many."""
    return settings(PROFILE, max_examples=count * (50 if "FUZZ" in os.environ else 1))


LIMITS = (0, 1, 16, 20, 64, 100, 128, 256, 1000, 1024, 2**31, 2**53, 2**63, 2**64, 10**30)
whole = st.integers() | st.builds(lambda n, d, s: s * (n + d), st.sampled_from(LIMITS), st.integers(-1, 1), st.just(-1))
whole |= st.builds(lambda n, d: n + d, st.sampled_from(LIMITS), st.integers(-1, 1))
numbers = whole | st.floats() | st.sampled_from((0.01, 0.009, -0.0, 1.5, -2.0, 2.01, 5.0, 1e308, -100.5))
characters = st.characters(blacklist_categories=()) | st.sampled_from('\x00\ud800\udfff\u2028\x85{}[]"\\\u0301<|>')
texts = st.text(characters, max_size=20) | st.builds(
    lambda n, d, c: c * (n + d), st.sampled_from((64, 256, 1024)), st.integers(-1, 1), st.sampled_from("aä ")
)
words = st.sampled_from(("1", "7", "text", "user", "assistant", "<|im_end|>", "fastdeploy", "openai", "a-name"))
plain = st.none() | st.booleans() | numbers | texts | words
nested = st.recursive(plain, lambda each: st.lists(each, max_size=4) | st.dictionaries(texts | words, each, max_size=4))
parts = st.fixed_dictionaries({"type": words}, optional={"text": nested})
block_kinds = st.sampled_from(
    ("text", "input_text", "tool_use", "tool_result", "thinking", "function_call", "reasoning")
)
blocks = st.fixed_dictionaries(
    {"type": block_kinds}, optional=dict.fromkeys(("text", "name", "input", "content", "call_id", "output"), nested)
)
turns = st.fixed_dictionaries(
    {}, optional={"role": words | nested, "content": texts | st.lists(parts | blocks) | nested}
)
turns |= blocks
lists = st.lists(whole, max_size=20) | st.lists(texts | words, max_size=20) | st.lists(turns, max_size=4)
lists |= st.lists(st.lists(whole, max_size=4), max_size=20)
lists |= st.builds(lambda each, n, d: [each] * (n + d), plain, st.sampled_from((16, 64, 1024)), st.integers(-1, 1))
biases = st.dictionaries(st.from_regex("[0-9]{1,11}", fullmatch=True) | texts, numbers, max_size=4)
function = st.fixed_dictionaries({}, optional={"name": texts | nested, "parameters": nested})
kinds = st.sampled_from(("json_object", "json_schema", "structural_tag", "function", "text"))
modes = st.sampled_from(("none", "auto", "required"))
choices = st.fixed_dictionaries({}, optional={"type": kinds, "function": function | plain})
tools = st.lists(st.fixed_dictionaries({"type": kinds}, optional={"function": function | nested}), max_size=3)
output_formats = st.fixed_dictionaries(
    {"type": kinds}, optional={"json_schema": nested, "structures": nested, "triggers": lists}
)
any_json = nested | lists | biases | tools | choices | output_formats | output_formats.map(json.dumps)

# Enough of a request that what is beside it is looked at.
GOOD: dict[str, Any] = {
    **{"text": "Hi", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "req_id": "1"},
    **{"tools": [{"type": "function", "function": {"name": "f"}}], "stream": True},
    **{"input": "Hi", "max_tokens": 5},
}
NAMES = {key for name, field in wire.FIELDS.items() for key in (name, *field.aliases)} | {
    *FORWARDED_FIELDS,
    *REFUSED,
    *GOOD,
}
NAMES |= {"instructions", "max_output_tokens", "reasoning", "system", "stop_sequences", "thinking", "output_config"}
NAMES |= {"max_completion_tokens", "stream_options", "best_of", "request_id", "echo", "top_logprobs"}
NAMES |= {"tools", "tool_choice", "parallel_tool_calls", "structured_outputs", *wire.CONTROL_KEYS, wire.OWNER}


def bodies(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return bodies with valid values of `names`, and any of our fields with any value."""
    good = st.fixed_dictionaries({}, optional={name: st.just(GOOD[name]) for name in names})
    ours = st.dictionaries(st.sampled_from(sorted(NAMES)), any_json, max_size=4)
    return st.builds(lambda *each: {k: v for part in each for k, v in part.items()}, good, ours, st.just({}))


def deep(depth: int, value: Any = 1) -> bytes:
    """Return the JSON text of `depth` nested lists with a value in the innermost one."""
    return b"[" * depth + json.dumps(value).encode() + b"]" * depth


def payload_of(body: Any) -> bytes:
    """Encode a body as a client might write it, including values that strict parsers reject."""
    return json.dumps(body).encode()
