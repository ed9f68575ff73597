"""Reads the images of prompts: from data URLs or by download, decoded and resized in worker processes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

from engine.errors import ConfigError, InvalidRequest, escape_braces
from engine.images.fetch import ImageDownloader
from engine.images.pool import ImageWorkerPool, PreparedImage
from engine.images.processor import CONFIG, ImageError, ImageProcessor
from engine.images.worker import ImageSetup
from engine.settings.config import Config
from engine.wire.images import ImagePart

MAX_WORKERS = 4
BYTES_PER_PIXEL = 24  # of a worker, for the largest image: a progressive file, its pixels, and what is made of them
EXTRA_BYTES = 256 << 20  # of a worker: the file, the pixels for the model, and buffers
TIMEOUT_S = 30.0  # to decode an image
CACHE_BYTES = 64 << 20  # of prepared images, so that the next turn of a chat does not decode them again
LOW_DETAIL = 512 * 512  # pixels, as of OpenAI's models
DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.I)
Limits = tuple[int | None, int | None]


def processor_of(config: Config, directory: Path) -> ImageProcessor | None:
    """Return the processor of the model in `directory` with the limits of the settings, or None if it reads no images.
    Raises ModelError, and ConfigError if no image could have these limits."""
    processor = ImageProcessor.read(directory) if config.enable_mm and (directory / CONFIG).is_file() else None
    try:
        return processor and processor.with_limits(*config.image_pixels)
    except ImageError as error:
        raise ConfigError(f"MM_PROCESSOR_KWARGS does not fit the model: {error}") from None


class ImageReader:
    """Reads images for one model. Thread-safe."""

    def __init__(self, processor: ImageProcessor, pool: ImageWorkerPool, downloader: ImageDownloader | None = None):
        self.processor = processor
        self._pool, self._downloader = pool, downloader
        self._cache: OrderedDict[tuple[bytes, Limits], PreparedImage] = OrderedDict()  # least recently used first
        self._num_cached_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, config: Config, directory: Path) -> ImageReader | None:
        """Return the reader of the model in `directory`, or None if it reads no images. Raises ModelError."""
        processor = processor_of(config, directory)
        if processor is None:
            return None
        memory_bytes = BYTES_PER_PIXEL * config.max_image_pixels + EXTRA_BYTES
        setup = ImageSetup(str(directory.absolute()), config.max_image_pixels, memory_bytes, TIMEOUT_S)
        downloader = ImageDownloader(config.media_domains, config.max_body_bytes) if config.media_domains else None
        return cls(processor, ImageWorkerPool(setup, min(MAX_WORKERS, os.cpu_count() or 1)), downloader)

    def limits_of(self, given: Mapping[str, int] | None) -> Limits:
        """Return the limits of pixels that a request gives. Raises InvalidRequest if they exceed those of the
        server."""
        own = self.processor
        limits = {"min_pixels": own.min_pixels, "max_pixels": own.max_pixels} | dict(given or {})
        if limits["max_pixels"] > own.max_pixels:
            text = "The `{field}.max_pixels` is {value}, the limit of this server is {limit}"
            raise _of_kwargs(text, value=limits["max_pixels"], limit=own.max_pixels)
        if "min_pixels" not in (given or {}):
            limits["min_pixels"] = min(limits.values())
        try:
            own.with_limits(**limits)
        except ImageError as error:
            text = f"The `{{field}}` cannot be kept: {escape_braces(str(error))}"
            raise _of_kwargs(text, value=str(limits)) from None
        return limits["min_pixels"], limits["max_pixels"]

    def read(self, part: ImagePart, limits: Limits) -> PreparedImage:
        """Return the image of a part. Raises InvalidRequest that names the part."""
        try:
            data = self._data(part.url)
            return self._prepared(data, self._with_detail(part.detail, limits))
        except ImageError as error:
            raise part.error(escape_braces(str(error))) from None

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def _with_detail(self, detail: str, limits: Limits) -> Limits:
        least, most = limits
        if detail != "low" or most is None:
            return limits
        most = max(min(most, LOW_DETAIL), self.processor.unit**2)
        return min(least or most, most), most

    def _data(self, url: str) -> bytes:
        if not url[:5].lower() == "data:":
            if self._downloader is None:
                raise ImageError("is to be downloaded, which ALLOWED_MEDIA_DOMAINS does not allow: send a data URL")
            return self._downloader.fetch(url)
        found = DATA_URL.match(url[:1024])
        if not found:
            raise ImageError("is no data URL: it must begin like data:image/png;base64,")
        if not found[1].lower().startswith("image/"):
            raise ImageError("is a data URL of another type than image/...")
        if not found[2].lower().endswith(";base64"):
            return unquote_to_bytes(url[found.end() :])
        try:
            return base64.b64decode(url[found.end() :], validate=True)
        except binascii.Error:
            raise ImageError("is a data URL with invalid base64") from None

    def _prepared(self, data: bytes, limits: Limits) -> PreparedImage:
        key = hashlib.blake2b(data, digest_size=16).digest(), limits
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        image = self._pool.prepare(data, limits)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = image
                self._num_cached_bytes += len(image.pixels)
            while self._num_cached_bytes > CACHE_BYTES:
                self._num_cached_bytes -= len(self._cache.popitem(last=False)[1].pixels)
        return image


def _of_kwargs(text: str, **cause: object) -> InvalidRequest:
    return InvalidRequest(text, field="mm_processor_kwargs", **cause)
