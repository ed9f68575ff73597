"""Image processor: resizes images, divides them into patches and counts their tokens, as the checkpoint's configuration
says. Independent of requests and of the network that reads the patches."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.models.config_fields import ModelError, an_object, number, read_json, whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIG = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # the second one of transformers from version 5
MAX_ASPECT = 200  # of the longer side to the shorter one
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
BICUBIC = 3  # of Pillow's Resampling
# The defaults of transformers for keys that the configuration does not have
PADDLEOCR = {"min_pixels": 384**2, "max_pixels": 1536**2, "temporal_patch_size": 1}
QWEN: dict[str, Any] = {"min_pixels": 56**2, "max_pixels": 28**2 * 1280, "temporal_patch_size": 2}
# Those of the released checkpoints, because the defaults of transformers are for patches of another size
QWEN3 = QWEN | {
    "min_pixels": 256**2,
    "max_pixels": 4096**2,
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
DEFAULTS: dict[str, dict[str, Any]] = {  # by model_type
    "paddleocr_vl": PADDLEOCR,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
}


class ImageError(ValueError):
    """An image that the model cannot read. The message says why."""


@dataclass(frozen=True)
class ImageProcessor:
    """Processor of one checkpoint. Every size is (height, width).

    A token stands for `merge_size`² neighbouring patches of `patch_size`² pixels.
    """

    image_token_id: int  # the placeholder, once per token of the image
    start_token_id: int | None  # before an image; None: the model has no such token
    end_token_id: int | None
    patch_size: int
    merge_size: int
    temporal_patch_size: int  # frames of a patch; an image is repeated
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]  # of the colours, which are between 0 and 1
    std: tuple[float, ...]
    enlarges_small: bool  # images smaller than one token are enlarged before their aspect is checked

    @classmethod
    def read(cls, directory: Path) -> ImageProcessor | None:
        """Read the processor of a checkpoint or of an exported model. Return None if its family reads no images.

        Raises ModelError for values that are not supported.
        """
        keys = read_json(directory / CONFIG)
        if keys.get("model_type") not in DEFAULTS or "vision_config" not in keys:
            return None
        found = [read_json(path) for name in PROCESSOR_FILES if (path := directory / name).exists()]
        own = (an_object(found[0], "image_processor") or found[0]) if found else {}
        return cls.of(keys, own)

    @classmethod
    def of(cls, keys: Mapping[str, Any], own: Mapping[str, Any]) -> ImageProcessor:
        """Build it from the parsed config.json and preprocessor_config.json. Raises ModelError."""
        model_type = keys["model_type"]
        size = an_object(own, "size")
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        given = DEFAULTS[model_type] | _without_none(limits) | _without_none(own)
        _check(given)
        start, end = keys.get("vision_start_token_id"), keys.get("vision_end_token_id")
        made = cls(
            image_token_id=whole_number(keys, "image_token_id"),
            start_token_id=start,
            end_token_id=end,
            patch_size=whole_number(given, "patch_size", 14),
            merge_size=whole_number(given, "merge_size", 2),
            temporal_patch_size=whole_number(given, "temporal_patch_size"),
            min_pixels=whole_number(given, "min_pixels"),
            max_pixels=whole_number(given, "max_pixels"),
            mean=tuple(given.get("image_mean", CLIP_MEAN)),
            std=tuple(given.get("image_std", CLIP_STD)),
            enlarges_small=model_type == "paddleocr_vl",
        )
        try:
            return made.with_limits()
        except ImageError as error:
            raise ModelError(f"preprocessor_config.json: {error}") from None

    def with_limits(self, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageProcessor:
        """Return the processor with other limits of the resized image's pixels. Raises ImageError if no image could
        have them."""
        made = replace(self, min_pixels=min_pixels or self.min_pixels, max_pixels=max_pixels or self.max_pixels)
        if not made.unit**2 <= made.max_pixels or made.min_pixels > made.max_pixels:
            raise ImageError(
                f"min_pixels is {made.min_pixels} and max_pixels is {made.max_pixels}: max_pixels must be at least"
                f" min_pixels and {made.unit**2}, the pixels of a token"
            )
        return made

    @property
    def unit(self) -> int:
        """Return the pixels of a token in each direction."""
        return self.patch_size * self.merge_size

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which an image is resized: multiples of `unit` with nearly the same aspect, between
        `min_pixels` and `max_pixels`. Raises ImageError for an image that is too narrow."""
        unit, given = self.unit, f"{width} x {height}"
        if self.enlarges_small and height < unit:
            height, width = unit, round(width * unit / height)
        if self.enlarges_small and width < unit:
            height, width = round(height * unit / width), unit
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ImageError(f"is too narrow with {given} pixels: at most {MAX_ASPECT}:1 can be read")
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / factor / unit))
            columns = max(1, math.floor(width / factor / unit))
        elif rows * columns * unit**2 < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * factor / unit), math.ceil(width * factor / unit)
        return rows * unit, columns * unit

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the tokens of an image as (frames, rows, columns), the grid of its span. The size is that before
        resizing."""
        height, width = self.size_of(height, width)
        return 1, height // self.unit, width // self.unit

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image, whose size is that before resizing."""
        return math.prod(self.grid_of(height, width))

    def resize(self, image: Image) -> np.ndarray:
        """Return the pixels of an RGB image after resizing, u8 [height, width, 3]."""
        height, width = self.size_of(image.height, image.width)
        return np.asarray(image.resize((width, height), BICUBIC))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the normalized patches of a resized image, f32 [patches, 3 * frames * patch_size²].

        The patches of a token are adjacent, row by row; the tokens are in the order of the grid.
        """
        size, merge, (height, width, _) = self.patch_size, self.merge_size, pixels.shape
        grid = (height // self.unit, merge, size, width // self.unit, merge, size, 3)
        colours = np.empty((3, height, width), np.float32)
        for colour, values in enumerate(self.normalized):
            np.take(values, pixels[:, :, colour], out=colours[colour])
        # to [rows, columns, merge, merge, colours, frames, size, size]
        patches = colours.reshape(3, *grid[:-1]).transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        shape = (*patches.shape[:5], self.temporal_patch_size, size, size)
        return np.broadcast_to(patches, shape).reshape(-1, 3 * self.temporal_patch_size * size**2)

    def content_hash(self, pixels: np.ndarray) -> bytes:
        """Return the hash of a resized image and of everything else that its embeddings depend on besides the model."""
        own = [getattr(self, field.name) for field in fields(self) if field.name not in ("min_pixels", "max_pixels")]
        made = hashlib.sha256(b"image" + repr(own).encode())  # for which many processors have instructions
        made.update(struct.pack("<2q", *pixels.shape[:2]))
        made.update(np.ascontiguousarray(pixels).data)
        return made.digest()[:16]

    @cached_property
    def normalized(self) -> np.ndarray:
        """Return the normalized value of each of the 256 values of a colour, f32 [3, 256]."""
        values = (np.arange(256) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (values - mean[:, None]) / std[:, None]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check(given: Mapping[str, Any]) -> None:
    """Raise ModelError for values that the processor would ignore."""
    expected = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC}
    for name, value in expected.items():
        if given.get(name, value) != value:
            raise ModelError(f"preprocessor_config.json: {name} is {given[name]!r}, supported is {value!r}")
    if abs(number(given, "rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ModelError(f"preprocessor_config.json: rescale_factor is {given['rescale_factor']!r}, supported is 1/255")
    for name in ("image_mean", "image_std"):
        values = given.get(name, [1, 1, 1])
        if not isinstance(values, list) or [type(value) in (int, float) for value in values] != [True] * 3:
            raise ModelError(f"preprocessor_config.json: {name} is {given[name]!r}, it must be three numbers")
