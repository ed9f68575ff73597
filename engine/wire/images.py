"""Image parts of messages: their check, and their separation from the messages, which keep a digest of each image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

Json = dict[str, Any]
IMAGE = "image_url"  # type of an image part, and the field with its URL
SCHEMES = re.compile("data:|https?://", re.I)
PATH = "path"  # field of an image part: where the client wrote it, relative to the field of the messages
A_PATH = re.compile(r"(\[\d{1,6}\]|\.[a-z_]{1,20}){1,12}")
DETAILS = ("auto", "low", "high")
UNSUPPORTED = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio", "file", "input_file")


class ImagePart(NamedTuple):
    """An image of a message that is not read yet."""

    url: str  # a data URL, or one of http(s)
    path: str  # where the client wrote it: `[0].content[1].image_url`, relative to the field of the messages
    detail: str = "auto"

    def error(self, problem: str, **cause: Any) -> InvalidRequest:
        """Return the error that names the part. `problem` follows its name and may have {value} and {limit}."""
        return InvalidRequest(f"The `{{field}}{self.path}` {problem}", field="messages", **cause)


def image_part(url: Any, path: str, detail: Any = None) -> Json:
    """Return the part of a chat message for an image that another protocol writes in its own way at `path`."""
    given = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": IMAGE, IMAGE: given, PATH: path}


class ImagePartError(ValueError):
    """An image part is wrong. `problem` says what must be different and has {value} for the wrong `value`."""

    def __init__(self, problem: str, value: Any):
        super().__init__(problem)
        self.problem, self.value = problem, value


def checked_part(part: Mapping[str, Any], place: str) -> Json:
    """Return the image part in its only form, with its path. Raises ImagePartError."""
    given = part.get(IMAGE)
    image: Mapping[str, Any] = {"url": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    url, detail = image.get("url"), image.get("detail")
    detail = "auto" if detail is None else detail
    if not isinstance(url, str) or not SCHEMES.match(url):
        problem = "must be an image as a URL: data:image/png;base64,... or https://..., it is {value}"
        raise ImagePartError(problem, given if url is None else url)
    if not url.isascii():
        raise ImagePartError("must be a URL of ASCII characters, it is {value}", url)
    if detail not in DETAILS:
        raise ImagePartError("must have a `detail` of auto, low or high, it is {value}", detail)
    return {"type": IMAGE, IMAGE: {"url": url, "detail": detail}, PATH: path_of(part, place)}


def path_of(part: Mapping[str, Any], place: str) -> str:
    """Return the path of an image part that is at `place` in the messages."""
    path = part.get(PATH)
    return path if isinstance(path, str) and A_PATH.fullmatch(path) else f"{place}.{IMAGE}"


def is_image_part(part: Any) -> bool:
    """Return whether a content part, which may be unchecked, is an image."""
    return isinstance(part, dict) and part.get("type") == IMAGE


def image_parts(messages: Any) -> Iterator[Json]:
    """Yield the image parts of messages, which may be unchecked."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if is_image_part(part):
                yield part


def has_images(body: Json) -> bool:
    """Return whether the body of a request, which is unchecked, has image parts: in its messages or in those
    that it wants tokenized."""
    tokenize = body.get("tokenize")
    found = (body.get("messages"), tokenize.get("messages") if isinstance(tokenize, dict) else None)
    return any(True for messages in found for _ in image_parts(messages))


def take_images(messages: Sequence[Json]) -> tuple[list[Json], tuple[ImagePart, ...]]:
    """Return checked messages with a digest in place of the URL of each image, and the images in their order."""
    images = []

    def replaced(part: Json) -> Json:
        if part.get("type") != IMAGE:
            return part
        url, detail = part[IMAGE]["url"], part[IMAGE]["detail"]
        images.append(ImagePart(url, part[PATH], detail))
        return {**part, IMAGE: {"url": hashlib.blake2b(url.encode(), digest_size=16).hexdigest(), "detail": detail}}

    return _with_parts(messages, replaced), tuple(images)


def put_images(messages: Sequence[Json], images: Sequence[ImagePart]) -> list[Json]:
    """Return the messages that `take_images` was given."""
    left = iter(images)

    def restored(part: Json) -> Json:
        return {**part, IMAGE: {**part[IMAGE], "url": next(left).url}} if part.get("type") == IMAGE else part

    return _with_parts(messages, restored)


def _with_parts(messages: Sequence[Json], change: Callable[[Json], Json]) -> list[Json]:
    return [
        {**each, "content": [change(part) for part in each["content"]]}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
