"""Requests with images: they reach the engine with their pixels, and neither wait for others nor let others wait."""

import json
import threading
from types import SimpleNamespace

import pytest

from engine import wire
from engine.errors import InvalidRequest
from engine.serving.image_prompts import ImagePrompts
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.text.tokenizer import Tokenizer
from tests.image_requests import a_file, a_reader, an_image_part, write_vision_model
from tests.images import an_image
from tests.patience import PATIENCE_S, wait_until
from tests.pure.service_fakes import FakeSender, a_payload, an_input_processor, answer_to

FILE = a_file(an_image(56, 84))


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_vision_model(directory)
    tokenizer = Tokenizer.load(directory)
    images = ImagePrompts(tokenizer, a_reader(directory), max_images=3)
    images.reader.close = lambda: None  # services share it
    yield an_input_processor(tokenizer, images=images)
    images.reader._pool.close()


@pytest.fixture
def service(processor, engine):
    service = Service(processor, engine, ServiceOptions())
    yield service
    service.close(drain_s=0)


def ask(service, *files, req_id="a", text="x", **fields):
    sender = FakeSender()
    content = [*map(an_image_part, files), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    service.submit(a_payload(req_id=req_id, messages=messages, max_dec_len=5, infer_seed=1, **fields), sender)
    return sender


def submitted(engine, count=1):
    """Return (prompt, spans) of the requests in the engine, waiting for `count` of them."""
    wait_until(lambda: len(engine.prompts) >= count)
    return [(engine.prompts[name], engine.spans[name]) for name in engine.prompts]


def test_pixels_come_to_the_engine_and_tokens_of_images_are_counted(service, engine, processor):
    sender = ask(service, FILE)
    [(prompt, [span])] = submitted(engine)
    assert (span.length, span.grid) == (6, (1, 2, 3))
    assert span.pixels == processor.images.reader.processor.resize(an_image(56, 84)).tobytes()
    wait_until(lambda: not service._replies.get("a").prompt.spans[0].pixels)  # the client of the engine has them
    assert service._replies.get("a").state.request.images == ()
    engine.give(prompt, b"ab", "length")
    usage = sender.final["usage"]
    assert (usage["prompt_tokens"], usage["image_tokens"]) == (len(prompt), 6)


def test_an_image_that_takes_long_lets_no_other_request_wait(service, engine, processor, monkeypatch):
    may_go_on = threading.Event()

    def read(part, limits):
        assert may_go_on.wait(PATIENCE_S)
        raise InvalidRequest("late")

    monkeypatch.setattr(processor.images.reader, "read", read)
    slow = [ask(service, FILE, req_id=f"slow{index}") for index in range(3)]
    text = FakeSender()
    service.submit(a_payload(req_id="text", input_ids=[1, 2]), text)
    engine.give([1, 2], b"a", "length")
    assert text.final["tokens_all"] == "a"
    assert not any(sender.is_over for sender in slow)
    may_go_on.set()
    assert [sender.final["error_msg"] for sender in slow] == ["late"] * 3


def test_requests_whose_images_wait_are_counted(processor, engine, monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(processor.images.reader, "read", lambda *_: may_go_on.wait(PATIENCE_S) and 1 / 0)
    service = Service(processor, engine, ServiceOptions(max_running=1, max_waiting=11))
    try:
        waiting = [ask(service, FILE, req_id=str(number)) for number in range(16)]
        wait_until(lambda: any(sender.is_over for sender in waiting) or service._admission._num_unparsed > 7)
        more = [ask(service, FILE, req_id=f"more{number}") for number in range(8)]
        assert any(each.final["error_code"] == 429 for each in more if each.is_over)
    finally:
        may_go_on.set()
        service.close(drain_s=0)


def test_a_refused_image_is_named(service):
    sender = ask(service, FILE, b"hello")
    assert sender.final["error_code"] == 400
    assert sender.final["error_msg"].startswith("The `messages[0].content[1].image_url` is no image")


def test_a_lost_answer_goes_on_with_the_images_of_the_request_that_asks_again(service, engine):
    sender = ask(service, FILE)
    [(prompt, spans)] = submitted(engine)
    engine.give(prompt, b"ab")
    wait_until(lambda: sender.sent)
    sender.cancelled = True
    assert sender.final["error_code"] == 499
    [finished] = service._resumption.finished._finished[""].values()
    assert finished.state.prompt.spans[0].pixels == b"" and finished.state.request.images == ()
    again = ask(service, FILE, resume_from=[2])
    assert submitted(engine, 2)[1] == (prompt, spans)
    engine.give(prompt, b"cde", "length")
    assert again.final["tokens_all"] == "abcde"
    other = ask(service, a_file(an_image(56, 84, seed=1)), resume_from=[2])
    assert other.final["error_code"] == 409


def test_a_download_that_has_changed_cannot_be_gone_on_with(service, engine, processor, monkeypatch):
    files = [FILE, a_file(an_image(56, 84, seed=1))]
    downloader = SimpleNamespace(fetch=lambda url: files.pop(0))
    monkeypatch.setattr(processor.images.reader, "_downloader", downloader)
    part = {"type": "image_url", "image_url": "https://cat.example/a.png"}
    body = {"req_id": "a", "messages": [{"content": [part]}], "max_dec_len": 5, "infer_seed": 1}
    sender = FakeSender()
    service.submit(a_payload(**body), sender)
    [(prompt, _)] = submitted(engine)
    engine.give(prompt, b"ab")
    wait_until(lambda: sender.sent)
    sender.cancelled = True
    assert sender.final["error_code"] == 499
    assert answer_to(service, **body, resume_from=[2])["error_code"] == 404


def test_a_stored_response_keeps_its_images(service, engine):
    storing = {"about": {}, "is_background": True}
    sender = ask(service, FILE, **{wire.STORE: storing})
    assert sender.final["status"] == "queued"
    [(prompt, _)] = submitted(engine)
    engine.give(prompt, b"a", "length")
    [finished] = wait_until(lambda: list(service._stored.finished._finished.get("", {}).values()))
    assert finished.state.prompt.spans[0].pixels == b""
    assert finished.size >= len(an_image_part(FILE)["image_url"]["url"]) // 4
    stored = answer_to(service, **{wire.STORED: {"id": "a", "action": wire.RETRIEVE}})
    assert wire.has_images({"messages": json.loads(stored["request"])[1]})
    assert an_image_part(FILE)["image_url"]["url"] in stored["request"]


def test_the_state_of_the_model_says_that_it_reads_images(service):
    assert answer_to(service, probe=True)["reads_images"] is True


def test_questions_about_tokens_count_those_of_images(service):
    content = [an_image_part(FILE), {"type": "text", "text": "hi"}]
    answer = answer_to(service, tokenize={"messages": [{"role": "user", "content": content}]})
    without = answer_to(service, tokenize={"messages": [{"role": "user", "content": "hi"}]})
    assert answer["count"] == without["count"] + 2 + 6
