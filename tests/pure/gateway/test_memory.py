"""Tests of the memory of a worker: large bodies have room or are refused, and none delays the others for long."""

import asyncio
import contextlib
import json
import re
import socket
import time

import pytest

from engine.errors import Overloaded
from engine.settings.config import Config
from gateway import app, connection_limits, inet_diag
from gateway.body_memory import LARGE_BYTES, OPEN_BYTES, BodyMemoryBudget, BodyMemoryReservation
from tests.pure.gateway_fake import PATIENCE_S, WAIT, FakeBackend, running

CHAT = "/v1/chat/completions"
LARGE = {"text": "x" * 3 * LARGE_BYTES}


def test_large_requests_share_what_there_is_and_small_ones_need_none():
    budget = BodyMemoryBudget(5 * LARGE_BYTES)
    first, second, small = BodyMemoryReservation(budget), BodyMemoryReservation(budget), BodyMemoryReservation(budget)
    first.reserve(2 * LARGE_BYTES)
    first.reserve(3 * LARGE_BYTES)
    with pytest.raises(
        Overloaded, match=f"{3 * LARGE_BYTES} bytes, with this one more than the limit of {5 * LARGE_BYTES}"
    ):
        second.reserve(3 * LARGE_BYTES)
    second.reserve(2 * LARGE_BYTES)
    small.reserve(LARGE_BYTES)
    assert budget.num_bytes == 5 * LARGE_BYTES
    for room in (first, first, second, small):
        room.release()
    assert budget.num_bytes == 0


def test_workers_share_and_each_has_room_for_the_largest_request():
    assert BodyMemoryBudget.for_worker(Config(push_mode_http_workers=4)).max_bytes == OPEN_BYTES // 4
    assert BodyMemoryBudget.for_worker(Config(max_body_bytes=32 << 20)).max_bytes == 16 * 32 << 20
    assert BodyMemoryBudget.for_worker(Config(push_mode_http_workers=4, max_body_bytes=1 << 30)).max_bytes == 1 << 30


def test_large_requests_are_read_one_after_the_other_and_leave_others_their_time():
    async def scenario():
        budget, num_turns = BodyMemoryBudget(1 << 30), 0

        async def others():
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        async def read():
            async with budget.reading(LARGE_BYTES + 1):
                before = num_turns
                time.sleep(0.01)  # as a parser does
            return num_turns - before

        task = asyncio.create_task(others())
        turns = await asyncio.gather(*[read() for _ in range(5)])
        task.cancel()
        assert min(turns) > 5

    asyncio.run(scenario())


@pytest.fixture
def small_intake(monkeypatch):
    budget = BodyMemoryBudget(4 * LARGE_BYTES)
    monkeypatch.setattr(app.BodyMemoryBudget, "for_worker", lambda config: budget)
    return budget


@pytest.mark.parametrize("framing", [f"Content-Length: {3 * LARGE_BYTES}", "Transfer-Encoding: chunked"])
def test_a_body_without_room_is_refused_with_429_before_it_is_read(small_intake, framing):
    backend = FakeBackend(WAIT)
    with running(backend) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps(LARGE))
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as other:
            other.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
            if "chunked" in framing:  # enough to be too much, and no end
                other.sendall(f"{3 * LARGE_BYTES:x}\r\n".encode() + b" " * 2 * LARGE_BYTES)
            head = other.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 429 ") and b"Retry-After: 1" in head
        backend.go()
        assert connection.getresponse().status == 200
        assert gateway.send("POST", CHAT, LARGE)[0] == 200
        assert small_intake.num_bytes == 0


def test_there_is_room_again_when_the_model_has_begun_to_answer(small_intake):
    backend = FakeBackend("a", WAIT)
    with running(backend) as gateway, contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", CHAT, json.dumps({**LARGE, "stream": True}))
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        assert small_intake.num_bytes == 0
        backend.go()
        connection.getresponse().read()


@pytest.mark.parametrize("body", [b"{" * 3 * LARGE_BYTES, json.dumps({"x" * 3 * LARGE_BYTES: 1, "topp": 9}).encode()])
def test_a_refused_body_leaves_its_room(small_intake, body):
    with running(FakeBackend("a")) as gateway:
        gateway.send("POST", CHAT, body)
        assert small_intake.num_bytes == 0


def test_a_request_of_very_many_fields_is_refused_before_they_are_checked():
    with running(FakeBackend("a")) as gateway:
        status, fields = gateway.refused(CHAT, {f"field{n}": n for n in range(1001)})
    assert (status, fields["error_msg"]) == (400, "the request has 1001 fields, the limit is 1000")


def a_half_head(num_bytes):
    return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"X%d: %s\r\n" % (n, b"x" * 8000) for n in range(num_bytes // 8000)
    )


@pytest.mark.parametrize(("limit", "value"), [("max_bytes", 1 << 20), ("connections", 8)])
def test_heads_that_never_end_are_cut_when_they_are_too_much_and_others_are_served(monkeypatch, limit, value):
    """aiohttp would hold half a megabyte for each of any number of connections."""
    if limit == "connections":
        monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", value)
    monkeypatch.setattr(app.BodyMemoryBudget, "for_worker", lambda config: BodyMemoryBudget(1 << 20))
    backend = FakeBackend("a", WAIT, "b")
    with running(backend) as gateway, contextlib.ExitStack() as stack:
        busy, idle = (stack.enter_context(contextlib.closing(gateway.connect())) for _ in range(2))
        busy.request("POST", CHAT, json.dumps({"text": "hi", "stream": True}))
        assert backend.waiting.acquire(timeout=PATIENCE_S)
        attackers = []
        for _ in range(12):
            attackers.append(stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S)))
            attackers[-1].sendall(a_half_head(400_000 if limit == "max_bytes" else 8000))
        left, deadline = len(attackers), time.monotonic() + PATIENCE_S
        while left * 400_000 > value if limit == "max_bytes" else left > value - 1:
            assert time.monotonic() < deadline, left
            left = len(attackers) - sum(is_cut(each) for each in attackers)
        backend.go()
        assert b'"b"' in busy.getresponse().read()
        for _ in range(2):
            idle.request("GET", "/version")
            assert idle.getresponse().read()


@pytest.mark.slow
def test_earlier_requests_of_a_connection_do_not_count_towards_its_next_head(monkeypatch):
    monkeypatch.setattr(app.BodyMemoryBudget, "for_worker", lambda config: BodyMemoryBudget(1 << 20))
    with running(FakeBackend("a")) as gateway, contextlib.ExitStack() as stack:
        asked = [stack.enter_context(contextlib.closing(gateway.connect())) for _ in range(2)]
        for each in asked:
            for _ in range(4):
                each.request("POST", CHAT, json.dumps({"text": "x" * 500_000}))
                each.getresponse().read()
        time.sleep(3 * inet_diag.CHECK_EVERY_S)  # no check runs with so few connections
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S))
        time.sleep(3 * inet_diag.CHECK_EVERY_S)
        assert not any(is_cut(each.sock) for each in asked)


def is_cut(client):
    client.settimeout(0.01)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


MESSAGES = [{"role": "user", "content": "hi"}]
REPEATED = {  # what events or answers repeat
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/embeddings": {"input": "hi"},
}


def test_what_every_event_repeats_is_short_and_many_prompts_are_counted_before_they_are_looked_at():
    """A name of 4 MB would be sent with each token, and 300,000 prompts took two seconds to be refused."""
    cases = [(path, {**body, "model": "x" * 257}, "model") for path, body in REPEATED.items()]
    cases.append(("/v1/responses", {"input": "hi", "metadata": {str(n): "" for n in range(17)}}, "metadata"))
    cases += [
        ("/v1/completions", {"prompt": [[-1]] * 129}, "prompt"),
        ("/v1/embeddings", {"input": [[-1]] * 2049}, "input"),
    ]
    with running(FakeBackend("a")) as gateway:
        for path, body, field in cases:
            status, _, answer = gateway.send("POST", path, body)
            assert status == 400
            assert re.search(
                rf"`{field}` has (257 characters|17 items|129 items|2049 items), the limit is", str(answer)
            )
        assert gateway.send("POST", CHAT, {"messages": MESSAGES, "model": "x" * 256})[0] == 200
