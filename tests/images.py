"""Images and processors for tests, made from seeds."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.images.pool import ImageWorkerPool
from engine.images.processor import ImageProcessor
from engine.images.reader import ImageReader
from engine.images.worker import ImageSetup
from tests.byte_tokenizer import write_tokenizer

TOKENS = {"image_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
# Of a preprocessor_config.json: few pixels, so that files with results are small
SMALL = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
SIZES = [(28, 28), (27, 29), (29, 27), (57, 83), (9, 300), (300, 9), (120, 200), (1, 1), (42, 14), (4000, 21)]
STRIDE = 29  # of the values of patches that are compared
MODEL_TYPES = ("paddleocr_vl", "qwen2_5_vl")


def a_processor(model_type: str, **own: int) -> ImageProcessor:
    return ImageProcessor.of({"model_type": model_type, **TOKENS}, SMALL | own)


def an_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image of few large blocks of colour with noise."""
    rng = np.random.default_rng((seed, height, width))
    blocks = rng.integers(0, 200, (-(-height // 7), -(-width // 5), 3)).repeat(7, 0).repeat(5, 1)[:height, :width]
    return Image.fromarray((blocks + rng.integers(0, 56, (height, width, 3))).astype(np.uint8))


VISION_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
# A chat template as those of published models, which writes image parts itself
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_vision_model(directory: Path, template: str | None = VISION_TEMPLATE, **own: int) -> None:
    """Write the files of a model that reads images, without its weights. Without a `template` it is one of text."""
    write_tokenizer(directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    for text in VISION_TOKENS:
        added.append({**added[-1], "id": added[-1]["id"] + 1, "content": text})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    ids = [token["id"] for token in added[-3:]]
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", **dict(zip(TOKENS, ids, strict=True)), "vocab_size": 320})
    )
    (directory / "preprocessor_config.json").write_text(json.dumps(SMALL | own))


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


def a_data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def an_image_part(data: bytes, **more: Any) -> dict[str, Any]:
    """Return the part of an OpenAI message for a file."""
    return {"type": "image_url", "image_url": {"url": a_data_url(data), **more}}
