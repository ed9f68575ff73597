"""The service between clients and engine: whatever happens, every request gets exactly one final response."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from engine import wire
from engine.errors import EngineUnavailable
from engine.serving import reply as reply_module
from engine.serving import service as service_module
from engine.serving.input_processor import InputProcessor
from tests.byte_tokenizer import EOS_ID
from tests.patience import PATIENCE_S, wait_until
from tests.pure.service_fakes import FakeSender, a_payload, answer_to


def test_a_request_is_answered_as_its_tokens_come(service, engine):
    sender = service.ask([1, 2])
    engine.give([1, 2], b"ab")
    wait_until(lambda: sender.sent)
    engine.give([1, 2], b"cd", "length")
    assert sender.final["tokens_all"] == "abcd"
    assert "".join(fields["token"] for fields, _ in sender.sent) == "abcd"
    assert service.num_open == 0
    assert engine.cancelled == []
    assert service.latency.num_ended == {"length": 1}


@pytest.mark.parametrize(("max_dec_len", "reported"), [(50, None), (51, 50)])
def test_the_first_response_tells_to_what_the_length_of_the_answer_was_reduced(service, engine, max_dec_len, reported):
    sender = service.ask([1, 2], max_dec_len=max_dec_len, cut_max_dec_len=True)
    engine.give([1, 2], b"ab")
    wait_until(lambda: sender.sent)
    engine.give([1, 2], b"cd", "length")
    assert sender.final["finish_reason"] == "length"
    assert [fields.get("max_dec_len") for fields, _ in sender.sent] == [reported, None]


@pytest.mark.parametrize(
    ("payload", "req_id", "code"),
    [
        (b"[{", None, 400),
        (b"[]", None, 400),
        (b"\xff", None, 400),
        (a_payload(text="no id"), None, 400),
        (a_payload(req_id="a"), "a", 400),
        (a_payload(req_id="a", text="x", topp=7), "a", 400),
        (a_payload(req_id="a", input_ids=[1] * 81), "a", 400),
        (a_payload(req_id="a", input_ids=[400]), "a", 400),
        (a_payload(req_id="a", messages=[{"role": "user", "content": "x", "name": "\ud800"}], topp=9), "a", 400),
    ],
)
def test_bad_input_gets_one_failure_and_the_service_goes_on(service, engine, payload, req_id, code):
    sender = FakeSender()
    service.submit(payload, sender)
    assert (sender.final["error_code"], sender.final["req_id"], len(sender.sent)) == (code, req_id, 1)
    after = service.ask()
    engine.give([1, 2], b"a", "length")
    assert after.final["tokens_all"] == "a"


def test_a_request_of_too_many_bytes_is_refused_unread(make):
    service, sender = make(max_body_bytes=1000), FakeSender()
    service.submit(b"[" * 70_000, sender)
    assert sender.final["error_code"] == 400
    message = "The request has 70000 bytes with what the gateway has added, at most 67536 are taken"
    assert sender.final["error_msg"] == message


def test_a_body_of_the_largest_size_is_taken_with_what_the_gateway_adds_to_it(make, engine):
    service, sender = make(max_body_bytes=1000), FakeSender()
    service.submit(a_payload(req_id="a", input_ids=[1], user="u" * 1000), sender)
    engine.give([1], b"a", "length")
    wait_until(lambda: sender.sent)
    assert sender.final["tokens_all"] == "a"


def test_more_requests_than_the_engine_takes_are_refused_before_their_tokens_are_found(make, engine, monkeypatch):
    service = make(max_running=1, max_waiting=0)
    first = service.ask([1])
    engine.listener_of([1])
    monkeypatch.setattr(InputProcessor, "process", None)
    second = service.ask([2], req_id="b")
    assert second.final["error_code"] == 429
    assert second.final["error_msg"] == "0 requests are waiting, at most MAX_CACHED_TASK_NUM(0) may"
    monkeypatch.undo()
    engine.give([1], b"x", "length")
    assert first.final["tokens_all"] == "x"
    third = service.ask([3])
    engine.give([3], b"x", "length")
    assert third.final["tokens_all"] == "x"


def test_more_waiting_tokens_than_the_engine_takes_are_refused_before_tokens_are_found(make, engine, monkeypatch):
    service = make(max_waiting_tokens=1000)
    engine.stats["num_waiting_tokens"] = 1000
    monkeypatch.setattr(InputProcessor, "process", None)
    final = service.ask().final
    assert (final["error_code"], final["error_msg"]) == (
        429,
        "1000 tokens of prompts are waiting, at most MAX_WAITING_TOKENS(1000) may",
    )


@pytest.fixture
def pass_time(monkeypatch):
    """Return a function that lets a number of seconds pass for open requests."""
    passed_s = [0.0]
    clock = SimpleNamespace(time=lambda: time.time() + passed_s[0])
    monkeypatch.setattr(reply_module, "time", clock)
    return lambda seconds: passed_s.append(passed_s.pop() + seconds)


def test_a_request_that_gets_no_token_within_its_timeout_ends_with_504_wherever_it_waits(service, engine, pass_time):
    late, patient = service.ask([1], "late", timeout=0.05), service.ask([2], "patient", timeout=0)
    assert late.final["error_code"] == 504
    assert late.final["error_msg"] == "the model sent no response for 0.05 s, the request is cancelled"
    wait_until(lambda: len(engine.cancelled) == 1)
    begun = service.ask([3], "begun", timeout=60)
    engine.give([3], b"a")
    wait_until(lambda: begun.sent)
    pass_time(100)
    time.sleep(0.02)  # it is asked all the time whether it is late
    engine.give([3], b"b", "length")
    assert begun.final["tokens_all"] == "ab"
    engine.give([2], b"x", "length")
    assert patient.final["tokens_all"] == "x"


def test_a_request_that_has_waited_for_too_long_is_ended_by_the_engine_with_429(make, engine, pass_time):
    service = make(queue_timeout_s=60.0)
    begun = service.ask([1], "begun")
    engine.give([1], b"a")
    wait_until(lambda: begun.sent)
    pass_time(100)
    final = service.ask([2], "waits").final
    assert (final["error_code"], final["error_msg"]) == (
        429,
        "the request has waited for 60 s, which is QUEUE_TIMEOUT",
    )
    assert len(set(engine.asked_to_expire)) == 1  # it may be asked again before it has answered
    engine.give([1], b"b", "length")
    assert begun.final["tokens_all"] == "ab"


def test_an_aborted_request_ends_with_499_and_the_engine_forgets_it(service, engine):
    running = service.ask([1], "a")
    engine.give([1], b"x")
    assert answer_to(service, abort="a") == {"is_end": 1, "req_id": "a", "aborted": True}
    assert (running.final["error_code"], running.final["error_msg"]) == (499, "the request was aborted")
    wait_until(lambda: engine.listeners == {})
    wait_until(lambda: service.num_open == 0)
    assert answer_to(service, abort="a")["aborted"] is False
    assert answer_to(service, abort="")["error_code"] == 400


def test_a_named_owner_ends_its_own_requests_only(service, engine):
    running = service.ask([1], "a", _owner={"name": "alice"})
    engine.listener_of([1])
    assert answer_to(service, abort="a", _owner={"name": "bob"})["aborted"] is False
    assert not running.is_over
    assert answer_to(service, abort="a", _owner={"name": "alice"})["aborted"] is True
    assert running.final["error_code"] == 499


def test_an_owner_has_no_more_requests_at_once_than_allowed_and_others_are_not_held_up(service, engine):
    alice = {"name": "alice", "max_requests": 1}
    first, second = service.ask([1], "1", _owner=alice), None
    engine.listener_of([1])
    second, other = service.ask([2], "2", _owner=alice).final, service.ask([3], "3", _owner={"name": "bob"})
    assert (second["error_code"], second["retry_after"]) == (429, 1)
    assert second["error_msg"] == "1 requests of alice are open, at most 1 may be"
    for prompt in ([1], [3]):
        engine.give(prompt, b"x", "length")
    assert first.final["tokens_all"] == other.final["tokens_all"] == "x"
    refused = service.ask([400], "4", _owner=alice).final  # counted as open only while it is looked at
    assert refused["error_code"] == 400
    third = service.ask([5], "5", _owner=alice)
    engine.give([5], b"x", "length")
    assert third.final["tokens_all"] == "x"


def test_the_engine_gets_the_queue_position_and_an_api_key_cannot_be_made_more_urgent(service, engine):
    for number, (priority, owner) in enumerate([(-3, {}), (-3, {"name": "a", "priority": 1}), (2, {"name": "a"})]):
        sender = service.ask([number + 1], str(number), priority=priority, **({"_owner": owner} if owner else {}))
        engine.give([number + 1], b"x", "length")
        assert sender.final
    assert engine.queue_positions == [("", -3), ("a", 1), ("a", 2)]


def test_a_machine_that_only_holds_ranks_refuses_and_names_the_one_that_serves(make, engine):
    why = "this host holds ranks 2 and 3 of the model; requests are served by 10.0.0.1"
    service = make(why_not_served=why)
    final = service.ask().final
    assert (final["error_msg"], final["error_code"]) == (why, 503)
    assert engine.prompts == {}
    sender = FakeSender()
    service.submit(b'{"probe": true}', sender)
    assert sender.final["ready"] is True


def test_a_bug_in_the_intake_gets_one_failure_and_leaves_nothing(service, monkeypatch, engine):
    monkeypatch.setattr(service_module, "Reply", lambda *args: 1 // 0)
    assert service.ask().final["error_msg"] == "internal error: ZeroDivisionError"
    monkeypatch.undo()
    engine.on_submit = lambda: 1 // 0
    assert service.ask().final["error_code"] == 500
    assert service.num_open == 0


def test_a_req_id_is_open_once_and_free_again_with_the_final_response(service, engine):
    again = []

    def before_send(fields, final):
        if final:
            again.append(service.ask([3]))
            engine.give([3], b"z", "length")
            assert again[0].final["tokens_all"] == "z"

    first = service.ask([1], before_send=before_send)
    engine.listener_of([1])
    second = service.ask([2])
    assert second.final["error_code"] == 409
    assert second.final["error_msg"] == (
        'The req_id "a" already exists in the current batch, the current request will be ignored.'
    )
    engine.give([1], b"x", "length")
    assert first.final["tokens_all"] == "x"
    assert len(again) == 1


def test_tokens_of_an_ended_request_do_not_reach_the_next_with_its_req_id(service, engine):
    first = service.ask([1], stop="!")
    name, stale = engine.listener_of([1])
    engine.give([1], b"x!")
    assert first.final["finish_reason"] == "stop"
    assert engine.cancelled == [name]
    second = service.ask([2])
    engine.listener_of([2])
    stale.tokens([ord("y")], None, "length")  # was on its way
    engine.give([2], b"z", "length")
    assert second.final["tokens_all"] == "z"


def test_tokens_that_arrive_during_a_slow_send_are_merged_and_no_other_request_waits(service, engine):
    gate, entered = threading.Event(), threading.Event()
    slow = service.ask([1], "slow", before_send=lambda fields, final: (entered.set(), gate.wait(PATIENCE_S)))
    engine.give([1], b"a")
    assert entered.wait(PATIENCE_S)
    engine.give([1], b"bcde")
    quick = service.ask([2], "quick")
    engine.give([2], b"xyz", "length")
    assert quick.final["tokens_all"] == "xyz"
    engine.give([1], b"fg", "length")
    gate.set()
    assert slow.final["tokens_all"] == "abcdefg"
    assert [fields["token"] for fields, _ in slow.sent] == ["a", "bcdefg"]


class Lines:
    """A shared stream's sender."""

    def __init__(self):
        self.sent = []  # tag, fields
        self.num_finals = 0

    def send(self, payload, final):
        assert not self.num_finals
        self.sent += [(tag, answer.fields()) for tag, answer in wire.read_shared(payload).answers]
        self.num_finals += final

    def is_cancelled(self):
        assert not self.num_finals
        return False


def test_requests_that_share_a_stream_have_their_last_responses_on_their_own(make, engine):
    service, shared = make(), Lines()
    service.submit(a_payload(**{wire.SHARE: "s"}), shared)
    wait_until(lambda: service._shared._streams)
    first = service.ask([1], "first", **{wire.SHARED: ["s", 7]})
    second = service.ask([2], "second", **{wire.SHARED: ["s", 8]})
    stranger = service.ask([3], "third", **{wire.SHARED: ["another", 7]})
    for prompt in ([1], [2], [3]):
        engine.give(prompt, b"a")
    wait_until(lambda: len(shared.sent) == 2 and stranger.sent)
    for prompt in ([1], [2], [3]):
        engine.give(prompt, b"b", "length")
    assert {(tag, fields["req_id"], fields["token"]) for tag, fields in shared.sent} == {
        (7, "first", "a"),
        (8, "second", "a"),
    }
    for sender in (first, second, stranger):
        assert (sender.final["tokens_all"], sender.final["send_idx"]) == ("ab", 1)
    assert [len(sender.sent) for sender in (first, second, stranger)] == [1, 1, 2]
    service.close(0)
    assert shared.num_finals == 1


def test_shared_deltas_are_sent_however_busy_the_senders_are(make, engine, monkeypatch):
    class Busy(queue.SimpleQueue):
        def empty(self):
            return False

    monkeypatch.setattr(service_module, "queue", SimpleNamespace(SimpleQueue=Busy))
    monkeypatch.setattr(service_module, "MAX_REPLIES_PER_FLUSH", 3)
    monkeypatch.setattr(service_module, "NUM_SENDER_THREADS", 1)
    service, shared = make(), Lines()
    service.submit(a_payload(**{wire.SHARE: "s"}), shared)
    wait_until(lambda: service._shared._streams)
    senders = [service.ask([n], f"{n}", **{wire.SHARED: ["s", n]}) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        engine.give([n], b"a")
    wait_until(lambda: len(shared.sent) == 3)
    for n, sender in enumerate(senders, 1):
        engine.give([n], b"b", "length")
        assert sender.final["tokens_all"] == "ab"


def test_two_requests_of_one_place_are_answered_both(service, engine):
    senders = [service.ask([n], f"{n}", **{wire.SHARED: ["s", 7]}) for n in (1, 2)]
    for n in (1, 2):
        engine.give([n], b"a", "length")
    assert [sender.final["tokens_all"] for sender in senders] == ["a", "a"]


@pytest.mark.parametrize("place", [7, ["s"], ["s", "7"], [[], 7], {"s": 7}])
def test_a_request_with_a_malformed_share_is_answered_on_its_own_stream(service, engine, place):
    sender = service.ask([1], **{wire.SHARED: place})
    engine.give([1], b"a", "length")
    assert sender.final["tokens_all"] == "a"


def test_a_client_that_leaves_cancels_its_request(service, engine):
    sender = service.ask([1])
    name, _ = engine.listener_of([1])
    engine.give([1], b"ab")
    sender.cancelled = True
    assert sender.final["error_type"] == "cancelled"
    assert engine.cancelled == [name]
    assert service.num_open == 0


@pytest.mark.slow
def test_a_question_that_took_long_does_not_put_off_the_next_one_for_long(service, engine):
    sender = service.ask([1])
    asked = threading.Event()

    def slowly():
        time.sleep(1)  # of which CANCEL_POLL_SHARE is more than a minute's
        asked.set()
        sender.is_cancelled = lambda: True
        return False

    sender.is_cancelled = slowly
    assert asked.wait(PATIENCE_S)
    assert sender.final["error_type"] == "cancelled"  # well before PATIENCE_S


def test_a_client_that_leaves_frees_its_blocks_even_if_every_sender_is_busy(service, engine):
    gate, entered = threading.Event(), threading.Semaphore(0)
    for n in range(service_module.NUM_SENDER_THREADS):
        service.ask([n], f"slow {n}", before_send=lambda fields, final: (entered.release(), gate.wait(PATIENCE_S)))
        engine.give([n], b"a", "length")
        assert entered.acquire(timeout=PATIENCE_S)
    sender = service.ask([9])
    name, _ = engine.listener_of([9])
    sender.cancelled = True
    wait_until(lambda: engine.cancelled == [name])
    assert not sender.is_over
    gate.set()


def test_a_client_that_leaves_before_the_engine_knows_its_request_leaves_nothing_there(service, engine):
    def leave():
        sender.cancelled = True
        wait_until(lambda: sender.is_over)

    engine.on_submit = leave
    sender = FakeSender()
    service.submit(a_payload(req_id="a", input_ids=[1]), sender)
    assert sender.final["error_type"] == "cancelled"
    wait_until(lambda: engine.prompts and not engine.listeners)


@pytest.mark.parametrize("fails_at", ["delta", "final"])
def test_a_stream_that_breaks_ends_its_request_alone(service, engine, fails_at):
    sender = FakeSender(lambda fields, final: 1 // 0 if final == (fails_at == "final") else None)
    service.submit(a_payload(req_id="broken", input_ids=[1]), sender)
    other = service.ask([2])
    name, _ = engine.listener_of([1])
    engine.give([1], b"ab", "length" if fails_at == "final" else None)
    wait_until(lambda: service.num_open == 1)
    engine.give([2], b"c", "length")
    assert other.final["tokens_all"] == "c"
    assert sender.misuses == []
    wait_until(lambda: engine.cancelled == ([] if fails_at == "final" else [name]))


@pytest.mark.parametrize(("options", "fields"), [({"streaming": False}, {}), ({}, {"return_all_tokens": True})])
def test_without_streaming_only_the_final_response_is_sent(make, engine, options, fields):
    sender = make(**options).ask([1], **fields)
    engine.give([1], b"abc")
    engine.give([1], [EOS_ID], "stop")
    assert sender.final["token"] == "abc"
    assert len(sender.sent) == 1


def test_an_engine_that_is_gone_refuses_at_once(service, engine):
    engine.reason = "the engine has crashed 3 times in a row"
    final = service.ask().final
    assert (final["error_code"], final["error_msg"]) == (503, engine.reason)


def test_an_error_of_the_engine_is_the_final_response(service, engine):
    sender = service.ask([1])
    _, listener = engine.listener_of([1])
    engine.give([1], b"ab")
    listener.ended(EngineUnavailable("gone"))
    assert sender.final["error_msg"] == "gone"
    assert service.latency.num_ended == {"engine_unavailable": 1}
