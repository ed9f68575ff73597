"""Image files of clients are decoded to upright RGB, or refused with a sentence."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from engine.images.decoding import decode
from engine.images.processor import ImageError
from tests.image_requests import a_file
from tests.images import an_image

MAX_PIXELS = 100_000


def refusal(data, max_pixels=MAX_PIXELS):
    with pytest.raises(ImageError) as caught:
        decode(data, max_pixels)
    return str(caught.value)


def pixels_of(image, kind="PNG", **options):
    return np.asarray(decode(a_file(image, kind, **options), MAX_PIXELS))


def a_png(width, height, depth, colour, rows):
    """Return a PNG file of raw rows, also such as Pillow does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">2I5B", width, height, depth, colour, 0, 0, 0)
    data = b"".join(b"\0" + row for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})])
def test_formats_without_loss_are_decoded_exactly(kind, options):
    image = an_image(20, 30).quantize(64).convert("RGB")
    assert np.array_equal(pixels_of(image, kind, **options), np.asarray(image))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpeg_files_are_decoded(options):
    image = Image.new("RGB", (40, 30), (200, 30, 90))
    assert np.abs(pixels_of(image, "JPEG", quality=95, **options).astype(int) - np.asarray(image)).max() < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(orientation):
    """The pixel at the upper left of the upright image is red; where it is stored follows from the orientation."""
    row, column = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (-1, 0), 7: (-1, -1), 8: (0, -1)}[
        orientation
    ]
    stored = np.zeros((4, 6, 3), np.uint8)
    stored[row, column] = 255, 0, 0
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = pixels_of(Image.fromarray(stored), exif=exif)
    assert upright.shape == ((6, 4, 3) if orientation > 4 else (4, 6, 3))
    assert upright[0, 0].tolist() == [255, 0, 0] and upright.sum() == 255


def test_damaged_metadata_does_not_matter():
    file = a_file(Image.new("RGB", (4, 6), "red"), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(file, MAX_PIXELS).size == (4, 6)


def test_greys_of_16_bits_are_scaled():
    rows = [struct.pack(">3H", 0, 0x80FF, 0xFFFF)] * 2
    assert np.asarray(decode(a_png(3, 2, 16, 0, rows), MAX_PIXELS))[1].tolist() == [[0] * 3, [0x80] * 3, [255] * 3]


def test_colours_of_16_bits_are_scaled():
    rows = [struct.pack(">6H", 0x1234, 0x80FF, 0xFFFF, 0, 0xFF, 0x100)]
    assert np.asarray(decode(a_png(2, 1, 16, 2, rows), MAX_PIXELS)).tolist() == [[[0x12, 0x80, 255], [0, 0, 1]]]


def test_cmyk_is_converted():
    found = pixels_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(found.astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_images_of_few_colours_are_converted(mode):
    image = Image.new("RGB", (4, 4), "black").convert(mode)
    assert pixels_of(image).tolist() == [[[0, 0, 0]] * 4] * 4


def test_transparent_pixels_are_white():
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 100, 200, 255))
    assert pixels_of(image).tolist() == [[[255, 255, 255], [0, 100, 200]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 8, 7, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert pixels_of(palette, transparency=0).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    grey = Image.new("LA", (1, 1), (0, 127))
    assert pixels_of(grey)[0, 0, 0] == 128


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_images_are_refused(kind):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    assert "animated" in refusal(a_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=100))


def test_a_second_picture_in_a_photo_is_no_animation():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    file = a_file(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.abs(np.asarray(decode(file, MAX_PIXELS)).astype(int)[0, 0] - (255, 0, 0)).max() < 4


def test_too_many_pixels_are_refused_before_they_are_decoded():
    bomb = a_png(100_000, 100_000, 1, 0, [])  # 10 gigapixels in 70 bytes, none of which are there
    assert refusal(bomb) == "has 100000 x 100000 pixels, at most 100000 pixels are decoded"
    assert decode(a_file(an_image(100, 1000)), 100_000).size == (1000, 100)
    assert "100 x 1001" in refusal(a_file(an_image(1001, 100)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_files_are_refused(kind):
    whole = a_file(an_image(60, 60), kind)
    for length in (len(whole) // 2, len(whole) // 4, 30, 13):
        assert refusal(whole[:length]).startswith(f"is no valid {kind} file: ")
        assert " at 0x" not in refusal(whole[:length])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_are_decoded_or_refused(kind):
    whole, rng = a_file(an_image(30, 30), kind), np.random.default_rng(5)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 8)):
            damaged[rng.integers(12, len(damaged))] = rng.integers(256)
        try:
            decode(bytes(damaged), MAX_PIXELS)
        except ImageError as error:
            assert str(error)


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", b"BM" + bytes(100), b"%PDF-1.4", b"II*\0" + bytes(50)])
def test_other_formats_are_refused(data):
    assert refusal(data) == "is no image in a supported format, which are PNG, JPEG, WEBP, GIF"


def test_a_format_is_known_by_its_content_alone():
    file = a_file(an_image(8, 8), "BMP")
    assert Image.open(io.BytesIO(file)).format == "BMP"
    assert "no image in a supported format" in refusal(file)
