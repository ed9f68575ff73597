"""Images of requests: which are encoded next, and the embeddings of those that were. Independent of tensors and of what
encodes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.core.spans import PromptSpan
from engine.core.types import Request, State

MAX_CACHED_BYTES = 512 << 20  # of embeddings, as many as of some 100,000 tokens
MAX_WAITING = 256  # requests; others wait behind them


class EncodedPart(NamedTuple):
    """The result of a part of an encoding."""

    embeddings: bytes | None  # those of PromptSpan; None: there are more parts
    ended_at: float  # time.monotonic
    duration_s: float


@dataclass
class ImageCounters:
    """Counters since the start."""

    num_image_queries: int = 0  # images of requests that were looked up among the kept embeddings
    num_image_hits: int = 0  # of these, found
    num_images_encoded: int = 0
    image_time_s: float = 0.0  # in the vision tower


class VisionEncoder(Protocol):
    """The vision tower on a device. It encodes one image at a time, in parts, each of which delays a step of the
    decoder less than a chunk of a prompt would."""

    def check(self, span: PromptSpan) -> None:
        """Raise InvalidRequest for a span whose pixels are no image of its grid."""
        ...

    def begin(self, span: PromptSpan) -> None:
        """Begin to encode the image of a span, instead of the one before."""
        ...

    def advance(self) -> Future[EncodedPart]:
        """Launch the next part, behind the steps that were launched."""
        ...


class ImageQueue:
    """Requests that wait for the embeddings of their images, in the order in which they could have started.

    The embeddings are kept by content, at most `max_bytes` of the most recently used ones, so that an image of several
    requests is encoded once.
    """

    def __init__(self, encoder: VisionEncoder, max_bytes: int = MAX_CACHED_BYTES):
        self.ended_at = 0.0  # when the last part ended, time.monotonic
        self.counters = ImageCounters()
        self._encoder = encoder
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._embeddings: dict[bytes, bytes] = {}  # by content hash, least recently used first
        self._waiting: deque[Request] = deque()
        self._span: PromptSpan | None = None  # is being encoded
        self._part: Future[EncodedPart] | None = None  # the launched one

    @property
    def is_busy(self) -> bool:
        """Return whether some request waits for embeddings, or a part runs."""
        return bool(self._waiting) or self._part is not None

    def check(self, spans: Sequence[PromptSpan]) -> None:
        """Raise InvalidRequest if the image of a span could not be encoded."""
        for span in spans:
            if _is_missing(span):
                self._encoder.check(span)

    @property
    def is_full(self) -> bool:
        """Return whether so many requests wait that no others should be looked for."""
        return len(self._waiting) >= MAX_WAITING

    def fill_or_enqueue(self, request: Request, num_cached: int) -> bool:
        """Give a request the embeddings of its images that end after `num_cached` tokens. Return whether it has them
        all; otherwise it waits for them."""
        num_wanted = _num_missing(request, num_cached)
        first_missing = self._fill(request, num_cached)
        self.counters.num_image_queries += num_wanted
        self.counters.num_image_hits += num_wanted - _num_missing(request, num_cached)
        if first_missing is None:
            return True
        request.images_from = num_cached
        self._waiting.append(request)
        return False

    def advance(self) -> None:
        """Take the result of the running part, if it has ended, and launch the next one."""
        if self._part:
            if not self._part.done():
                return
            embeddings, self.ended_at, duration_s = self._part.result()
            self._part = None
            self.counters.image_time_s += duration_s
            self.counters.num_images_encoded += embeddings is not None
            if embeddings is not None and self._span:
                self._keep(self._span.content_hash, embeddings)
                self._span = None
        wanted = self._next_image()
        if wanted is None:
            self._span = None
            return
        if not self._span or self._span.content_hash != wanted.content_hash:
            self._span = wanted
            self._encoder.begin(wanted)
        self._part = self._encoder.advance()

    def wait(self, timeout_s: float) -> None:
        """Wait for the running part, but not longer than `timeout_s`."""
        if self._part:
            wait([self._part], timeout_s)

    def _next_image(self) -> PromptSpan | None:
        """Let the requests go on whose embeddings are there now. Return the first image that is missing."""
        first, waiting = None, list(self._waiting)
        self._waiting.clear()
        for request in waiting:
            if request.state is State.ENDED and not request.forks:  # else it computes the prompt for its forks
                continue
            missing = self._fill(request, request.images_from)
            if missing is None:
                request.images_from = -1
            else:
                first = first or missing
                self._waiting.append(request)
        return first

    def _fill(self, request: Request, num_cached: int) -> PromptSpan | None:
        """Give the spans of a request their embeddings. Return the first one that ends after `num_cached` tokens and
        whose embeddings are missing."""
        if not any(map(_is_missing, request.spans)):
            return None
        request.spans = [
            replace(span, embeddings=self._find(span.content_hash)) if _is_missing(span) else span
            for span in request.spans
        ]
        return next((span for span in request.spans if _is_missing(span) and span.end > num_cached), None)

    def _find(self, content_hash: bytes) -> bytes:
        found = self._embeddings.pop(content_hash, b"")
        if found:
            self._embeddings[content_hash] = found
        return found

    def _keep(self, content_hash: bytes, embeddings: bytes) -> None:
        self._embeddings[content_hash] = embeddings
        self._num_bytes += len(embeddings)
        while self._num_bytes > self._max_bytes and len(self._embeddings) > 1:
            self._num_bytes -= len(self._embeddings.pop(next(iter(self._embeddings))))


def _is_missing(span: PromptSpan) -> bool:
    return bool(span.pixels) and not span.embeddings


def _num_missing(request: Request, num_cached: int) -> int:
    return sum(_is_missing(span) and span.end > num_cached for span in request.spans)


def without_computable(spans: Sequence[PromptSpan]) -> Sequence[PromptSpan]:
    """Return the spans of a request that starts without the embeddings that can be computed again, which its executor
    has from then on."""
    return [replace(span, embeddings=b"") if span.pixels else span for span in spans] if spans else spans
