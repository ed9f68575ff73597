"""Fetches over HTTP into a `.partial`: resumed, verified, retried. Knows URLs and bytes, not models."""

import functools
import http.client
import logging
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from tqdm import tqdm

from engine.download.files import CHUNK, Corrupt, Denied, DownloadError, RemoteFile, Temporary, chunks_of, new_hash
from engine.file_lock import unfollowed

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 16 << 20  # of a list of files: a hundred thousand of them


@dataclass(frozen=True)
class Policy:
    """Concurrency, retries, timeouts and verification of a download."""

    num_workers: int = 4  # files at a time
    num_tries: int = 6  # in a row without getting any further
    backoff_s: float = 1.0  # before the second try; doubles
    max_backoff_s: float = 30.0
    max_wait_s: float = 300.0  # when a busy server says how long
    timeout_s: float = 30.0  # without a byte
    rehash: bool = False  # read again what an earlier run has verified


class Stop(threading.Event):
    """Event that is set when the download has failed or is interrupted. All threads then stop starting, reading and
    sleeping."""

    def check(self) -> None:
        if self.is_set():
            raise DownloadError("stopped")


class Progress:
    """One bar for all files, on a terminal only. A mirror tells sizes late, so the total may grow."""

    def __init__(self, label: str):
        self._bar = tqdm(desc=label, total=0, unit="B", unit_scale=True, delay=0.3, disable=None)
        self._files: dict[str, tuple[int, int]] = {}  # path -> bytes done, size
        self._lock = threading.Lock()

    @property
    def is_visible(self) -> bool:
        return not self._bar.disable

    def at(self, path: str, done: int, size: int) -> None:
        with self._lock:
            old_done, old_size = self._files.get(path, (0, 0))
            self._files[path] = (done, size)
            self._bar.total += size - old_size
            self._bar.update(done - old_done)

    def close(self) -> None:
        self._bar.close()


def with_retries(attempt: Callable[[], T], policy: Policy, stop: Stop, mark: Callable[[], int] = lambda: 0) -> T:
    """Call `attempt` until it succeeds, retrying as `policy` says. `mark` returns the progress so far: an attempt that
    got further than all before it does not count as failed.
    """
    num_failures = num_corrupt = 0
    furthest = mark()
    while True:
        stop.check()
        try:
            return attempt()
        except Temporary as error:
            num_failures = 1 if mark() > furthest else num_failures + 1
            num_corrupt += isinstance(error, Corrupt)
            furthest = 0 if isinstance(error, Corrupt) else max(furthest, mark())
            if num_failures >= policy.num_tries or num_corrupt == 2:
                tries = "" if num_failures == 1 else f" ({num_failures} tries)"
                raise type(error)(f"{error}{tries}") from None
            asked_s = min(error.wait_s, policy.max_wait_s)
            pause_s = max(asked_s, min(policy.backoff_s * 2 ** (num_failures - 1), policy.max_backoff_s))
            log.info("%s; trying again in %g s", error, pause_s)
        stop.wait(pause_s)


def get_text(url: str, policy: Policy, stop: Stop) -> str:
    def attempt() -> str:
        with _open(urllib.request.Request(url), policy.timeout_s) as response:
            try:
                payload = response.read(MAX_TEXT_BYTES + 1)
                if len(payload) > MAX_TEXT_BYTES:
                    raise DownloadError(f"is longer than {MAX_TEXT_BYTES} bytes")
                if response.length:  # of a limited read http.client does not say that it was cut short
                    raise Temporary(f"the connection was closed after {len(payload)} bytes")
                return payload.decode("utf-8-sig")  # a list made on Windows may begin with a mark
            except (OSError, http.client.HTTPException) as error:
                raise Temporary(_reason(error)) from None
            except UnicodeDecodeError:
                raise DownloadError("is not text") from None

    return with_retries(attempt, policy, stop)


@dataclass
class Transfer:
    """Downloads the files of one listing. It is shared by the download threads."""

    policy: Policy
    stop: Stop
    progress: Progress
    authorization: str | None = None

    def fetch(self, file: RemoteFile, partial: Path) -> None:
        """Download a file to `partial`. On return it is complete and verified; on failure it contains what can be
        resumed."""

        def attempt() -> None:
            try:
                with open(partial, "r+b" if partial.exists() else "w+b", opener=unfollowed) as out:
                    self._fetch_rest(file, out)
            except Corrupt:
                partial.unlink()
                raise

        def num_bytes() -> int:
            return partial.stat().st_size if partial.exists() else 0

        with_retries(attempt, self.policy, self.stop, num_bytes)

    def _fetch_rest(self, file: RemoteFile, out: BinaryIO) -> None:
        kind, _, expected = file.digest.partition(":")
        running, have = new_hash(file.digest, file.size), 0
        for chunk in chunks_of(out):
            running.update(chunk)
            have += len(chunk)
        if have and running.hexdigest() == expected:  # the run before ended just before the rename
            return
        with _open(self._request(file, have), self.policy.timeout_s) as response:
            if have and response.status != 206:  # a server without ranges sends everything
                running, have = new_hash(file.digest, file.size), 0
            elif have and _range(response)[0] != have:
                raise Corrupt("the server sent another range than it was asked for")
            out.seek(have)
            out.truncate()
            length = response.headers.get("Content-Length", "")
            end = have + int(length) if length.isdecimal() else None  # of this answer; a server may send less
            size = file.size or _range(response)[1] or end
            for chunk in self._body(response, end, have):
                out.write(chunk)
                running.update(chunk)
                have += len(chunk)
                if file.size is not None and have > file.size:
                    raise Corrupt(f"the server sends more than its {file.size} bytes")
                self.progress.at(file.path, have, size or have)
        out.flush()
        os.fsync(out.fileno())  # the final name must not outlive the content when the power fails
        if have < (size or 0):
            raise Temporary(f"the connection was closed after {have} of {size} bytes")
        if running.hexdigest() != expected:
            raise Corrupt(f"{kind} is {running.hexdigest()}, expected {expected}")

    def _request(self, file: RemoteFile, have: int) -> urllib.request.Request:
        request = urllib.request.Request(file.url)
        if self.authorization:
            request.add_unredirected_header("Authorization", self.authorization)
        if have:
            request.add_header("Range", f"bytes={have}-")
        return request

    def _body(self, response: http.client.HTTPResponse, size: int | None, have: int) -> Iterator[bytes]:
        """Yield the body in pieces as they arrive, so that a broken connection loses no received data."""
        while size is None or have < size:
            try:
                chunk = response.read1(CHUNK if size is None else min(CHUNK, size - have))
            except (OSError, http.client.HTTPException) as error:
                raise Temporary(f"{_reason(error)} after {have} bytes") from None
            self.stop.check()  # after a stop not a byte more: the directory may be another process's by now
            if not chunk:
                return
            have += len(chunk)
            yield chunk


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The token goes along on its own server, where the hub redirects small files, and to no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, *others: Any
    ) -> urllib.request.Request | None:
        code = 307 if code == 308 else code  # Python 3.10 does not know 308
        new = super().redirect_request(req, fp, code, *others)
        authorization = req.unredirected_hdrs.get("Authorization")
        if authorization and new is not None and (new.type, new.host) == (req.type, req.host):
            new.add_unredirected_header("Authorization", authorization)
        return new

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


def _open(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    request.add_header("User-Agent", "download_model")
    try:
        return _opener().open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        message = one_line(f"HTTP {error.code} {error.headers.get('X-Error-Message') or error.reason}")
        if error.code == 416:
            raise Corrupt(f"{message}: the partial file is not the beginning of it") from None
        raise http_error(error.code, message, dict(error.headers)) from None
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        is_final = isinstance(cause, ssl.SSLCertVerificationError)
        raise (DownloadError if is_final else Temporary)(_reason(cause)) from None
    except ValueError as error:  # a host name that is none
        raise DownloadError(_reason(error)) from None


def http_error(status: int, message: str, headers: Mapping[str, str]) -> DownloadError:
    if status in (401, 403):
        return Denied(message)
    if status not in (408, 425, 429) and status < 500:
        return DownloadError(message)
    error = Temporary(message)
    retry_after = headers.get("Retry-After", "")
    error.wait_s = float(retry_after) if re.fullmatch("[0-9]{1,9}", retry_after) else 0.0
    return error


def _reason(error: Exception | str) -> str:
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """Return the text of a server for a terminal: one line without escape sequences."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def _range(response: http.client.HTTPResponse) -> tuple[int | None, int | None]:
    """Return the start of the bytes of a 206 response, and the size of the file; None if unknown."""
    match = re.match(r"bytes (\d+)-\d+/(?:(\d+)|\*)", response.headers.get("Content-Range", ""))
    return (int(match[1]), int(match[2]) if match[2] else None) if match else (None, None)
