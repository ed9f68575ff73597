"""Responses that the service stores: who may retrieve, cancel and delete them, and for how long."""

import json
import threading

import pytest

from engine import wire
from tests.patience import PATIENCE_S, wait_until
from tests.pure.service_fakes import FakeSender, a_payload, answer_to

ABOUT = {"body": {"metadata": {"a": "b"}}}
PROMPT = [1, 2]
ALICE, BOB = {wire.OWNER: {"name": "alice"}}, {wire.OWNER: {"name": "bob"}}


def begin(service, response_id="r", is_background=True, prompt=PROMPT, is_streamed=False, **more):
    storing = {"about": ABOUT, "is_background": is_background, "is_streamed": is_streamed}
    return service.ask(prompt, response_id, **{wire.STORE: storing}, infer_seed=1, **more)


def about(service, response_id="r", action=wire.RETRIEVE, **more):
    return answer_to(service, **{wire.STORED: {"id": response_id, "action": action}}, **more)


def seen(response):
    answer = response.get("answer") or {}
    return response.get("status", response.get("error_code")), answer.get("token")


def test_a_background_response_is_answered_at_once_and_can_be_retrieved_as_it_grows(service, engine):
    begun = begin(service).final
    assert (begun["response_id"], *seen(begun)) == ("r", "queued", "")
    engine.give(PROMPT, b"ab")
    wait_until(lambda: seen(about(service)) == ("in_progress", "ab"))
    engine.give(PROMPT, b"cd", "length")
    wait_until(lambda: seen(about(service)) == ("incomplete", "abcd"))
    assert json.loads(about(service)["request"]) == [ABOUT, []]
    assert about(service)["answer"]["usage"]["completion_tokens"] == 4


def test_fields_that_a_stored_request_repeats_may_have_any_value(service, engine):
    quoted = {"body": {"metadata": {"lone surrogate": "\ud800", "number": 10**40}}}
    storing = {"about": quoted, "is_background": True}
    assert service.ask(PROMPT, "r", **{wire.STORE: storing}).final["status"] == "queued"
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: seen(about(service)) == ("incomplete", "a"))
    assert json.loads(about(service)["request"])[0] == quoted


def test_a_response_that_is_stored_can_be_retrieved_while_it_is_streamed_and_later(service, engine):
    sender = begin(service, is_background=False)
    engine.give(PROMPT, b"ab")
    wait_until(lambda: sender.sent)
    assert seen(about(service)) == ("in_progress", "ab")
    engine.give(PROMPT, b"cd", "length")
    assert (sender.final["tokens_all"], "".join(each["token"] for each, _ in sender.sent)) == ("abcd", "abcd")
    assert seen(about(service)) == ("incomplete", "abcd")


def test_without_store_nothing_can_be_retrieved(service, engine):
    sender = service.ask(PROMPT, "r")
    engine.listener_of(PROMPT)
    assert about(service)["error_type"] == "unknown_answer"
    engine.give(PROMPT, b"a", "length")
    assert sender.final["tokens_all"] == "a"
    assert about(service)["error_code"] == 404


def test_a_response_is_known_to_its_owner_only(service, engine):
    begin(service, **ALICE)
    for action in (wire.RETRIEVE, wire.CANCEL, wire.DELETE):
        assert {about(service, action=action, **other)["error_code"] for other in ({}, BOB)} == {404}
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: seen(about(service, **ALICE)) == ("incomplete", "a"))
    for action in (wire.RETRIEVE, wire.CANCEL, wire.DELETE):
        assert {about(service, action=action, **other)["error_code"] for other in ({}, BOB)} == {404}


def test_a_cancelled_response_has_the_tokens_that_had_come(service, engine):
    begin(service)
    engine.give(PROMPT, b"ab")
    assert seen(about(service, action=wire.CANCEL)) == ("cancelled", "ab")
    wait_until(lambda: engine.cancelled and not service.num_open)
    assert seen(about(service)) == seen(about(service, action=wire.CANCEL)) == ("cancelled", "ab")


def test_only_a_background_response_can_be_cancelled(service, engine):
    begin(service, is_background=False)
    engine.listener_of(PROMPT)
    assert about(service, action=wire.CANCEL)["error_code"] == 400
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: seen(about(service)) == ("incomplete", "a"))
    assert about(service, action=wire.CANCEL)["error_code"] == 400


@pytest.mark.parametrize("is_over", [False, True])
def test_a_deleted_response_is_gone_and_no_longer_computed(service, engine, is_over):
    begin(service)
    engine.listener_of(PROMPT)
    if is_over:
        engine.give(PROMPT, b"a", "length")
        wait_until(lambda: not service.num_open)
    assert about(service, action=wire.DELETE)["status"] == "deleted"
    assert about(service)["error_code"] == 404
    wait_until(lambda: not service.num_open)
    assert about(service)["error_code"] == about(service, action=wire.DELETE)["error_code"] == 404
    assert not engine.listeners and not service._stored.finished


def test_a_response_that_fails_says_why(service, engine):
    engine.reason = "the engine has crashed too often"
    assert begin(service).final["status"] in ("queued", "failed")
    wait_until(lambda: about(service)["status"] == "failed")
    assert about(service)["error"]["kind"] == "engine_unavailable"


def test_a_request_in_the_background_that_is_sent_twice_is_computed_once(service, engine):
    assert [begin(service).final["status"] for _ in range(2)] == ["queued"] * 2
    assert begin(service, prompt=[3]).final["error_type"] == "duplicate_request"
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: about(service)["status"] == "incomplete")
    assert seen(begin(service).final) == ("incomplete", "a")
    assert list(engine.prompts.values()) == [PROMPT]


def test_a_refused_request_in_the_background_is_refused_to_its_client(make, engine):
    service = make(max_running=1, max_waiting=0)
    begin(service)
    engine.listener_of(PROMPT)
    assert begin(service, "second").final["error_code"] == 429
    assert about(service, "second")["error_code"] == 404


def complete(service, engine, response_id, **more):
    begin(service, response_id, **more)
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: about(service, response_id, **more).get("status") == "incomplete")


def test_after_its_time_a_response_is_dropped(make, engine):
    service = make(stored_ttl_s=0.0)
    begin(service)
    engine.give(PROMPT, b"a", "length")
    wait_until(lambda: not service.num_open and not len(service._stored.finished))
    assert "for 0 s after its end" in about(service)["error_msg"]


def test_beyond_the_tokens_the_oldest_of_the_owner_with_most_goes(make, engine):
    service = make(max_stored_tokens=40)
    complete(service, engine, "of bob", **BOB)
    for response_id in ("1", "2", "3", "4", "5"):
        complete(service, engine, response_id, **ALICE)
    known = [name for name in ("1", "2", "3", "4", "5") if about(service, name, **ALICE).get("status")]
    assert known and known == ["1", "2", "3", "4", "5"][-len(known) :] and len(known) < 5
    assert about(service, "of bob", **BOB)["status"] == "incomplete"


def test_a_stop_ends_a_background_response(make, engine):
    service = make()
    begin(service)
    engine.listener_of(PROMPT)
    closing = threading.Thread(target=service.close, args=(0,))
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and service.num_open == 0


def test_another_request_cannot_take_the_id_of_a_stored_response(service, engine):
    complete(service, engine, "r")
    again = begin(service, is_background=False, prompt=[3]).final
    assert (again["error_code"], again["error_type"]) == (409, "duplicate_request")
    same = begin(service, is_background=False)
    engine.give(PROMPT, b"b", "length")
    assert same.final["tokens_all"] == "b"
    wait_until(lambda: seen(about(service)) == ("incomplete", "b"))


def text_of(sender):
    return "".join(fields["token"] for fields, _ in sender.sent)


def test_a_client_may_leave_the_stream_of_a_background_response_and_watch_it_again(service, engine):
    first = begin(service, is_streamed=True)
    wait_until(lambda: first.sent)  # before there is a token
    engine.give(PROMPT, b"ab")
    wait_until(lambda: text_of(first) == "ab")
    first.cancelled = True
    assert first.final["error_type"] == "cancelled"
    engine.give(PROMPT, b"cd")
    wait_until(lambda: seen(about(service)) == ("in_progress", "abcd"))
    for num_sent, expected in ((0, "abcd"), (1, "bcd")):
        again = begin(service, is_streamed=True, resume_from=[num_sent])
        wait_until(lambda again=again, expected=expected: text_of(again) == expected)
    engine.give(PROMPT, b"e", "length")
    assert (again.final["tokens_all"], text_of(again)) == ("abcde", "bcde")
    later = begin(service, is_streamed=True, resume_from=[2])
    assert (later.final["tokens_all"], text_of(later)) == ("abcde", "cde")
    assert list(engine.prompts.values()) == [PROMPT]


def test_without_a_watcher_no_responses_are_made(service, engine):
    begin(service)
    reply = wait_until(lambda: service._replies.get("r"))
    assert not reply.streaming
    watcher = begin(service, is_streamed=True, resume_from=[0])
    wait_until(lambda: reply.streaming)
    watcher.cancelled = True
    wait_until(lambda: not reply.streaming)
    engine.give(PROMPT, b"a", "length")


def test_a_watcher_whose_stream_is_broken_does_not_end_the_response(service, engine):
    def break_down(fields, final):
        raise OSError("broken")

    storing = {"about": ABOUT, "is_background": True, "is_streamed": True}
    broken = FakeSender(break_down)
    service.submit(a_payload(req_id="r", input_ids=PROMPT, infer_seed=1, **{wire.STORE: storing}), broken)
    engine.give(PROMPT, b"ab", "length")
    wait_until(lambda: seen(about(service)) == ("incomplete", "ab"))


def test_a_response_that_failed_is_watched_to_its_error(service, engine):
    engine.reason = "the engine has crashed too often"
    assert begin(service).final["status"] in ("queued", "failed")
    wait_until(lambda: about(service)["status"] == "failed")
    assert begin(service, is_streamed=True, resume_from=[0]).final["error_type"] == "engine_unavailable"


@pytest.mark.parametrize(
    "question", [5, {}, {"id": "r"}, {"id": "r", "action": "read"}, {"id": 5.5, "action": wire.RETRIEVE}]
)
def test_a_wrong_question_is_refused(service, question):
    assert answer_to(service, **{wire.STORED: question})["error_code"] == 400


@pytest.mark.parametrize("storing", [5, {}, {"about": 5}, {"about": {}, "is_background": "yes"}])
def test_a_wrong_way_to_store_is_refused(service, storing):
    sender = FakeSender()
    service.submit(a_payload(req_id="r", input_ids=PROMPT, **{wire.STORE: storing}), sender)
    assert sender.final["error_code"] == 400
