"""The image processor against transformers, and what it refuses."""

import numpy as np
import pytest

from engine.images.processor import ImageError, ImageProcessor
from engine.models.config_fields import ModelError
from tests.golden_arrays import golden
from tests.images import PROCESSORS, SIZES, STRIDE, TOKENS, a_processor, an_image

GOLDEN = golden("image_processors")
TOLERANCE = 1 / 255 / 0.25  # of a normalized colour: one step of 8 bits


def in_rows(patches: np.ndarray, grid: tuple[int, int, int], merge: int) -> np.ndarray:
    """Return the patches from the order of tokens in that of rows and columns of the image."""
    _, rows, columns = grid
    of_tokens = patches.reshape(rows, columns, merge, merge, -1)
    return of_tokens.transpose(0, 2, 1, 3, 4).reshape(patches.shape)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_patches_are_those_of_transformers(model_type, size):
    processor, expected = a_processor(model_type), GOLDEN[f"{model_type}_{size[0]}_{size[1]}"]
    if not len(expected):
        with pytest.raises(ImageError, match=f"^is too narrow with {size[1]} x {size[0]} pixels: at most 200:1"):
            processor.size_of(*size)
        return
    pixels = processor.resize(an_image(*size))
    patches, grid = processor.patches(pixels), processor.grid_of(*size)
    assert len(patches) == processor.num_tokens(*size) * processor.merge_size**2
    if model_type == "paddleocr_vl":  # transformers has its patches in rows, and orders them when it merges them
        patches = in_rows(patches, grid, processor.merge_size)
    assert np.abs(patches.ravel()[::STRIDE] - expected.astype(np.float32)).max() < TOLERANCE


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_sizes_are_those_of_transformers(model_type):
    processor = ImageProcessor.of({"model_type": model_type, **TOKENS}, {})
    for height, width, *expected in GOLDEN[f"{model_type}_sizes"].tolist():
        try:
            assert list(processor.size_of(height, width)) == expected
        except ImageError:
            assert expected == [0, 0]


@pytest.mark.parametrize(
    "own", [{"min_pixels": 100, "max_pixels": 3000}, {"size": {"shortest_edge": 100, "longest_edge": 3000}}]
)
def test_limits_are_read_under_both_names(own):
    processor = ImageProcessor.of({"model_type": "qwen2_5_vl", **TOKENS}, own)
    assert (processor.min_pixels, processor.max_pixels) == (100, 3000)
    assert processor.with_limits(max_pixels=2000).size_of(100, 100) == (28, 28)
    with pytest.raises(ImageError, match="max_pixels must be at least min_pixels and 784"):
        processor.with_limits(max_pixels=700)


def test_a_content_hash_is_of_pixels_size_and_settings_but_not_of_limits():
    processor, other = a_processor("qwen2_5_vl"), a_processor("qwen2_5_vl", image_mean=[0.5, 0.5, 0.5])
    pixels = processor.resize(an_image(56, 84))
    changed = pixels.copy()
    changed[-1, -1, -1] ^= 1
    turned = pixels.reshape(84, 56, 3)
    found = [processor.content_hash(each) for each in (pixels, changed, turned)]
    assert len({*found, other.content_hash(pixels)}) == 4
    assert processor.with_limits(max_pixels=5000).content_hash(pixels) == found[0]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"do_resize": False}, "do_resize is False, supported is True"),
        ({"resample": 2}, "resample is 2, supported is 3"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0, supported is 1/255"),
        ({"image_std": [1.0]}, "image_std is .1.0., it must be three numbers"),
        ({"image_mean": [1, 2, "x"]}, "image_mean is .1, 2, 'x'., it must be three numbers"),
        ({"rescale_factor": "x"}, "rescale_factor is 'x', it must be a positive number"),
        ({"patch_size": 0}, "patch_size is 0, it must be a positive whole number"),
        ({"max_pixels": 1000}, "preprocessor_config.json: min_pixels is 3136 and max_pixels is 1000: max_pixels must"),
    ],
)
def test_settings_that_are_not_supported_are_named(own, message):
    with pytest.raises(ModelError, match=message):
        ImageProcessor.of({"model_type": "qwen2_5_vl", **TOKENS}, own)


def test_a_folder_of_a_text_model_has_no_processor(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert ImageProcessor.read(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5", "image_token_id": 7}')
    assert ImageProcessor.read(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 7, "vision_config": {}}')
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 4000}}')
    processor = ImageProcessor.read(tmp_path)
    assert (processor.image_token_id, processor.max_pixels, processor.min_pixels) == (7, 4000, 3136)
