"""Images and processors for tests, made from seeds."""

from __future__ import annotations

import numpy as np
from PIL import Image

from engine.images.processor import ImageProcessor

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
