"""Decoding of image files to upright RGB images. It runs in worker processes, because the files come from clients."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from engine.images.processor import ImageError

FORMATS: dict[str, Callable[[bytes], bool]] = {
    "PNG": lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"),
    "JPEG": lambda data: data.startswith(b"\xff\xd8\xff"),
    "WEBP": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
    "GIF": lambda data: data[:6] in (b"GIF87a", b"GIF89a"),
}
ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {  # orientation -> how the pixels become upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WHITE = (255, 255, 255)  # behind transparent pixels


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the image in a file as RGB, upright and on a white background. Raises ImageError for a file that is not a
    whole image of one frame with at most `max_pixels` pixels."""
    kind = next((name for name, matches in FORMATS.items() if matches(data)), None)
    if kind is None:
        raise ImageError(f"is no image in a supported format, which are {', '.join(FORMATS)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, which does not matter
            return _decoded(data, kind, max_pixels)
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError:  # its text has the address of an object
        raise ImageError(f"is no valid {kind} file: its header cannot be read") from None
    except Exception as error:  # Pillow and its codecs raise many types
        raise ImageError(f"is no valid {kind} file: {str(error)[:200] or type(error).__name__}") from None


def _decoded(data: bytes, kind: str, max_pixels: int) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # checked here
    image: Image.Image = Image.open(io.BytesIO(data), formats=[kind])
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(f"has {width} x {height} pixels, at most {max_pixels} pixels are decoded")
    if kind != "JPEG" and getattr(image, "is_animated", False):  # photos may have a second one, of the depth
        raise ImageError("has several frames; animated images are not supported")
    image.load()
    turn = UPRIGHT.get(_orientation(image))
    image = _on_white(_with_8_bits(image))
    return image.transpose(turn) if turn is not None else image


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # metadata that cannot be read says nothing
        return 1


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Return the image with 8 bits per colour. Pillow would clip greys of 16 bits instead of scaling them."""
    if not image.mode.startswith("I"):
        return image
    greys = np.asarray(image)
    return Image.fromarray((np.clip(greys, 0, 0xFFFF) >> 8).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = Image.new("RGB", image.size, WHITE)
    background.paste(image, mask=image.getchannel("A"))
    return background
