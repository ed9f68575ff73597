"""Inputs of the vision tower of an exported model for the images of prompts. Independent of devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.core.spans import PromptSpan
from engine.errors import InvalidRequest
from engine.images.processor import ImageProcessor
from engine.models.config_fields import read_json
from engine.models.families import read_model
from engine.models.vision import VisionFamily
from engine.models.vision_inputs import place_inputs, tower_inputs

RESERVED_PATCHES = 1 << 14  # of an image, for which memory is reserved


class ImageInputs:
    """Makes the inputs of the tower of a model."""

    def __init__(self, graph_dir: Path):
        model, processor = read_model(read_json(graph_dir / "config.json")), ImageProcessor.read(graph_dir)
        assert isinstance(model, VisionFamily) and model.vision and processor, "the export has a graph of a tower"
        self._config, self.processor = model.vision, processor

    def check(self, span: PromptSpan) -> None:
        """Raise InvalidRequest for a span whose pixels are no image of its grid."""
        num_bytes = 3 * self.processor.unit**2 * span.length
        if len(span.grid) != 3 or span.grid[0] != 1 or len(span.pixels) != num_bytes:
            text = f"an image of {span.length} tokens has {num_bytes} bytes of pixels here, not {len(span.pixels)}"
            raise InvalidRequest(text)

    def of(self, span: PromptSpan) -> dict[str, np.ndarray]:
        """Return the inputs by name."""
        assert len(span.grid) == 3, "an image has a grid"
        return tower_inputs(self._config, self.processor.patches(self.pixels(span)), span.grid)

    def pixels(self, span: PromptSpan) -> np.ndarray:
        """Return the pixels, u8 [height, width, 3]."""
        assert len(span.grid) == 3, "an image has a grid"
        _, rows, columns = span.grid
        unit = self.processor.unit
        return np.frombuffer(span.pixels, np.uint8).reshape(rows * unit, columns * unit, 3)

    def places(self, span: PromptSpan) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the tokens in the order of the tower, i32 [tokens], and all inputs except the patches."""
        assert len(span.grid) == 3, "an image has a grid"
        return place_inputs(self._config, span.grid)

    def largest(self) -> PromptSpan:
        """Return a span with the largest usual image, for which memory is reserved."""
        num_patches = min(self.processor.max_pixels // self.processor.patch_size**2, RESERVED_PATCHES)
        return self.square(max(int(num_patches**0.5) // self._config.merge_size, 1))

    def square(self, rows: int) -> PromptSpan:
        """Return a span with a black image of `rows` x `rows` tokens."""
        pixels = bytes(3 * (rows * self.processor.unit) ** 2)
        return PromptSpan(0, rows**2, b"", grid=(1, rows, rows), pixels=pixels)
