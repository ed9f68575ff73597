"""Download of images by http(s), for clients that may not reach what this server can reach.

Every connection, also after a redirect, is made to an address that was checked: one of the public internet. Time, bytes
and redirects are limited. Environment variables for proxies are not read, as a proxy would choose the address.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from engine.images.processor import ImageError

TIMEOUT_S = 10.0  # of a download with its redirects
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
PIECE = 1 << 16
PORTS = {"http": 80, "https": 443}
LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the rest of such an address is one of IPv4
REASONS: dict[type[Exception], str] = {  # by the first class that an error has
    TimeoutError: " in time",
    socket.gaierror: ": the name of its host cannot be resolved",
    ConnectionRefusedError: ": its host refused the connection",
    ssl.SSLError: ": its host has no valid certificate, or does not speak TLS",
    http.client.IncompleteRead: ": a part of it is missing",
    http.client.HTTPException: ": its host does not speak HTTP",
    OSError: ": the connection failed",
    ValueError: ": its URL is not valid",
}
Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(text: str) -> bool:
    """Return whether an address is one of the public internet: not of this machine, of a private network, link-local,
    multicast or reserved, nor one of IPv6 that stands for such an address of IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped or address in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        embedded = [address.sixtofour, *(address.teredo or ())]
        if address in LOCAL_NAT64 or any(each and not is_public(str(each)) for each in embedded):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class ImageDownloader:
    """Downloads images of at most `max_bytes` from the hosts in `domains`, where `*` stands for all of them. `allows`
    says to which addresses a connection may be made."""

    def __init__(
        self,
        domains: Collection[str],
        max_bytes: int,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolve,
        allows: Callable[[str], bool] = is_public,
    ):
        self._domains, self._max_bytes, self._timeout_s = domains, max_bytes, timeout_s
        self._resolve, self._allows = resolve, allows
        self._tls = ssl.create_default_context()

    def fetch(self, url: str) -> bytes:
        """Return the file at `url`. Raises ImageError, which does not say more of other machines than that."""
        deadline = time.monotonic() + self._timeout_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                with self._connect(url, deadline) as connection, _ended_at(deadline, connection):
                    with self._get(url, connection) as response:
                        if response.status not in REDIRECTS:
                            return self._read(response)
                        url = urljoin(url, response.getheader("Location") or "")
        except ImageError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = next(reason for kind, reason in REASONS.items() if isinstance(error, kind))
            raise ImageError(f"could not be downloaded{reason}") from None
        raise ImageError(f"is redirected more than {MAX_REDIRECTS} times")

    def _connect(self, url: str, deadline: float) -> socket.socket:
        """Return a connection to the host of `url`, whose address was checked."""
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname or parts.username is not None:
            raise ImageError("leads to a URL that is not one of http or https with a host")
        host, port = parts.hostname, parts.port or PORTS[parts.scheme]
        if "*" not in self._domains and host not in self._domains:
            raise ImageError("is on a host from which no images are downloaded (ALLOWED_MEDIA_DOMAINS)")
        addresses = [each for each in self._resolve(host, port) if self._allows(each)]
        if not addresses:
            raise ImageError("is at an address that is not public, from which no images are downloaded")
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return self._secured(socket.create_connection((address, port), _left(deadline) / 2), parts)
        return self._secured(socket.create_connection((addresses[-1], port), _left(deadline)), parts)

    def _secured(self, connection: socket.socket, parts: SplitResult) -> socket.socket:
        if parts.scheme == "http":
            return connection
        try:
            return self._tls.wrap_socket(connection, server_hostname=parts.hostname)
        except BaseException:
            connection.close()
            raise

    def _get(self, url: str, connection: socket.socket) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        http_connection = http.client.HTTPConnection(parts.netloc)
        http_connection.sock = connection
        http_connection.request("GET", path, headers={"Accept": "image/*", "Connection": "close"})
        return http_connection.getresponse()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.status != 200:
            raise ImageError(f"could not be downloaded: the status is {response.status}")
        data = bytearray()
        while piece := response.read1(PIECE):
            data += piece
            if len(data) > self._max_bytes:
                raise ImageError(f"has more than {self._max_bytes} bytes")
        if response.length:
            raise http.client.IncompleteRead(b"")
        return bytes(data)


@contextlib.contextmanager
def _ended_at(deadline: float, connection: socket.socket) -> Iterator[None]:
    """End the connection at the deadline: a server that sends a byte now and then never exceeds a limit of one read.
    Raises TimeoutError then."""

    def end() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline), end)
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        _left(deadline)
        raise
    finally:
        timer.cancel()
    _left(deadline)


def _left(deadline: float) -> float:
    """Return the time that is left. Raises TimeoutError if there is none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
