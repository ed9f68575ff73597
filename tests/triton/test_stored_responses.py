"""Stored and background responses with OpenAI's unmodified client, while engine and gateway are killed."""

import contextlib
import json
import os
import signal

import openai
import pytest

from tests.patience import wait_until
from tests.server import running_server

LONG = {"model": "demo", "input": "Tell me", "temperature": 0, "max_output_tokens": 300}
LONG |= {"extra_body": {"ignore_eos": True, "min_tokens": 300}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({name: {"key": name} for name in ("alice", "bob")}))
    with running_server(folder, {"API_KEYS": str(keys)}) as running:
        yield running


def client_of(server, name):
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=name)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server, "alice") as client:
        yield client


def is_replaced(server, name, pid):
    with contextlib.suppress(LookupError):  # it is down
        return server.pid_of(name) != pid


def finished(client, response_id):
    def done():
        response = client.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return wait_until(done)


def test_a_stored_response_is_retrieved_as_it_was_sent_until_it_is_deleted(client):
    asked = {"model": "demo", "input": "What is the capital of France?", "metadata": {"a": "b"}}
    sent = client.responses.create(**asked, store=True)
    assert (sent.store, client.responses.retrieve(sent.id)) == (True, sent)
    streamed = [*client.responses.create(**asked, store=True, stream=True)][-1].response
    assert client.responses.retrieve(streamed.id) == streamed
    client.responses.delete(sent.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)
    not_stored = client.responses.create(**asked)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)


def test_a_conversation_goes_on_with_a_previous_response(client, server):
    first = client.responses.create(
        model="demo", input="What is the capital of France?", instructions="Be brief.", store=True, temperature=0
    )
    asked = {"model": "demo", "input": "And of Italy?", "instructions": "Be kind.", "temperature": 0}
    second = client.responses.create(**asked, previous_response_id=first.id, store=True)
    history = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    by_hand = client.responses.create(**{**asked, "input": history})
    assert (second.output_text, second.usage.input_tokens) == (by_hand.output_text, by_hand.usage.input_tokens)
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in items] == [each["content"] for each in history]
    with client_of(server, "bob") as bob, pytest.raises(openai.NotFoundError):
        bob.responses.input_items.list(second.id)
    client.responses.delete(first.id)  # the second has the conversation
    third = client.responses.create(model="demo", input="Thank you.", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_tools_that_a_stored_response_has_called_can_be_answered(client):
    asked = {"model": "demo", "tools": [WEATHER], "tool_choice": "required"}
    first = client.responses.create(input="How is the weather?", **asked, store=True, max_output_tokens=200)
    [call] = first.output
    assert client.responses.retrieve(first.id).output == [call]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(input=[output], **asked, previous_response_id=first.id, max_output_tokens=200)
    assert second.status in ("completed", "incomplete")


def test_a_background_response_outlives_a_killed_gateway_and_a_killed_engine(server, client):
    expected = client.responses.create(**LONG).output_text
    engine, gateway = server.pid_of("engine"), server.pid_of("gateway-0")
    os.kill(engine, signal.SIGSTOP)  # so that all that follows happens before its end
    begun = client.responses.create(**LONG, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: is_replaced(server, "gateway-0", gateway))
    assert client.with_options(max_retries=20).responses.retrieve(begun.id).status == "queued"
    os.kill(engine, signal.SIGKILL)
    response = finished(client, begun.id)
    assert (response.status, response.output_text) == ("incomplete", expected)
    assert client.responses.retrieve(begun.id) == response
    assert is_replaced(server, "engine", engine)


def text_of(events):
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def without_deltas(events):
    return [event for event in events if "delta" not in event.type]


def test_a_stream_of_a_background_response_goes_on_after_its_client_gateway_and_engine_were_lost(server, client):
    expected = client.responses.create(**LONG)
    engine, gateway = server.pid_of("engine"), server.pid_of("gateway-0")
    os.kill(engine, signal.SIGSTOP)
    stream = client.responses.create(**LONG, background=True, stream=True)
    created = next(stream)
    assert (created.type, created.response.status) == ("response.created", "in_progress")
    stream.close()
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: is_replaced(server, "gateway-0", gateway))
    resumed = client.with_options(max_retries=20).responses.retrieve(created.response.id, stream=True)
    os.kill(engine, signal.SIGKILL)
    events = list(resumed)
    assert (text_of(events), events[-1].type) == (expected.output_text, "response.incomplete")
    assert events[-1].response == client.responses.retrieve(created.response.id)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    for event in (events[0], events[len(events) // 2], events[-1]):
        later = client.responses.retrieve(created.response.id, stream=True, starting_after=event.sequence_number)
        rest = [each for each in events if each.sequence_number > event.sequence_number]
        assert text_of(later := list(later)) == text_of(rest)
        assert [each for each in later if "delta" not in each.type] == [
            each for each in rest if "delta" not in each.type
        ]


def test_a_stream_that_another_takes_over_ends_with_an_error(server, client):
    engine = server.pid_of("engine")
    os.kill(engine, signal.SIGSTOP)
    try:
        first = client.responses.create(**LONG, background=True, stream=True)
        created = next(first)
        second = client.responses.retrieve(created.response.id, stream=True)
        assert next(second).type == "response.created"
        with pytest.raises(openai.APIError, match="goes on without this connection"):
            list(first)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert list(second)[-1].type == "response.incomplete"


def test_the_stream_of_a_response_that_was_cancelled_ends_with_an_error(server, client):
    engine = server.pid_of("engine")
    os.kill(engine, signal.SIGSTOP)
    try:
        stream = client.responses.create(**LONG, background=True, stream=True)
        response_id = next(stream).response.id
        client.responses.cancel(response_id)
    finally:
        os.kill(engine, signal.SIGCONT)
    for each in (stream, client.responses.retrieve(response_id, stream=True)):
        with pytest.raises(openai.APIError, match="was cancelled"):
            list(each)
    stored = client.responses.create(model="demo", input="Hi", store=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(stored.id, stream=True)


def test_a_background_response_can_be_cancelled_but_no_other(server, client):
    engine = server.pid_of("engine")
    os.kill(engine, signal.SIGSTOP)
    try:
        begun = client.responses.create(**LONG, background=True)
        assert client.responses.cancel(begun.id).status == "cancelled"
    finally:
        os.kill(engine, signal.SIGCONT)
    assert client.responses.retrieve(begun.id).status == client.responses.cancel(begun.id).status == "cancelled"
    stored = client.responses.create(model="demo", input="Hi", store=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(stored.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="Hi", previous_response_id=begun.id)
    assert caught.value.param == "previous_response_id"


def test_the_responses_of_one_key_are_unknown_to_the_others(server, client):
    stored = client.responses.create(model="demo", input="Hi", store=True)
    with client_of(server, "bob") as other:
        for ask in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(stored.id)
        with pytest.raises(openai.NotFoundError) as caught:
            other.responses.create(model="demo", input="Hi", previous_response_id=stored.id)
        assert caught.value.param == "previous_response_id"
    assert client.responses.retrieve(stored.id) == stored
