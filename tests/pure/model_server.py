"""A local server that speaks both protocols of `download_model`: the hub's and a static-model mirror's.

It remembers every request, and misbehaves on request. The hub's half is what huggingface_hub itself
asks for (one test proves that): model info, tree, resolve with HEAD, weights redirected to a CDN.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_let_me_in"


@dataclass
class Fault:
    """A fault that one request of a path meets, once."""

    status: int = 200
    body: bytes | None = None  # instead of the right one
    cut_after: int | None = None  # bytes of the body, then the connection is gone
    resets: bool = False  # ... with a reset, which may take some of these bytes with it
    knows_ranges: bool = True
    max_range: int | None = None  # bytes of an answer to a range
    tells_length: bool = True  # if not, the end of the connection is the end of the body
    is_silent: bool = False  # no answer until the server ends
    headers: dict[str, str] = field(default_factory=dict)  # of an answer that is not 200


class ModelServer:
    def __init__(self):
        self.contents: dict[str, bytes] = {}  # URL path -> body
        self.redirects: dict[str, str] = {}
        self.moved: dict[str, tuple[int, str]] = {}  # URL path -> status, where to
        self.closed: set[str] = set()  # URL paths that want the token
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.faults: dict[str, list[Fault]] = defaultdict(list)  # URL path -> what to do wrong, in order
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.edit = lambda row: row  # of what the hub says of a file
        self.has_fallen_silent = threading.Event()
        self.ends = threading.Event()
        self.tokens: dict[str, str | None] = {}  # path -> authorization of its last request

    def __enter__(self) -> "ModelServer":
        handler = type("Handler", (_Handler,), {"site": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ends.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add_repo(self, repo_id: str, files: dict[str, bytes]) -> None:
        self.repos[repo_id] = files
        for path, body in files.items():
            url = self.hub_path(repo_id, path)
            if is_large(path):
                self.redirects[url] = f"/cdn/{hashlib.sha256(body).hexdigest()}"
                url = self.redirects[url]
            self.contents[url] = body

    def add_folder(self, folder: str, files: dict[str, bytes]) -> None:
        """Add a folder of a mirror with its list of files."""
        lines = [f"{path}:{hashlib.md5(body).hexdigest()}" for path, body in files.items()]
        self.contents[f"/{folder}/file_list.txt"] = "\n".join([*lines, ""]).encode()
        self.contents |= {f"/{folder}/{path}": body for path, body in files.items()}

    def hub_path(self, repo_id: str, path: str) -> str:
        return f"/{repo_id}/resolve/{COMMIT}/{path}"

    def ranges_of(self, path: str) -> list[str | None]:
        """Return the Range headers of the GET requests of a path, in order."""
        return [sent for method, asked, sent in self.requests if (method, asked) == ("GET", path)]


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


def git_name(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def metadata(path: str, body: bytes, name_key: str, id_key: str) -> dict:
    row = {name_key: path, "size": len(body), id_key: git_name(body)}
    if is_large(path):
        row["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
        row["lfs"]["oid"] = row["lfs"]["sha256"]
    return row


class _Handler(BaseHTTPRequestHandler):
    site: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers["Authorization"]
        self.site.requests.append((self.command, path, self.headers["Range"]))
        self.site.tokens[path] = token
        faults = self.site.faults[path]
        fault = faults.pop(0) if faults else Fault()
        if fault.is_silent:
            self.site.has_fallen_silent.set()
            self.site.ends.wait()
        if fault.status != 200:
            self._send(fault.status, b"out of order", **fault.headers)
        elif path in self.site.moved:
            status, where = self.site.moved[path]
            self._send(status, b"", Location=where)
        elif path in self.site.closed and token != f"Bearer {TOKEN}":
            self._send(401, b"", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is\t\x1brestricted"})
        elif match := re.fullmatch("/api/models/([^/]+/[^/]+)(/(tree|revision)/[^/]+)?", path):
            self._send_list(match[1], token, fault)
        elif path in self.site.redirects:
            body = self.site.contents[self.site.redirects[path]]
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Linked-Size": len(body)}
            self._send(302, b"", Location=self.site.redirects[path], **linked, **{"X-Repo-Commit": COMMIT})
        elif path in self.site.contents:
            self._send_file(self.site.contents[path], fault)
        else:
            self._send(404, b"no such file", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _send_list(self, repo_id: str, token: str | None, fault: Fault) -> None:
        files = self.site.repos.get(repo_id)
        if files is None or (repo_id in self.site.private and token != f"Bearer {TOKEN}"):
            self._send(401, b"{}", **{"X-Error-Code": "RepoNotFound"})
            return
        if "/tree/" in self.path:
            rows = [{"type": "file", **metadata(path, body, "path", "oid")} for path, body in files.items()]
            self._send(200, json.dumps(rows).encode())
            return
        siblings = [metadata(path, body, "rfilename", "blobId") for path, body in files.items()]
        siblings = [self.site.edit(row) for row in siblings]
        info = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "tags": [], "siblings": siblings}
        self._send(200, fault.body or json.dumps(info).encode())

    def _send_file(self, body: bytes, fault: Fault) -> None:
        body = body if fault.body is None else fault.body
        headers = {"ETag": f'"{git_name(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if start is None or not fault.knows_ranges:
            self._send(200, body, fault, **headers)
        elif int(start[1]) >= len(body):
            self._send(416, b"", **{"Content-Range": f"bytes */{len(body)}"})
        else:
            first = int(start[1])
            part = body[first:][: fault.max_range]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(body)}"
            self._send(206, part, fault, **headers)

    def _send(self, status: int, body: bytes, fault: Fault | None = None, **headers) -> None:
        fault = fault or Fault()
        self.send_response(status)
        if fault.tells_length:
            headers["Content-Length"] = len(body)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: fault.cut_after])
        if fault.resets:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection |= fault.cut_after is not None or not fault.tells_length
