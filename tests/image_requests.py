"""Files of models that read images, and requests with images, for tests."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from engine.images.pool import ImageWorkerPool
from engine.images.processor import ImageProcessor
from engine.images.reader import ImageReader
from engine.images.worker import ImageSetup
from tests.byte_tokenizer import write_tokenizer
from tests.images import SMALL, TOKENS

VISION_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
# A chat template as those of published models, which writes image parts itself
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def add_vision_tokens(directory: Path, template: str | None = VISION_TEMPLATE) -> None:
    """Give a model with a byte tokenizer the tokens and the chat template of a model that reads images, and limits of
    pixels. Without a `template` it keeps its own, which takes texts only."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    for text in VISION_TOKENS:
        added.append({**added[-1], "id": added[-1]["id"] + 1, "content": text})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    config = json.loads((directory / "config.json").read_text())
    config |= dict(zip(TOKENS, [token["id"] for token in added[-3:]], strict=True))
    (directory / "config.json").write_text(json.dumps(config))


def write_vision_model(directory: Path, template: str | None = VISION_TEMPLATE, **own: int) -> None:
    """Write the files of a model that reads images, without its weights."""
    write_tokenizer(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", "vocab_size": 320, "vision_config": {}})
    )
    (directory / "preprocessor_config.json").write_text(json.dumps(SMALL | own))
    add_vision_tokens(directory, template)


def a_reader(directory: Path, downloader: Any = None, **setup: Any) -> ImageReader:
    """Return the reader of a model that `write_vision_model` has written, with one worker process."""
    limits = {"max_pixels": 10**6, "memory_bytes": 256 << 20, "timeout_s": 20.0} | setup
    processor = ImageProcessor.read(directory)
    assert processor
    return ImageReader(processor, ImageWorkerPool(ImageSetup(str(directory), **limits), 1), downloader)


def a_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the image as a file of this format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def a_data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def an_image_part(data: bytes, **more: Any) -> dict[str, Any]:
    """Return the part of an OpenAI message for a file."""
    return {"type": "image_url", "image_url": {"url": a_data_url(data), **more}}
