"""Writes what the slow image processors of Hugging Face transformers compute for the images of tests/images.py, for
tests that run without it. Run by hand, needs torch and Pillow:

    python -m tests.golden.make_image_processors

image_processors.npz: for each model type and size TYPE_HEIGHT_WIDTH every STRIDE-th value of the normalized patches,
f16, in the order of transformers, and TYPE_sizes, which are (height, width) before and after resizing for many sizes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddleocr
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

from tests.images import PROCESSORS, SIZES, SMALL, STRIDE, an_image

MODULES = {"paddleocr_vl": paddleocr}  # others: qwen
QWEN3 = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # as released
QWEN3_LIMITS = {"factor": 32, "min_pixels": 256**2, "max_pixels": 4096**2}


def processor_of(model_type: str) -> Any:
    """Return the slow image processor of a family, for few pixels."""
    module = MODULES.get(model_type, qwen)
    kind = next(kind for name, kind in vars(module).items() if name.endswith("ImageProcessorPil"))
    return kind(**SMALL, **(QWEN3 if model_type.startswith("qwen3") else {}))


def resized_sizes(model_type: str) -> list[tuple[int, int, int, int]]:
    """Return sizes before and after resizing; zeros where transformers refuses the size."""
    rng, rows, resized = random.Random(3), [], MODULES.get(model_type, qwen).smart_resize
    limits = QWEN3_LIMITS if model_type.startswith("qwen3") else {}
    for _ in range(2000):
        height, width = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        try:
            rows.append((height, width, *resized(height, width, **limits)))
        except ValueError:
            rows.append((height, width, 0, 0))
    return rows


def main() -> None:
    arrays = {}
    for model_type in PROCESSORS:
        process = processor_of(model_type)
        for height, width in SIZES:
            try:
                made = process(an_image(height, width), return_tensors="np")["pixel_values"]
            except ValueError:
                made = np.zeros((0, 0))
            arrays[f"{model_type}_{height}_{width}"] = made.astype(np.float16).ravel()[::STRIDE]
        arrays[f"{model_type}_sizes"] = np.array(resized_sizes(model_type), np.int16)
    np.savez_compressed(Path(__file__).parent / "image_processors.npz", **arrays)


if __name__ == "__main__":
    main()
