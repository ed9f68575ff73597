"""A scripted Backend, and the gateway around it on a real socket in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import openai

from engine.errors import EngineUnavailable, TimedOut, UnknownAnswer
from engine.settings.config import Config
from engine.wire import (
    DETOKENIZE,
    DETOKENIZE_FIELDS,
    MIN_LOGPROB,
    TOKENIZE,
    TOKENIZE_FIELDS,
    Aborted,
    Delta,
    DetokenizeResponse,
    Final,
    LoraList,
    ModelState,
    Owner,
    PromptDetails,
    StoredResponse,
    TokenizeResponse,
    TokenLogprob,
    Usage,
    check_fields,
    with_owner,
)
from gateway.__main__ import listen, serve
from gateway.app import REQUEST_TIMEOUT_S, make_app

PATIENCE_S = 60  # only a test that fails waits that long
WAIT = object()  # in a script: nothing more comes until the test says `go`


def a_logprob(text: str) -> TokenLogprob:
    token = TokenLogprob(7, text, tuple(text.encode()), -0.5)
    return token._replace(top=(token, TokenLogprob(7, "x", (120,), MIN_LOGPROB)))


# A special token, and a character in two
PROMPT_LOGPROBS = (
    TokenLogprob(1, "<s>", (60, 115, 62)),
    TokenLogprob(2, "Hi ", (72, 105, 32), -1.5, (TokenLogprob(4, "Ho", (72, 111), -0.25), TokenLogprob(5, "", (), -1))),
    TokenLogprob(3, "é", (0xC3, 0xA9), -0.5, (TokenLogprob(3, "é", (0xC3, 0xA9), -0.5), TokenLogprob(5, "", (), -2))),
)


def asks_for_prompt_details(body: dict[str, Any]) -> bool:
    return body.get("prompt_logprobs", -1) >= 0 or bool(body.get("return_token_ids"))


class FakeBackend:
    """Answers every request with the script: a text is a delta of one token in each of its `n` answers, an exception
    is raised, WAIT waits."""

    def __init__(self, *script: Any, finish_reason="stop", stop_reason=None, state: Any = None):
        self.script = script
        self.scripts: list[tuple[Any, ...]] = []  # of the first requests, when they differ
        self.sent_texts: dict[str, list[str]] = {}  # of each request, by its req_id
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.state = ModelState(ready=True, model_len=8192) if state is None else state
        self.reasoning: str | None = None  # what it knows of the prompt
        self.max_dec_len: int | None = None  # to which it reduces a longer one
        self.stored: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_probes = 0
        self.aborts: list[tuple[str, str]] = []
        self.waiting = threading.Semaphore(0)  # released when a request reaches WAIT
        self.cancelled = threading.Semaphore(0)  # released when a request is closed before its end
        self._go: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False

    def go(self) -> None:
        self._loop.call_soon_threadsafe(self._go.set)

    async def generate(self, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[Delta, None]:
        self.bodies.append(json.loads(json.dumps(body)))
        self._loop = asyncio.get_running_loop()
        self._go = self._go or asyncio.Event()
        # One that is asked again goes on where its client was.
        count = body.get("resume_from") or 0
        texts = self.sent_texts.get(body["req_id"], [])[: count[0] if isinstance(count, list) else count]
        self.sent_texts[body["req_id"]] = texts
        n = body.get("n", 1)
        try:
            for item in self.scripts.pop(0) if self.scripts else self.script:
                await asyncio.sleep(0)  # as a network would, let others run
                if isinstance(item, Exception):
                    raise item
                if item is WAIT:
                    self.waiting.release()
                    await self._wait(timeout_s)
                    if self.is_closed:
                        raise EngineUnavailable("the gateway is stopping")
                else:
                    delta_fields = self.delta_fields(body, texts, item)
                    for index in range(n):
                        yield Delta(**delta_fields, index=index)
            for index in range(n):
                is_end = index == n - 1
                yield Final(**self.delta_fields(body, texts, ""), **self._end(body, texts), index=index, is_end=is_end)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.release()
            raise

    async def _wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._go.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise TimedOut(f"the model sent no response for {timeout_s:g} s, the request is cancelled") from None

    def delta_fields(self, body: dict[str, Any], texts: list[str], text: str) -> dict[str, Any]:
        fields = {
            "req_id": body["req_id"],
            "token_ids": [len(texts)] if text else [],
            "token": text,
            "send_idx": len(texts),
            "inference_time_cost": 0.25,
            "infer_seed": 3,
        }
        if not texts and asks_for_prompt_details(body):
            fields["prompt_details"] = PromptDetails([1, 2, 3], "<s>Hi é", PROMPT_LOGPROBS)
        if not texts:
            fields["reasoning"] = self.reasoning
            fields["max_dec_len"] = self.max_dec_len if body.get("cut_max_dec_len") else None
        if text:
            texts.append(text)
            if body.get("logprobs", -1) >= 0:
                fields["logprobs"] = (a_logprob(text),)
        # As the model, it does not know what was cached when another process began the answer.
        return fields | {"usage": Usage(5, len(texts), None if body.get("resume_from") else 4)}

    def _end(self, body: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        whole = {"tokens_all_ids": list(range(len(texts))), "tokens_all": "".join(texts)}
        if asks_for_prompt_details(body):
            whole["stop_token"] = a_logprob("</s>")._replace(token_id=2)
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, **whole}

    async def abort(self, req_id: str, owner: Owner) -> Aborted:
        self.aborts.append((req_id, owner.name))
        return Aborted(req_id, True)

    async def tokenize_or_detokenize(self, body: dict[str, Any]) -> TokenizeResponse | DetokenizeResponse:
        """Answer questions about a text whose tokens are its code points."""
        self.bodies.append(json.loads(json.dumps(body)))
        if TOKENIZE in body:
            text = check_fields(body[TOKENIZE], TOKENIZE_FIELDS).get("prompt", "")
            return TokenizeResponse([ord(each) for each in text], 8192)
        tokens = check_fields(body[DETOKENIZE], DETOKENIZE_FIELDS).get("tokens", ())
        return DetokenizeResponse("".join(chr(each % 128) for each in tokens))

    async def change_loras(self, body: dict[str, Any], owner: Owner) -> LoraList:
        """Return a list with one adapter, whatever the change is."""
        self.bodies.append(json.loads(json.dumps(with_owner(body, owner))))
        if self.script:
            raise self.script[0]
        return LoraList(["one"])

    async def stored_response(self, body: dict[str, Any]) -> StoredResponse:
        """Return the next of `stored`, or raise that there is none."""
        self.bodies.append(json.loads(json.dumps(body)))
        if not self.stored:
            raise UnknownAnswer("there is no such response")
        response = self.stored.pop(0)
        if isinstance(response, Exception):
            raise response
        return response() if callable(response) else response

    async def probe(self, with_metrics: bool = False) -> ModelState:
        self.num_probes += 1
        if isinstance(self.state, Exception):
            raise self.state
        if self.state is WAIT:
            await asyncio.Event().wait()
        return self.state

    async def is_live(self) -> bool:
        return not isinstance(self.state, Exception)

    async def close(self) -> None:
        self.is_closed = True
        if self._go is not None:
            self._go.set()


class Gateway:
    """A running worker, and the simplest client of it."""

    def __init__(self, port: int, stop):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.stop = stop  # what SIGTERM does

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
        """Send a request and return status, headers and body. A body that is not bytes is sent as JSON."""
        with contextlib.closing(self.connect()) as connection:
            payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, payload, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path: str, body: Any) -> Any:
        status, _, payload = self.send("POST", path, body)
        assert status == 200, payload
        return json.loads(payload)

    def refused(self, path: str, body: Any) -> tuple[int, Any]:
        status, headers, payload = self.send("POST", path, body)
        assert headers.get_content_type() == "application/json"
        return status, json.loads(payload)

    def stream(self, path: str, body: Any) -> list[bytes]:
        """Return the chunks of an answer as they were written."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return list(chunks(response))


def chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while chunk := response.read1():
        yield chunk


def events(stream: list[bytes]) -> list[Any]:
    """Return the objects of a stream of server-sent events. Its [DONE] stays a text."""
    lines = b"".join(stream).decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


@contextlib.contextmanager
def openai_client(gateway: Gateway, base: str = "/v1") -> Iterator[openai.Client]:
    """Return OpenAI's unmodified client without retries, so that a test sees the first answer.

    It reads no certificates, which would take 25 ms of CPU time.
    """
    url, key, http_client = gateway.url + base, "EMPTY_API_KEY", openai.DefaultHttpxClient(verify=False)
    with openai.Client(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S, http_client=http_client) as client:
        yield client


@contextlib.contextmanager
def running(backend: FakeBackend, request_timeout_s: float = REQUEST_TIMEOUT_S, **settings: Any) -> Iterator[Gateway]:
    sock = listen("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    config = Config(**{"drain_timeout_s": 0.2, **settings})

    def work() -> None:
        app = make_app(backend, config, request_timeout_s)
        loop.run_until_complete(serve(app, [sock], stop, config.drain_timeout_s))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    sock.listen()  # before the thread runs, so that no test is earlier
    thread = threading.Thread(target=work)
    thread.start()
    tell = lambda: loop.call_soon_threadsafe(stop.set)  # noqa: E731
    try:
        yield Gateway(sock.getsockname()[1], tell)
    finally:
        with contextlib.suppress(RuntimeError):  # the test has stopped it already
            tell()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
