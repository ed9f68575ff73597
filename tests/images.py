"""Images and processors for tests, made from seeds."""

from __future__ import annotations

import numpy as np
from PIL import Image

from engine.core.spans import PromptSpan
from engine.images.processor import ImageProcessor

TOKENS = {"image_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
# Of a preprocessor_config.json: few pixels, so that files with results are small
SMALL = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
# Pillow 13 and older versions, which Python 3.10 needs, resize images of all these sizes to the same pixels.
SIZES = [(28, 28), (27, 29), (29, 27), (57, 85), (9, 300), (250, 20), (120, 200), (1, 1), (42, 14), (4000, 21)]
SIZES += [(32, 32), (31, 33), (33, 31)]
STRIDE = 29  # of the values of patches that are compared
PROCESSORS = ("paddleocr_vl", "qwen2_5_vl", "qwen3_vl")  # a model_type of each image processor
MODEL_TYPES = (*PROCESSORS, "qwen3_vl_moe", "qwen3_5")


def a_processor(model_type: str, **own: int) -> ImageProcessor:
    return ImageProcessor.of({"model_type": model_type, **TOKENS}, SMALL | own)  # others are defaults


def an_image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image of few large blocks of colour with noise."""
    rng = np.random.default_rng((seed, height, width))
    blocks = rng.integers(0, 200, (-(-height // 7), -(-width // 5), 3)).repeat(7, 0).repeat(5, 1)[:height, :width]
    return Image.fromarray((blocks + rng.integers(0, 56, (height, width, 3))).astype(np.uint8))


# Parts of prompts: token ids, and images as (height, width, seed), whose pixels do not depend on the version of Pillow
Part = list[int] | tuple[int, int, int]
PROMPTS: list[list[Part]] = [
    [(27, 29, 0), [10, 20, 30]],  # an image first
    [[7, 8, 9], (29, 28, 1)],  # last, before the end token
    [[11] * 20, (57, 85, 2), [12, 13], (9, 300, 3), [14] * 15],  # two, between texts; one of them is narrow
    [[15], (120, 200, 4), (120, 200, 4), (28, 27, 5), [16, 17]],  # the same image twice, without text between
]


def token_ids_of(model_type: str, parts: list[Part]) -> list[int]:
    """Return the token ids of a prompt: each image has a placeholder for each of its tokens, between two others."""
    return prompt_of(model_type, parts)[0]


def prompt_of(model_type: str, parts: list[Part]) -> tuple[list[int], list[PromptSpan]]:
    """Return the token ids of a prompt, and the spans of its images with pixels."""
    processor = a_processor(model_type)
    token_ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        pixels, grid = processor.resize(an_image(*part)), processor.grid_of(*part[:2])
        token_ids.append(TOKENS["vision_start_token_id"])
        length, content_hash = processor.num_tokens(*part[:2]), processor.content_hash(pixels)
        spans.append(PromptSpan(len(token_ids), length, content_hash, grid=grid, pixels=pixels.tobytes()))
        token_ids += [TOKENS["image_token_id"]] * length + [TOKENS["vision_end_token_id"]]
    return token_ids, spans
