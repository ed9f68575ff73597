"""The health port: what it asks, what it answers, and how little it costs."""

import asyncio
import contextlib
import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engine.errors import EngineUnavailable
from engine.wire import ModelState
from gateway import health
from gateway.health import make_health_app, readiness
from gateway.metrics_proxy import make_metrics_app
from tests.pure.gateway_fake import PATIENCE_S, WAIT, FakeBackend, running


async def ask(backend, *paths, ports=(), timeout_s=PATIENCE_S, times=1):
    """Request all paths at the same time, `times` times. Return the last status and body of each."""
    runner = web.AppRunner(make_health_app(backend, timeout_s, ports))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v2/health/"

    async def get(session, path):
        async with session.get(url + path) as response:
            return response.status, await response.text() if response.status == 200 else await response.json()

    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(times):
                answers = await asyncio.gather(*[get(session, path) for path in paths])
            return answers
    finally:
        await runner.cleanup()


def test_a_ready_model_is_200_with_an_empty_body():
    assert asyncio.run(ask(FakeBackend(), "ready", "live")) == [(200, ""), (200, "")]


@pytest.mark.parametrize(
    ("state", "live", "code", "message"),
    [
        (ModelState(ready=False, reason="warming up"), 200, 2, "warming up"),
        (ModelState(ready=False), 200, 2, "the model is not ready"),
        (EngineUnavailable("model server unreachable"), 503, 1, "model server unreachable"),
        (ValueError("secret"), 503, 2, "the check failed: ValueError"),
    ],
)
def test_a_model_that_is_not_ready_is_503_and_says_why(state, live, code, message):
    ready, alive = asyncio.run(ask(FakeBackend(state=state), "ready", "live"))
    assert ready == (503, {"error_code": code, "error_msg": message})
    assert alive[0] == live


def test_a_model_that_does_not_answer_in_time_is_503_and_says_so():
    [ready] = asyncio.run(ask(FakeBackend(state=WAIT), "ready", timeout_s=0.05))
    assert ready == (503, {"error_code": 3, "error_msg": "no answer within 0.05 s"})


def test_many_who_ask_at_once_cost_one_probe():
    backend = FakeBackend()
    assert asyncio.run(ask(backend, *["ready"] * 50)) == [(200, "")] * 50
    assert backend.num_probes == 1


@pytest.mark.parametrize(("max_age_s", "num_probes"), [(3600, 1), (-1, 3)])
def test_an_answer_is_good_for_a_while_and_no_longer(monkeypatch, max_age_s, num_probes):
    monkeypatch.setattr(health, "MAX_AGE_S", max_age_s)
    backend = FakeBackend()
    assert asyncio.run(ask(backend, "ready", times=3)) == [(200, "")]
    assert backend.num_probes == num_probes


def test_frequent_requests_wait_for_no_probe_and_get_nothing_old(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(health, "now", lambda: now_s[0])
    backend = FakeBackend()

    async def ask_often():
        shared = readiness(backend, PATIENCE_S)
        await shared()
        now_s[0] += 0.3 * health.MAX_AGE_S
        backend.state = WAIT  # the model is busy
        for _ in range(3):
            assert (await asyncio.wait_for(shared(), PATIENCE_S)).error_code == 0
            await asyncio.sleep(0)
        assert backend.num_probes == 2  # the next one is on its way
        now_s[0] += 0.8 * health.MAX_AGE_S
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(shared(), 0.1)

    asyncio.run(ask_often())


def test_the_connections_to_the_model_are_closed_in_the_end():
    asyncio.run(ask(backend := FakeBackend(), "live"))
    assert backend.is_closed


def test_live_needs_the_ports_for_clients():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert asyncio.run(ask(FakeBackend(), "live", ports=[("127.0.0.1", port)])) == [(200, "")]
    [(status, body)] = asyncio.run(ask(FakeBackend(), "live", ports=[("127.0.0.1", port)]))
    assert (status, body["error_code"]) == (503, 1)
    assert f"no answer on port {port}" in body["error_msg"]


def test_the_service_port_tells_its_health_too():
    with running(FakeBackend()) as gateway:
        assert gateway.send("GET", "/health")[::2] == gateway.send("GET", "/ping")[::2] == (200, b"")
        assert gateway.send("POST", "/ping")[::2] == (200, b"")
        assert gateway.send("GET", "/load")[2] == b'{"server_load":0}'
    with running(FakeBackend(state=ModelState(ready=False, reason="warming up"))) as gateway:
        status, _, payload = gateway.send("GET", "/health")
    assert status == 503
    assert b"warming up" in payload


def test_the_models_are_listed_while_the_model_is_not_ready():
    with running(FakeBackend(state=EngineUnavailable("gone"))) as gateway, contextlib.closing(gateway.connect()):
        status, _, payload = gateway.send("GET", "/v1/models")
    assert status == 200
    assert b'"max_model_len":null' in payload


def test_a_server_that_was_ready_once_has_started_for_good():
    backend = FakeBackend(state=ModelState(ready=False, reason="loading"))

    async def three_times():
        runner = web.AppRunner(make_health_app(backend, PATIENCE_S))
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        seen = []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            for state in (backend.state, ModelState(ready=True), ModelState(ready=False)):
                backend.state = state
                for path in ("ready", "started"):
                    async with session.get(f"/v2/health/{path}") as response:
                        seen.append(response.status)
        await site.stop()
        await runner.cleanup()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "MAX_AGE_S", 0.0)
        assert asyncio.run(three_times()) == [503, 503, 200, 200, 503, 200]


def test_tritons_metrics_are_forwarded_and_their_absence_is_reported(tmp_path):
    asked = []

    async def show(request):
        asked.append(request.path)
        return web.Response(text="# HELP nv 1\n", headers={"Content-Type": "text/plain; charset=utf-8"})

    async def scenario():
        behind = web.Application()
        behind.add_routes([web.get("/metrics", show)])
        runner = web.AppRunner(behind)
        await runner.setup()
        async with TestClient(TestServer(make_metrics_app(tmp_path / "page"))) as client:
            assert (await client.get("/metrics")).status == 503
            await web.UnixSite(runner, tmp_path / "page").start()
            answers = await asyncio.gather(*[client.get("/metrics") for _ in range(20)])
            assert {(each.status, await each.text()) for each in answers} == {(200, "# HELP nv 1\n")}
            assert (await client.get("/other")).status == 404
        await runner.cleanup()

    asyncio.run(scenario())
    assert asked == ["/metrics"] * 20
