"""Ask the running server all requests of a file in OpenAI's batch format, and write its answers to another file.

A line of the input is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, with any path
of the server's. A line of the output has the custom_id and the response, in the order of their ends. Requests that have
a line there already are not asked again: run the same command again to continue where it was interrupted.

Exit status 0 when every request has its line, be it an error; 1 when the server is gone or an answer cannot be written;
2 when a setting or a line of the input is wrong, before anything is answered; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import re
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
from tqdm import tqdm
from yarl import URL

from engine import wire
from engine.address import connect_host, in_url
from engine.errors import ConfigError
from engine.settings.config import Config
from server_scripts.completion import add_completion
from server_scripts.connection_errors import reason_of
from server_scripts.tls_client import client_context

AT_ONCE = 128  # open requests; more than the server runs at once, so that the next ones wait there
GONE_AFTER_S = 600.0  # give up after this time without any answer
PAUSE_S = 1.0  # before a retry, unless the server sends Retry-After
RETRY_ALWAYS = (429, 503)  # retried until the server has room or is gone
RETRY_SOME = (500, 502, 504)  # retried up to NUM_TRIES times
NUM_TRIES = 3
LINE_START = b'{"id": "batch_req_'  # beginning of each line of the output
A_PATH = re.compile(r"/(?!/)[^\\\x00-\x1f\x7f\ud800-\udfff]*")  # excludes //host/path, which URL parsers read as a host
Json = dict[str, Any]


class BatchError(Exception):
    """The input file is wrong, or the server is gone. `status` is the exit status."""

    def __init__(self, text: str, status: int = 1):
        super().__init__(text)
        self.status = status


@dataclass
class BatchProgress:
    """Output file and progress bar of a batch."""

    bar: tqdm
    output: BinaryIO
    num_errors: int = 0
    num_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    last_answer: float = field(default_factory=time.monotonic)

    def write(self, request: Json, status: int, body: Any) -> None:
        """Write one line with a single write, so that an interruption leaves whole lines or the beginning of one."""
        self.last_answer = time.monotonic()
        answer = body if isinstance(body, dict) else {}
        response = {"status_code": status, "request_id": answer.get("id"), "body": body}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"], "response": response}
        # A lone surrogate becomes its JSON escape again, which readers decode to the same text.
        payload = json.dumps({**line, "error": None}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            num_written = self.output.write(payload)
        except OSError as error:
            raise BatchError(f"an answer cannot be written: {error}; run the same command again to continue") from None
        if num_written < len(payload):
            raise BatchError(
                "an answer cannot be written whole: the disk is full; run the same command again to continue"
            )
        usage = answer.get("usage") or {}
        self.num_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        self.num_errors += status >= 400
        rate = self.num_tokens / (time.monotonic() - self.started)
        self.bar.set_postfix_str(f"{rate:.1f} tok/s, {self.num_errors} errors", refresh=False)
        self.bar.update()


def main() -> int:
    """Run the command and return its exit status."""
    given = _arguments()
    try:
        config = Config.from_env()
        asyncio.run(run(given, config))
        return 0
    except (BatchError, ConfigError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print(f"run_batch: {message}", file=sys.stderr)
        return getattr(error, "status", 2)
    except KeyboardInterrupt:
        print("\nrun_batch: interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def _arguments() -> argparse.Namespace:
    about: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="run_batch", description=__doc__, formatter_class=about)
    for name in ("input", "output"):  # with -i and -o they are named as for vLLM's and FastDeploy's run-batch
        parser.add_argument(name, type=Path, nargs="?")
        parser.add_argument(f"-{name[0]}", f"--{name}-file", type=Path, metavar="FILE", help=f"the same as {name}")
    parser.add_argument(
        "--url", help="the server, http://host:port; default: the one that start_server would start here"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="how many requests are open (%(default)s)")
    add_completion(parser)
    given = parser.parse_args()
    given.input, given.output = given.input_file or given.input, given.output_file or given.output
    if missing := [name for name in ("input", "output") if getattr(given, name) is None]:
        parser.error(f"the {' and the '.join(missing)} file must be named: run_batch INPUT OUTPUT")
    return given


async def run(given: argparse.Namespace, config: Config) -> None:
    """Send all requests of the input that have no answer yet. Raise BatchError."""
    if given.at_once < 1:
        raise BatchError(f"--at-once must be at least 1, it is {given.at_once}", 2)
    for path in (given.input, given.output):
        if path.exists() and not path.is_file():
            raise BatchError(f"{path} must be a regular file, because it is read more than once", 2)
    if given.output.exists() and given.output.samefile(given.input):
        raise BatchError(f"{given.output} is the input, the answers need a file of their own", 2)
    known = _check(given.input)
    server = _server(given.url or _own_url(config))
    with given.output.open("ab", buffering=0) as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"{given.output} is being written by another run_batch", 2) from None
        done, size = _done(given.output)
        output.truncate(size)
        key = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        with tqdm(total=len(known), initial=len(known & done), desc="requests", unit="") as bar:
            async with _session(given.url, config, key) as session:
                await _ask_all(given, server, session, done, BatchProgress(bar, output))


def _own_url(config: Config) -> str:
    if not config.http_ports:
        raise BatchError("the server has no HTTP port (SERVICE_HTTP_PORT=-1); --url names another server", 2)
    scheme = "https" if config.tls_cert_file else "http"
    return f"{scheme}://{in_url(connect_host(config.service_host))}:{config.http_ports[0]}"


def _server(url: str) -> URL:
    try:
        server = URL(url)
        if server.scheme in ("http", "https") and server == server.origin():
            return server
    except ValueError:
        pass
    raise BatchError(f"--url must be http://host:port or https://host:port, without a path; it is {url!r}", 2)


def _session(url: str | None, config: Config, headers: Json) -> aiohttp.ClientSession:
    tls = client_context(config) if config.tls_cert_file and not url else True
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)


async def _ask_all(
    given: argparse.Namespace, server: URL, session: aiohttp.ClientSession, done: set[str], progress: BatchProgress
) -> None:
    try:
        async with session.get(server / "health"):
            pass
    except aiohttp.ClientError as error:
        more = "" if given.url else "; start_server starts one, --url names another"
        raise BatchError(f"no server can be asked at {server}: {reason_of(error)}{more}") from None
    to_ask = (request for _, request in _requests(given.input) if request["custom_id"] not in done)

    async def ask_some() -> None:
        for request in to_ask:
            await _ask(session, server, request, progress)

    tasks = [asyncio.create_task(ask_some()) for _ in range(min(given.at_once, progress.bar.total))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(session: aiohttp.ClientSession, server: URL, request: Json, progress: BatchProgress) -> None:
    # Not joined: the url could name another host, which would then receive the API key.
    target = URL(f"{server.origin()}{request['url']}")
    if target.origin() != server:  # the file has changed after the check
        raise BatchError(f"the url {request['url']!r} is not a path of the server", 2)
    num_tries = 0
    while True:
        num_tries += 1
        pause, why = PAUSE_S, ""
        try:
            async with session.post(target, json=request["body"]) as response:
                body = _json(await response.read())
                if response.status == 401:
                    has_key = "Authorization" in session.headers
                    said = "rejects the API key in API_KEY" if has_key else "requires an API key: set API_KEY"
                    raise BatchError(f"the server {said}", 2)
                may_retry = response.status in RETRY_SOME and num_tries < NUM_TRIES
                if response.status not in RETRY_ALWAYS and not may_retry:
                    progress.write(request, response.status, body)
                    return
                why = f"the server answers {response.status}"
                pause = float(response.headers.get("Retry-After", PAUSE_S))
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            why = reason_of(error)
        if time.monotonic() - progress.last_answer > GONE_AFTER_S:
            raise BatchError(f"no answer for {GONE_AFTER_S:g} s: {why}; run the same command again to continue")
        await asyncio.sleep(pause)


def _json(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:  # from a proxy, for example
        return payload.decode("utf-8", "replace")


# --- the files ------------------------------------------------------------------------------------------------------


def _requests(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield the requests with their line numbers. Raise BatchError for a line that is no JSON."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    request = json.loads(line)
                except RecursionError:
                    raise BatchError(f"{path}, line {number} is nested too deeply", 2) from None
                except ValueError as error:
                    raise BatchError(f"{path}, line {number} is no JSON: {error}", 2) from None
                yield number, request


def _check(path: Path) -> set[str]:
    """Return the custom_ids of all requests. Raise BatchError for the first invalid request."""
    known: dict[str, int] = {}
    for number, request in _requests(path):
        if problem := _problem(request):
            raise BatchError(f"{path}, line {number}: {problem}", 2)
        if (custom_id := request["custom_id"]) in known:
            raise BatchError(f"{path}, line {number}: custom_id {custom_id!r} is that of line {known[custom_id]}", 2)
        known[custom_id] = number
    return set(known)


def _problem(request: Any) -> str:
    if not isinstance(request, dict):
        return f"must be a JSON object, it is {wire.kind_of(request)}"
    if not isinstance(request.get("custom_id"), str):
        return f"custom_id must be a text, it is {wire.shown(request.get('custom_id'))}"
    if request.get("method", "POST") != "POST":
        return f"method must be POST, it is {request['method']!r}"
    if not isinstance(request.get("url"), str) or not A_PATH.fullmatch(request["url"]):
        return f"url must be a path of the server's such as /v1/chat/completions, it is {request.get('url')!r}"
    if not isinstance(request.get("body"), dict):
        return f"body must be an object, it is {wire.kind_of(request.get('body'))}"
    return "body.stream must be false: a line holds an answer in one piece" if request["body"].get("stream") else ""


def _done(path: Path) -> tuple[set[str], int]:
    """Return the custom_ids that have an answer, and the size of the output up to its last whole line.

    An interruption may leave part of a line.
    """
    done, size = set(), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            is_whole = line.endswith(b"\n")
            if not is_whole and LINE_START.startswith(line[: len(LINE_START)]):
                break
            try:
                answer = json.loads(line if is_whole else b"")
                done.add(answer["response"] and answer["custom_id"])
            except (ValueError, KeyError, TypeError, RecursionError):  # perhaps it is the input file
                raise BatchError(f"{path}, line {number} is no answer of run_batch's", 2) from None
            size += len(line)
    return done, size
