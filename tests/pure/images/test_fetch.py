"""Images are downloaded from addresses of the public internet only, within limits of time, bytes and redirects."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest

from engine.images import fetch
from engine.images.fetch import ImageDownloader, is_public
from engine.images.processor import ImageError
from tests.patience import PATIENCE_S, in_background

FILE = bytes(range(256)) * 40
PRIVATE = (
    *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::3", "ff02::1", "2001:db8::1"),
    # Addresses of IPv6 that stand for one of IPv4
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::808:808", "2001:0:7f00:1::1", "2001:0:808:808::80ff:fffe"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        self.server.hosts.append(self.headers["Host"])
        if self.path.startswith("/to/"):
            return self.answer(302, Location=self.path[4:])
        if self.path.startswith("/slow"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: " if self.path == "/slow-head" else b"HTTP/1.1 200 OK\r\n\r\n")
            while not self.server.over.wait(0.05):
                self.wfile.write(b"x")
            return None
        if self.path == "/part":
            return self.answer(200, FILE, **{"Content-Length": str(len(FILE) + 1)})
        if self.path == "/gone":
            return self.answer(404)
        return self.answer(200, FILE)

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle(self):
        try:
            super().handle()
        except OSError:  # the client has left
            pass

    def log_message(self, *_):
        pass


@contextmanager
def a_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.paths, server.hosts, server.over = [], [], threading.Event()
    server.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def shared_server():
    with a_server() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.paths.clear()
    shared_server.hosts.clear()
    return shared_server


def a_downloader(addresses=None, allows=lambda address: True, **options):
    """Return a downloader. `addresses` are those of hosts; all other names are resolved to this host."""
    options = {"domains": ["*"], "max_bytes": 1 << 20, "timeout_s": 5.0} | options
    return ImageDownloader(
        **options, resolve=lambda host, port: (addresses or {}).get(host, ["127.0.0.1"]), allows=allows
    )


def refusal(downloader, url):
    with pytest.raises(ImageError) as caught:
        downloader.fetch(url)
    return str(caught.value)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


def test_a_file_is_downloaded_from_the_address_that_was_checked(server):
    downloader = a_downloader({"cat.example": ["127.0.0.1"]})
    assert downloader.fetch(f"http://cat.example:{server.port}/a/b.png?c=d#e") == FILE
    assert (server.paths, server.hosts) == (["/a/b.png?c=d"], [f"cat.example:{server.port}"])


def test_a_name_with_a_private_address_is_not_connected_to(server):
    downloader = a_downloader({"cat.example": ["127.0.0.1", "::1"]}, allows=is_public)
    assert refusal(downloader, f"http://cat.example:{server.port}/") == (
        "is at an address that is not public, from which no images are downloaded"
    )
    assert server.paths == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_no_spelling_of_this_machine_is_connected_to(server, host):
    downloader = ImageDownloader(["*"], 1 << 20)
    message = refusal(downloader, f"http://{host}:{server.port}/")
    assert "is at an address" in message or "could not be downloaded" in message
    assert server.paths == []


def test_only_the_checked_address_of_several_is_connected_to(server):
    """Another answer of the resolver later, as in DNS rebinding, does not matter: names are resolved once."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    asked = []

    def resolve(host, port):
        asked.append(host)
        return answers.pop(0)

    downloader = ImageDownloader(["*"], 1 << 20, resolve=resolve, allows=lambda each: each == "127.0.0.1")
    assert downloader.fetch(f"http://cat.example:{server.port}/") == FILE
    assert asked == ["cat.example"]


def test_the_address_after_a_redirect_is_checked_as_well(server):
    hosts = {"cat.example": ["127.0.0.1"], "metadata.example": ["169.254.169.254"]}
    downloader = a_downloader(hosts, allows=lambda each: each == "127.0.0.1")
    url = f"http://cat.example:{server.port}/to/http://metadata.example/secret"
    assert refusal(downloader, url) == "is at an address that is not public, from which no images are downloaded"
    assert downloader.fetch(f"http://cat.example:{server.port}/to//x") == FILE


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://cat.example/", "gopher://x/", "http://a:b@c/"])
def test_redirects_lead_to_http_only(server, target):
    message = refusal(a_downloader(), f"http://cat.example:{server.port}/to/{target}")
    assert message == "leads to a URL that is not one of http or https with a host"


def test_redirects_are_limited(server):
    downloader, root = a_downloader(), f"http://cat.example:{server.port}"
    assert downloader.fetch(f"{root}/to/" * 3 + f"{root}/x") == FILE
    assert refusal(downloader, f"{root}/to/" * 4 + f"{root}/x") == "is redirected more than 3 times"


def test_only_hosts_that_are_allowed_are_asked(server):
    downloader = a_downloader(domains=["cat.example"])
    root = f"http://cat.example:{server.port}"
    assert downloader.fetch(f"{root}/") == FILE
    for url in (f"http://dog.example:{server.port}/", f"{root}/to/http://dog.example:{server.port}/"):
        assert "ALLOWED_MEDIA_DOMAINS" in refusal(downloader, url)


def test_large_files_are_not_read_to_the_end(server):
    assert a_downloader(max_bytes=len(FILE)).fetch(f"http://cat.example:{server.port}/") == FILE
    assert refusal(a_downloader(max_bytes=len(FILE) - 1), f"http://cat.example:{server.port}/") == (
        f"has more than {len(FILE) - 1} bytes"
    )


@pytest.mark.parametrize("path", ["/slow-head", "/slow"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_hold_a_request(server, path):
    """It would send bytes until the end of the test."""
    asked = in_background(refusal, a_downloader(timeout_s=0.4), f"http://cat.example:{server.port}{path}")
    assert asked.result(PATIENCE_S) == "could not be downloaded in time"


def test_errors_say_little_of_other_machines(server):
    downloader, failed = a_downloader(), "could not be downloaded: "
    assert refusal(downloader, f"http://cat.example:{server.port}/gone") == failed + "the status is 404"
    assert refusal(downloader, f"http://cat.example:{server.port}/part") == failed + "a part of it is missing"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert refusal(downloader, f"http://cat.example:{closed.getsockname()[1]}/") == (
            failed + "its host refused the connection"
        )
    assert refusal(downloader, "http://cat.example:99999/") == failed + "its URL is not valid"
    assert refusal(downloader, f"https://cat.example:{server.port}/") == (
        failed + "its host has no valid certificate, or does not speak TLS"
    )
    unknown = ImageDownloader(["*"], 1 << 20, resolve=Mock(side_effect=socket.gaierror))
    assert refusal(unknown, "http://no.example/") == failed + "the name of its host cannot be resolved"


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert a_downloader().fetch(f"http://cat.example:{server.port}/") == FILE


def test_names_are_resolved_to_all_their_addresses():
    assert "127.0.0.1" in fetch.resolve("localhost", 80)
