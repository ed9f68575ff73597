"""Chats to the text that a model was trained on, by its template, on a small tokenizer."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import ChatTemplateError, Tokenizer, TokenizerError
from tests.pure.text.test_tokenizer import SPECIAL, a_byte_level_backend, a_model_dir

GOLDEN = Path(__file__).parents[2] / "golden" / "chat_templates.json"
GOLDEN_NAMES = {"chatml", "llama3", "qwen2.5", "mistral", "whitespace"}
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>
{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""


def a_chat_tokenizer(source, special_tokens=None):
    sources = {"default": source} if isinstance(source, str) else source
    special = special_tokens or SPECIAL
    return Tokenizer(a_byte_level_backend(), special, ChatTemplate(sources, special))


def user(text):
    return [{"role": "user", "content": text}]


def test_a_chat_is_rendered_with_its_special_tokens():
    messages = [*user("hi"), {"role": "assistant", "content": "hello"}, *user("你好 <b>&")]
    tokenizer = a_chat_tokenizer(TEMPLATE)
    chat = "<s><|user|>\nhi</s>\n<|assistant|>\nhello</s>\n<|user|>\n你好 <b>&</s>\n"
    assert tokenizer.render_chat(messages) == chat + "<|assistant|>\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == chat


def test_special_tokens_in_a_message_are_recognised():
    tokenizer = a_chat_tokenizer("{{ messages[0].content }}")
    assert tokenizer.encode(tokenizer.render_chat(user("</s>")), add_special_tokens=False) == [1]


def test_without_a_template_there_is_no_chat():
    tokenizer = Tokenizer(a_byte_level_backend(), SPECIAL)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="This model does not support chat_template."):
        tokenizer.render_chat(user("hi"))


def test_content_may_come_in_parts_of_text():
    tokenizer = a_chat_tokenizer("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat(user(parts)) == "one two"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "x"}, {"type": "text"}, "text", 7])
def test_content_that_is_not_text_is_refused(part):
    with pytest.raises(ChatTemplateError, match="parts of type text only"):
        a_chat_tokenizer(TEMPLATE).render_chat(user([part]))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why(source, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        a_chat_tokenizer(source).render_chat(user("hi"))


def test_a_message_that_is_no_object_is_refused():
    with pytest.raises(ChatTemplateError, match="must be an object"):
        a_chat_tokenizer(TEMPLATE).render_chat(["hi"])


def test_the_messages_are_no_variable_of_the_client():
    with pytest.raises(ChatTemplateError, match="messages cannot be set"):
        a_chat_tokenizer(TEMPLATE).render_chat(user("hi"), **{"messages": []})


def test_a_template_with_a_syntax_error_stops_the_start():
    with pytest.raises(TokenizerError, match="line 2"):
        a_chat_tokenizer("{{ bos_token }}\n{% for %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ x | tojson }}", '{"z": "<é>", "a": [1, null]}'),
        ("{{ x | tojson(indent=1) }}", '{\n "z": "<é>",\n "a": [\n  1,\n  null\n ]\n}'),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in [0, 1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a {%- generation %}b{% endgeneration %}c", "abc"),
        ("{{ tools is none and documents is none and unk_token is undefined }}", "True"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_templates_find_what_they_expect(source, expected):
    assert a_chat_tokenizer(source).render_chat(user("hi"), x={"z": "<é>", "a": [1, None]}) == expected


def test_templates_know_the_date():
    today = a_chat_tokenizer("{{ strftime_now('%Y-%m-%d') }}").render_chat(user("hi"))
    assert abs((datetime.now() - datetime.strptime(today, "%Y-%m-%d")).days) <= 1


def test_tools_have_a_template_of_their_own_where_there_is_one():
    tokenizer = a_chat_tokenizer({"default": "plain", "tool_use": "tools: {{ tools | length }}"})
    assert tokenizer.render_chat(user("hi")) == "plain"
    assert tokenizer.render_chat(user("hi"), tools=[{}]) == "tools: 1"
    with pytest.raises(ChatTemplateError, match="no default"):
        a_chat_tokenizer({"tool_use": ""}).render_chat(user("hi"))


def test_templates_come_from_the_config_or_from_a_file_of_their_own(tmp_path):
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": ""}]
    by_name = {"default": "by name", "tool_use": ""}
    for source, expected in (("in the config", "in the config"), (named, "named"), (by_name, "by name")):
        a_model_dir(tmp_path, tokenizer_config={"chat_template": source})
        assert Tokenizer.load(tmp_path).render_chat(user("hi")) == expected
    (tmp_path / "chat_template.jinja").write_text("in a file", encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(user("hi")) == "in a file"


def test_a_template_of_a_processor_is_used_if_there_is_no_other(tmp_path):
    a_model_dir(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}', encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(user("hi")) == "of a processor"
    a_model_dir(tmp_path, tokenizer_config={"chat_template": "in the config"})
    assert Tokenizer.load(tmp_path).render_chat(user("hi")) == "in the config"
    (tmp_path / "chat_template.jinja").write_text("in a file", encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(user("hi")) == "in a file"


def golden_cases():
    """Return the cases that transformers has rendered, see tests/golden."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("name", sorted(GOLDEN_NAMES))
def test_chats_render_as_transformers_renders_them(name):
    cases = [case for case in golden_cases() if case["name"] == name]
    assert len(cases) >= 10
    for case in cases:
        special = {key: case[key] for key in ("bos_token", "eos_token") if case[key] is not None}
        tokenizer = a_chat_tokenizer(case["template"], special)
        variables = {key: case[key] for key in ("tools", "add_generation_prompt")}
        if "error" in case:
            with pytest.raises(ChatTemplateError, match=re.escape(case["error"])):
                tokenizer.render_chat(case["messages"], **variables)
        else:
            assert tokenizer.render_chat(case["messages"], **variables) == case["expected"]


def test_every_golden_template_is_tested():
    assert {case["name"] for case in golden_cases()} == GOLDEN_NAMES
