"""The bundled model's chat template: what its script writes, and every chat that the wire lets pass."""

import json
from pathlib import Path

import pytest

from demo_model.tokenizer import CHAT_TEMPLATE
from engine import wire
from engine.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "demo_model"


def test_the_bundled_template_is_the_one_its_script_writes():
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_message_that_only_calls_tools_is_an_empty_one(content):
    call = {"role": "assistant", "tool_calls": [{"type": "function"}], **content}
    asked = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": [{"type": "text", "text": "42"}]}]
    messages = wire.parse_request({"req_id": "a", "messages": asked}).messages
    assert Tokenizer.load(FOLDER).render_chat(messages) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
