"""Settings: which images requests may have, and how much of an image is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.errors import ConfigError
from engine.settings.setting import json_object, setting

LIMIT, KWARGS = "LIMIT_MM_PER_PROMPT", "MM_PROCESSOR_KWARGS"
PIXELS = ("min_pixels", "max_pixels")
OTHERS = ("video", "audio")  # may have a limit, but are not supported
IMAGE_BODY_BYTES = 32 << 20  # default of MAX_BODY_BYTES with a model that reads images
A_DOMAIN = re.compile(r"\*|[a-z0-9_.:-]+", re.I)


@dataclass(frozen=True)
class ImageSettings:
    enable_mm: bool = setting(True, "ENABLE_MM", "read images with a model that can; 0: such a model takes text only")
    limit_mm_per_prompt: str = setting(
        "image=16",
        LIMIT,
        'images of one prompt at most, as `image=16` or `{"image": 16}`; `video` may be named and has no effect',
    )
    mm_processor_kwargs: str = setting(
        "",
        KWARGS,
        "JSON object with `min_pixels` and `max_pixels` of an image after resizing; empty: those of the checkpoint."
        " `max_pixels` is also the limit of requests; other keys have no effect",
    )
    allowed_media_domains: str = setting(
        "",
        "ALLOWED_MEDIA_DOMAINS",
        "hosts from which images are downloaded, with commas between them, `*`: all, but never a private address;"
        " empty: images come in data URLs only",
    )
    max_image_pixels: int = setting(
        1 << 26, "MAX_IMAGE_PIXELS", "pixels of an image file, which are known before it is decoded", minimum=1
    )

    @cached_property
    def max_images(self) -> int:
        """Return the limit of images in a prompt. Raises ConfigError."""
        limits = _limits(self.limit_mm_per_prompt)
        if unknown := limits.keys() - {"image", *OTHERS}:
            raise ConfigError(f"{LIMIT} has {min(unknown)!r}, the kinds are image, {', '.join(OTHERS)}")
        counts = {kind: each.get("count") if isinstance(each, Mapping) else each for kind, each in limits.items()}
        for kind, count in counts.items():
            if type(count) is not int or count < 0:
                raise ConfigError(f"{LIMIT} has {count!r} for {kind}, it must be a whole number from 0")
        return int(counts.get("image") or 0) if "image" in counts else 16

    @cached_property
    def image_pixels(self) -> tuple[int | None, int | None]:
        """Return the least and the most pixels of an image; None: as the checkpoint says. Raises ConfigError."""
        try:
            given = json_object(self.mm_processor_kwargs)
        except ValueError as error:
            raise ConfigError(f"{KWARGS} is {self.mm_processor_kwargs!r}, it must be a JSON object: {error}") from None
        found: list[int | None] = []
        for name in PIXELS:
            value = given.get(name, given.get(f"image_{name}"))
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{KWARGS} has {value!r} for {name}, it must be a whole number from 1")
            found.append(value)
        return found[0], found[1]

    @property
    def media_domains(self) -> frozenset[str]:
        return frozenset(each.strip().lower() for each in self.allowed_media_domains.split(",") if each.strip())

    def check_images(self) -> None:
        _ = self.max_images, self.image_pixels
        for each in self.media_domains:
            if not A_DOMAIN.fullmatch(each):
                raise ConfigError(f"ALLOWED_MEDIA_DOMAINS has {each!r}, it must be names of hosts or *")


def _limits(text: str) -> dict[str, Any]:
    """Read `image=2,video=1` or a JSON object. Raises ConfigError."""
    pairs = re.findall(r"\s*(\w+)\s*=\s*(\d+)\s*(?:,|$)", text)
    if pairs and re.fullmatch(r"(\s*\w+\s*=\s*\d+\s*(,|$))+", text):
        return {kind: int(count) for kind, count in pairs}
    try:
        return json_object(text)
    except ValueError as error:
        raise ConfigError(f"{LIMIT} is {text!r}, it must be a JSON object or like image=2: {error}") from None
