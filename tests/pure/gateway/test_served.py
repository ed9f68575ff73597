"""Tests of a reload of the model: new requests wait, and open ones continue with their model or fail."""

import asyncio
import threading
import time

import pytest

from engine.errors import EngineUnavailable
from engine.settings.served import SERVED_FILE, Served, ServedModel
from engine.wire import Failure, Final, Usage, write_answer
from gateway import retry
from gateway.backend import ModelLost, ModelUnreachable
from server_scripts.reload import WHY
from tests.pure.gateway_fake import WAIT, FakeBackend, openai_client, running
from tests.pure.inference_fake import a_client, a_request, a_response, answers, serving

CHAT = "/v1/chat/completions"
LOST, GONE = ModelLost("the model server has gone"), ModelUnreachable("not running")
ENDED = EngineUnavailable(WHY)  # the old model has not begun it within the drain timeout
ASKED = {"text": "Hi", "req_id": "r"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "CHECK_EVERY_S", 0.01)


@pytest.fixture
def write(tmp_path):
    def write(*served, **known):
        (tmp_path / "partial").write_text(Served(*served, **known).text())
        (tmp_path / "partial").replace(tmp_path / SERVED_FILE)

    return write


class Asking(threading.Thread):
    def __init__(self, gateway, body=ASKED):
        super().__init__()
        self._ask = lambda: gateway.send("POST", CHAT, body)
        self.start()

    def run(self):
        self.status, _, self.text = self._ask()

    def answer(self):
        self.join(60)
        return self.status, self.text.decode()


def test_the_file_is_read_when_it_changes_and_none_is_the_first_model(tmp_path, write):
    served = ServedModel(tmp_path)
    assert served.now() == Served()
    write("a", "one")
    assert served.now() is served.now()
    write("b", "two", is_changing=True)
    assert served.now() == Served("b", "two", True)
    (tmp_path / SERVED_FILE).unlink()
    assert served.now() == Served()


def test_a_new_request_waits_until_the_model_has_changed(tmp_path, write):
    backend = FakeBackend("a", "b")
    write("", "old", is_changing=True)
    with running(backend, run_dir=str(tmp_path)) as gateway:
        asking = Asking(gateway)
        time.sleep(0.3)
        assert backend.bodies == [] and asking.is_alive()
        write("new id", "new")
        status, text = asking.answer()
        assert status == 200 and '"tokens_all":"ab"' in text
        with openai_client(gateway) as client:
            assert [model.id for model in client.models.list()] == ["new"]


@pytest.mark.parametrize("error", [LOST, GONE, ENDED])
def test_one_that_came_between_the_models_is_asked_of_the_next(tmp_path, write, error):
    backend = FakeBackend("a", WAIT)
    backend.scripts = [(WAIT, error), ("a", "b")]
    with running(backend, run_dir=str(tmp_path)) as gateway:
        asking = Asking(gateway)
        assert backend.waiting.acquire(timeout=60)
        write("", "old", is_changing=True)
        backend.go()
        time.sleep(0.2)
        assert len(backend.bodies) == 1 and asking.is_alive()
        write("new id", "new")
        assert '"tokens_all":"ab"' in asking.answer()[1]


@pytest.mark.parametrize("is_changing", [False, True])
def test_a_request_is_read_by_the_chat_template_of_the_new_model(tmp_path, write, is_changing):
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    with running(FakeBackend(call), run_dir=str(tmp_path)) as gateway:
        status, error = gateway.refused(CHAT, body)
        assert status == 400 and "not known to the chat template" in error["error"]["message"]
        write("", "old", is_changing, graph_dir=str(tmp_path))
        asking = Asking(gateway, body)
        time.sleep(0.1 if is_changing else 0)
        write("new id", "new", graph_dir=str(tmp_path))
        status, text = asking.answer()
    assert status == 200 and '"tool_calls":[{' in text


def test_it_waits_as_long_as_for_an_answer(tmp_path, write):
    backend = FakeBackend("a")
    write("", "old", is_changing=True)
    with running(backend, run_dir=str(tmp_path)) as gateway:
        status, error = gateway.refused(CHAT, {**ASKED, "timeout": 0.1})
    assert (status, error["error_msg"]) == (503, "the model is still being reloaded; retry later")
    assert backend.bodies == []


@pytest.mark.parametrize("is_another", [True, False])
def test_an_answer_that_was_begun_goes_on_with_its_own_model_or_not_at_all(tmp_path, write, is_another):
    backend = FakeBackend()
    backend.scripts = [("a", WAIT, LOST), ("b",)]
    with running(backend, run_dir=str(tmp_path)) as gateway:
        asking = Asking(gateway)
        assert backend.waiting.acquire(timeout=60)
        if is_another:
            write("new id", "new")
        else:  # its model has died while it was to end, and is there again
            write("", "old", is_changing=True)
        backend.go()
        status, text = asking.answer()
    if is_another:
        assert status == 503 and "the model was replaced by a reload before the answer was complete" in text
        assert len(backend.bodies) == 1
    else:
        assert '"tokens_all":"ab"' in text


class Triton:
    """Answers every request with one token, but the first so many with an error, as the model is changed just then."""

    def __init__(self, write, num_ended=0):
        self.num_requests = 0
        self._write = write
        self._num_ended = num_ended

    def __getattr__(self, name):  # of the service's other methods none is asked
        if name[0].isupper():
            return None
        raise AttributeError(name)

    async def ModelStreamInfer(self, requests, context):  # noqa: N802
        async for request in requests:
            self.num_requests += 1
            last = {"finish_reason": "stop", "tokens_all": "a", "tokens_all_ids": [1]}
            answer = write_answer(Final("r", "a", [1], 0, Usage(), 0, **last))
            if self.num_requests <= self._num_ended:
                self._write("", "old", is_changing=True)
                answer = write_answer(Failure(ENDED))
            yield a_response(answer, request.id)


@pytest.mark.parametrize("num_ended", [0, 1])
def test_over_grpc_new_requests_wait_and_what_the_old_model_has_not_begun_is_the_new_ones(tmp_path, write, num_ended):
    triton = Triton(write, num_ended)
    write("", "old", is_changing=not num_ended)

    async def ask():
        async with serving(tmp_path, triton) as (_, port), a_client(port) as client:
            asking = asyncio.ensure_future(answers(client.ModelStreamInfer(iter([a_request("r", req_id="r")]))))
            await asyncio.sleep(0.3)
            assert not asking.done() and triton.num_requests == num_ended
            write("new id", "new")
            return await asyncio.wait_for(asking, 60)

    [(_, text, error)] = asyncio.run(ask())
    assert (text, error, triton.num_requests) == ("a", "", num_ended + 1)
