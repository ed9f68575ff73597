"""Conversations and chat templates of the kinds models come with, rendered by transformers. Part of make_golden."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import transformers

from tests.byte_tokenizer import CHAT_TEMPLATE, write_tokenizer

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim"
    " + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# What trim_blocks, lstrip_blocks, loop controls, namespaces and transformers' own `generation` block do.
WHITESPACE = """\
{% set state = namespace(count=0) %}
  {% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
  {% set state.count = state.count + 1 %}
{{ state.count }}. {{ message.role | upper }}:
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}
{% endif %}
  {% endfor %}
{% if add_generation_prompt %}
> {% endif %}"""
TEMPLATES = {
    "chatml": (CHAT_TEMPLATE, None, "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2.5": (QWEN25, None, "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "whitespace": (WHITESPACE, "<s>", "</s>"),
}
USER = {"role": "user", "content": "What is the capital of France?"}
SYSTEM = {"role": "system", "content": "Answer in one word."}
ANSWER = {"role": "assistant", "content": "  Paris.\n"}
ODD = {"role": "user", "content": ' <b>"Grüße" & 你好 {{ bos_token }} {% if %}\n\n\ttab\' '}
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ANSWER, ODD], [SYSTEM, ODD, ANSWER, USER], [USER, USER], [USER, ANSWER]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Today\'s weather <in> a "city" & more: ü',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def make_chat_cases() -> list[dict[str, Any]]:
    """Return the cases, each with the rendered text as `expected`, or the error of the template as `error`."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    cases = []
    for (name, (template, bos, eos)), messages, with_prompt in itertools.product(
        TEMPLATES.items(), CONVERSATIONS, (True, False)
    ):
        tokenizer.bos_token, tokenizer.eos_token = bos, eos
        for tools in (None, TOOLS) if name == "qwen2.5" and messages[0] is not USER else (None,):
            case = {"name": name, "template": template, "bos_token": bos, "eos_token": eos, "messages": messages}
            case |= {"tools": tools, "add_generation_prompt": with_prompt}
            settings = {"chat_template": template, "tools": tools, "add_generation_prompt": with_prompt}
            try:
                case["expected"] = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
            except jinja2.TemplateError as error:
                case["error"] = str(error)
            cases.append(case)
    return cases
