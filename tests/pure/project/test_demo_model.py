"""The bundled models: chat templates as their scripts write them and for every chat that the wire lets pass, and
answers about pictures."""

import base64
import io
import json
import random
from pathlib import Path

import pytest

from demo_model.pictures import ABOUT, NO_PICTURE, Turn, name_of, picture
from demo_model.tokenizer import CHAT_TEMPLATE
from demo_model.vision_chat import TEMPLATE, pieces_of
from engine import wire
from engine.llm import LLM
from engine.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "demo_model"


@pytest.mark.parametrize(("folder", "template"), [(FOLDER, CHAT_TEMPLATE), (FOLDER / "vision", TEMPLATE)])
def test_the_bundled_template_is_the_one_its_script_writes(folder, template):
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == template


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


@pytest.mark.parametrize("is_picture_first", [True, False])
def test_chats_with_pictures_are_rendered_as_in_the_training(is_picture_first):
    shown = picture(random.Random(0), (112, 112))
    turns = [
        Turn(shown.image, "What is it?", name_of(shown), ""),
        Turn(None, "Which color does it have?", "Black.", ""),
    ]
    trained = [piece for turn in turns for piece in pieces_of(turn, 1, is_picture_first)]
    parts = [{"type": "image"}, {"type": "text", "text": turns[0].question}]
    messages = [
        {"role": "user", "content": parts if is_picture_first else parts[::-1]},
        {"role": "assistant", "content": turns[0].answer},
        {"role": "user", "content": turns[1].question},
    ]
    assert Tokenizer.load(FOLDER / "vision").render_chat(messages) == "".join(trained[:-2])


def prompt_about(question, image=None):
    """Return the fields of a prompt with a question, and a picture before it."""
    parts = [{"type": "text", "text": question}]
    if image:
        file = io.BytesIO()
        image.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}]}


@pytest.mark.slow
def test_the_bundled_model_reads_pictures(tmp_path):
    pictures = [picture(random.Random(seed), (112, 112)) for seed in range(10)]
    assert {len(each.number) for each in pictures} == {0, 2, 3, 4}
    prompts = [prompt_about("Who are you?"), prompt_about("What is this?")]
    prompts += [prompt_about("What is this?", each.image) for each in pictures]
    prompts += [prompt_about("What color is it?", each.image) for each in pictures if each.shape]
    llm = LLM(FOLDER / "vision", cpu_threads=1, export_cache_dir=str(tmp_path))
    try:
        answers = llm.generate(prompts, {"temperature": 0, "max_dec_len": 40}, progress=False)
    finally:
        llm.close()
    colors = [f"{each.color.capitalize()}." for each in pictures if each.shape]
    assert [answer.text for answer in answers] == [ABOUT, NO_PICTURE, *map(name_of, pictures), *colors]
