"""One request's way back: its tokens become responses, each once, and exactly one of them is the last."""

import itertools
import re
import threading
import time
from types import SimpleNamespace

import pytest

from engine.core.types import Logprobs, Sampling
from engine.errors import EngineUnavailable, NoToken
from engine.serving import reply as reply_module
from engine.serving.choice import RequestState
from engine.serving.input_processor import Prompt
from engine.serving.latency import LatencyStats
from engine.serving.rate_limits import OwnerUsage
from engine.serving.reply import Reply, ReplyCallbacks
from engine.wire import parse_request
from tests.byte_tokenizer import EOS_ID
from tests.patience import PATIENCE_S
from tests.pure.service_fakes import FakeSender


@pytest.fixture
def make(tokenizer):
    """Return a function that makes a reply which records the calls of its callbacks. Its tokens are the bytes of the
    answer.
    """

    def make(sender=None, num_logprobs=-1, **fields):
        request = parse_request({"req_id": "a", "input_ids": [1, 2], **fields})
        prompt = Prompt([1, 2], Sampling(99, seed=5, num_logprobs=num_logprobs), request.best_of or request.n)
        sender = sender or FakeSender()
        calls, cancelled = [], []
        callbacks = ReplyCallbacks(
            enqueue=lambda reply: calls.append("enqueue"),
            on_finished=lambda reply: calls.append("finished"),
            cancel=lambda name, is_complete: cancelled.append(name.removeprefix(f"{reply.engine_id}-")),
        )
        reply = Reply(RequestState.create(request, prompt, tokenizer), sender, 0.0, OwnerUsage(""), callbacks)
        reply.calls, reply.cancelled, reply.sender = calls, cancelled, sender
        reply.listeners = [each.listener for each in reply.submissions()]
        return reply

    return make


def give(reply, text, finish_reason=None, choice=0):
    token_ids = list(text.encode() if isinstance(text, str) else text)
    for index, token_id in enumerate(token_ids, 1):
        reply.listeners[choice].tokens([token_id], None, finish_reason if index == len(token_ids) else None)


def send(reply):
    reply.send_pending(LatencyStats())
    return reply.sender


def test_the_deltas_are_the_answer_and_the_last_one_has_all_of_it(make):
    reply = make()
    for text in ("He", "llo"):
        give(reply, text)
        send(reply)
    give(reply, "!")
    reply.listeners[0].tokens([EOS_ID], None, "stop")
    sender = send(reply)
    assert [fields["token"] for fields, _ in sender.sent] == ["He", "llo", "!"]
    assert [fields["token_ids"] for fields, _ in sender.sent] == [list(b"He"), list(b"llo"), list(b"!")]
    assert [fields["send_idx"] for fields, _ in sender.sent] == [0, 2, 5]
    assert [fields["is_end"] for fields, _ in sender.sent] == [0, 0, 1]
    assert [fields["usage"]["completion_tokens"] for fields, _ in sender.sent] == [2, 5, 7]  # with the stop id
    final = sender.final
    assert (final["tokens_all"], final["tokens_all_ids"], final["tokens_all_num"]) == ("Hello!", list(b"Hello!"), 7)
    assert (final["finish_reason"], final["stop_reason"], final["usage"]["prompt_tokens"]) == ("stop", None, 2)
    assert (final["req_id"], final["infer_seed"], final["return_all_tokens"]) == ("a", 5, False)


def test_an_answer_at_its_limit_keeps_its_last_token(make):
    reply = make()
    give(reply, "abc", "length")
    final = send(reply).final
    assert (final["token"], final["tokens_all_num"], final["finish_reason"]) == ("abc", 3, "length")


def test_an_answer_may_be_empty(make):
    reply = make()
    reply.listeners[0].tokens([EOS_ID], None, "stop")
    final = send(reply).final
    assert (final["token"], final["tokens_all"], final["tokens_all_ids"], final["tokens_all_num"]) == ("", "", [], 1)


def test_tokens_that_come_during_a_send_are_one_response_later(make):
    sender = FakeSender(lambda fields, final: give(reply, "bcd") if fields["token"] == "a" else None)
    reply = make(sender)
    give(reply, "a")
    assert reply.calls == ["enqueue"]
    send(reply)
    assert reply.calls == ["enqueue", "enqueue"]  # once for all three
    send(reply)
    assert [fields["token"] for fields in sender.deltas] == ["a", "bcd"]
    assert reply.calls == ["enqueue", "enqueue"]


def test_a_character_comes_when_it_is_complete_and_a_part_of_one_is_not_lost(make):
    reply = make()
    data = "é".encode() + "世".encode()[:2]
    for index, byte in enumerate(data, 1):
        reply.listeners[0].tokens([byte], None, "length" if index == len(data) else None)
        sender = send(reply)
    assert [fields["token"] for fields, _ in sender.sent] == ["é", "\ufffd"]
    assert [fields["token_ids"] for fields, _ in sender.sent] == [list(data[:2]), list(data[2:])]
    assert sender.final["tokens_all"] == "é\ufffd"


def test_a_stop_string_ends_the_answer_and_is_not_shown(make):
    reply = make(stop=["END", "never"])
    sender = reply.sender
    for text in ("one E", "ND two"):
        give(reply, text)
        send(reply)
    assert [fields["token"] for fields in sender.deltas] == ["one "]
    final = sender.final
    assert (final["tokens_all"], final["finish_reason"], final["stop_reason"]) == ("one ", "stop", "END")
    assert final["tokens_all_num"] == final["usage"]["completion_tokens"] == len(final["tokens_all_ids"]) == 4
    assert reply.calls[-1] == "finished"


@pytest.mark.parametrize(
    ("fields", "token_id", "reason"),
    [
        ({"stop_token_ids": [7]}, 7, 7),
        ({"stop_token_ids": [7]}, EOS_ID, None),
        ({"stop_token_ids": [EOS_ID]}, EOS_ID, None),  # it ends answers anyhow
        ({"stop_token_ids": [EOS_ID], "ignore_eos": True}, EOS_ID, EOS_ID),
    ],
)
def test_the_id_of_the_request_that_ended_the_answer_is_the_reason(make, fields, token_id, reason):
    reply = make(**fields)
    give(reply, "a")
    reply.listeners[0].tokens([token_id], None, "stop")
    final = send(reply).final
    assert (final["tokens_all"], final["finish_reason"], final["stop_reason"]) == ("a", "stop", reason)


def test_a_stop_string_is_shown_when_asked_for(make):
    reply = make(stop="END", include_stop_str_in_output=True)
    give(reply, "one END two")
    assert send(reply).final["tokens_all"] == "one END"


def test_text_that_only_began_like_a_stop_string_is_sent_at_the_end(make):
    reply = make(stop="END")
    give(reply, "one EN", "length")
    final = send(reply).final
    assert (final["tokens_all"], final["finish_reason"], final["tokens_all_num"]) == ("one EN", "length", 6)


@pytest.mark.parametrize(("fields", "num_wakes"), [({}, 2), ({"stop": "?"}, 3)])
def test_without_streaming_there_is_one_response(make, fields, num_wakes):
    reply, num_sends = make(return_all_tokens=True, **fields), 0
    for text in ("ab", "cd"):
        give(reply, text)
        if len(reply.calls) > num_sends:  # for the time of the first token, or to look for the stop string
            num_sends += 1
            send(reply)
    give(reply, "ef", "length")
    final = send(reply).final
    assert len(reply.sender.sent) == 1
    assert (final["token"], final["tokens_all"], final["send_idx"]) == ("abcdef", "abcdef", 0)
    assert final["token_ids"] == final["tokens_all_ids"] == list(b"abcdef")
    assert reply.calls == ["enqueue"] * num_wakes + ["finished"]


@pytest.mark.parametrize("return_all_tokens", [False, True])
def test_the_time_to_the_first_token_is_measured_with_and_without_streaming(make, return_all_tokens, monkeypatch):
    clock, latency = iter(range(100, 1000)), LatencyStats()
    monkeypatch.setattr(reply_module.time, "time", lambda: float(next(clock)))
    reply = make(return_all_tokens=return_all_tokens)
    for reason in (None, None, "length"):
        before = len(reply.calls)
        give(reply, "a", reason)
        if len(reply.calls) > before:
            reply.send_pending(latency)
    assert sum(latency.time_to_first_token.counts) == 1
    assert sum(latency.inter_token.counts) == 2
    assert latency.inter_token.sum_s > 0


def test_logprobs_come_with_their_tokens(make):
    reply = make(num_logprobs=1)
    reply.listeners[0].tokens([65], [Logprobs(-0.5, ((66, -0.25),))], None)
    send(reply)
    reply.listeners[0].tokens([66], [Logprobs(float("-inf"), ())], None)
    reply.listeners[0].tokens([66], [Logprobs(float("nan"), ())], None)
    reply.listeners[0].tokens([EOS_ID], [Logprobs(0.0)], "stop")
    first, last = (fields["logprobs"] for fields, _ in send(reply).sent)
    top = [{"token_id": 66, "token": "B", "bytes": [66], "logprob": -0.25}]
    assert first == [{"token_id": 65, "token": "A", "bytes": [65], "logprob": -0.5, "top": top}]
    assert last == [{"token_id": 66, "token": "B", "bytes": [66], "logprob": -9999.0, "top": []}] * 2


def test_timings_are_returned_on_request(make, monkeypatch):
    ticks = itertools.count(100)  # a second each time somebody looks
    monkeypatch.setattr(reply_module, "time", SimpleNamespace(**vars(time) | {"time": lambda: next(ticks)}))
    reply = make(benchmark=True)
    for text, finish_reason in (("a", None), ("b", "length")):
        give(reply, text, finish_reason)
        send(reply)
    names = ("preprocess_start_time", "preprocess_end_time", "schedule_start_time", "inference_current_step_time")
    for fields, _ in reply.sender.sent:
        assert all(re.fullmatch(r"[0-9-]{10} [0-9:]{8}\.[0-9]{6}", fields[name]) for name in names)
        assert fields["preprocess_start_time"] < fields["preprocess_end_time"] < fields["inference_current_step_time"]
    first, last = [fields for fields, _ in reply.sender.sent]
    assert first["inference_start_time"] == last["inference_start_time"] == "101"
    assert (first["inference_time_cost"], last["inference_time_cost"]) == (2, 5)


def test_a_token_without_logprobs_is_named_alone(make):
    reply = make(num_logprobs=0)
    give(reply, "A", "length")
    assert send(reply).final["logprobs"] == [{"token_id": 65}]


def test_a_token_without_text_is_sent_too(make):
    reply = make()
    reply.listeners[0].tokens([EOS_ID], None, None)  # as `ignore_eos` has it
    [fields] = send(reply).deltas
    assert (fields["token"], fields["token_ids"]) == ("", [EOS_ID])
    send(reply)
    assert len(reply.sender.sent) == 1


def test_an_error_is_the_last_response(make):
    reply = make()
    give(reply, "ab")
    send(reply)
    give(reply, "cd")
    reply.listeners[0].ended(EngineUnavailable("the engine has crashed"))
    final = send(reply).final
    assert (final["error_msg"], final["error_code"], final["req_id"]) == ("the engine has crashed", 503, "a")
    assert (final["is_end"], final["token"], final["send_idx"]) == (1, "", 2)
    assert (final["usage"], final["infer_seed"]) == ({"prompt_tokens": 2, "completion_tokens": 2}, 5)
    assert [fields["token"] for fields in reply.sender.deltas] == ["ab"]


def test_after_its_end_nothing_wakes_it_and_nothing_is_sent(make):
    reply = make()
    give(reply, "ab", "length")
    send(reply)
    give(reply, "cd", "stop")
    reply.listeners[0].ended(EngineUnavailable("late"))
    assert not reply.end_if_cancelled()
    send(reply)
    assert reply.calls == ["enqueue", "finished"]
    assert reply.sender.final["tokens_all"] == "ab"


def test_a_cancelled_request_ends_once(make):
    sender = FakeSender()
    reply = make(sender)
    assert not reply.end_if_cancelled()
    sender.cancelled = True
    assert reply.end_if_cancelled()
    assert not reply.end_if_cancelled()
    assert send(reply).final["error_type"] == "cancelled"


def test_a_stream_that_cannot_be_asked_is_ended(make):
    reply = make()
    reply.sender.is_cancelled = lambda: 1 // 0
    assert reply.end_if_cancelled()
    assert send(reply).final["error_msg"] == "internal error: ZeroDivisionError"


def test_a_delta_that_cannot_be_sent_ends_the_request_with_a_final_response(make):
    reply = make(FakeSender(lambda fields, final: None if final else 1 // 0))
    give(reply, "ab")
    final = send(reply).final
    assert (final["error_code"], final["error_msg"]) == (500, "internal error: ZeroDivisionError")
    assert reply.calls == ["enqueue", "finished"]


def test_a_final_response_that_cannot_be_sent_is_not_tried_again(make):
    sender = FakeSender(lambda fields, final: 1 // 0)
    reply = make(sender)
    give(reply, "ab", "length")
    send(reply)
    send(reply)
    assert (sender.sent, sender.misuses) == ([], [])
    assert reply.calls == ["enqueue", "finished"]


def test_a_slow_final_response_delays_no_other_request(make):
    def during_the_final(fields, final):
        other = threading.Thread(target=lambda: (give(reply, "late"), reply.end_if_cancelled()))
        other.start()
        other.join(PATIENCE_S)
        were_free.append(not other.is_alive())

    were_free = []
    reply = make(FakeSender(during_the_final), stop="!")
    give(reply, "ab!")
    assert send(reply).final["tokens_all"] == "ab"
    assert were_free == [True]


# --- several choices


def test_choices_stream_side_by_side_and_the_last_line_of_the_request_alone_is_its_end(make):
    reply = make(n=3)
    for choice, text in ((2, "x"), (0, "ab")):
        give(reply, text, choice=choice)
    send(reply)
    give(reply, "y", "length", choice=2)
    send(reply)
    give(reply, "c", "length", choice=0)
    give(reply, "z", choice=1)
    send(reply)
    give(reply, "!", "length", choice=1)
    sent = [fields for fields, _ in send(reply).sent]
    assert [(fields["index"], fields["token"], fields["send_idx"], fields["is_end"]) for fields in sent] == [
        (2, "x", 0, 0),
        (0, "ab", 0, 0),
        (2, "y", 1, 0),
        (0, "c", 2, 0),
        (1, "z", 0, 0),
        (1, "!", 1, 1),
    ]
    finals = {fields["index"]: fields for fields in sent if "finish_reason" in fields}
    assert [finals[index]["tokens_all"] for index in range(3)] == ["abc", "z!", "xy"]
    assert [finals[index]["usage"] for index in range(3)] == [
        {"prompt_tokens": 2, "completion_tokens": count} for count in (3, 2, 2)
    ]
    assert [finals[index]["infer_seed"] for index in range(3)] == [5, 6, 7]
    assert reply.sender.final["index"] == 1
    assert reply.calls.count("finished") == 1


def test_without_streaming_each_choice_is_one_response(make):
    reply = make(n=2, return_all_tokens=True)
    for choice in (1, 0):
        give(reply, "ab", choice=choice)
        send(reply)
        give(reply, "c", "length", choice=choice)
        send(reply)
    sent = [(fields["index"], fields["token"], fields["is_end"]) for fields, _ in reply.sender.sent]
    assert sent == [(1, "abc", 0), (0, "abc", 1)]


def test_a_stop_string_ends_its_choice_alone_and_the_engine_learns_of_it(make):
    reply = make(n=2, stop="!")
    give(reply, "a!b", choice=0)
    give(reply, "xy", choice=1)
    send(reply)
    assert reply.cancelled == ["0"]
    assert "finished" not in reply.calls
    give(reply, "late", "length", choice=0)  # was on its way
    give(reply, "z", "length", choice=1)
    finals = [fields for fields, _ in send(reply).sent if "finish_reason" in fields]
    assert [(fields["index"], fields["tokens_all"], fields["finish_reason"]) for fields in finals] == [
        (0, "a", "stop"),
        (1, "xyz", "length"),
    ]
    assert reply.sender.final["is_end"] == 1


def test_tokens_of_a_candidate_that_a_stop_string_has_ended_end_the_request_no_second_time(make):
    reply = make(best_of=2, stop=".")
    give(reply, "b.", choice=1)
    send(reply)
    give(reply, "a", "length", choice=0)
    give(reply, "cd", choice=1)  # was in flight
    assert [(fields["token"], is_final) for fields, is_final in send(reply).sent] == [("a", True)]
    assert reply.calls.count("finished") == 1


def test_an_error_of_one_choice_ends_the_request_once(make):
    reply = make(n=3)
    give(reply, "ab", "length", choice=0)
    give(reply, "c", choice=1)
    latency = LatencyStats()
    reply.send_pending(latency)
    reply.listeners[2].ended(NoToken())
    give(reply, "d", choice=1)
    reply.listeners[1].ended(EngineUnavailable("second"))
    reply.send_pending(latency)
    final = send(reply).final
    assert (final["error_type"], final["is_end"], final["send_idx"]) == ("internal", 1, 3)
    assert final["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert latency.num_ended == {"length": 1, "internal": 1}


def test_a_client_that_leaves_ends_all_choices(make):
    reply = make(n=2)
    give(reply, "ab", choice=1)
    send(reply)
    reply.sender.cancelled = True
    assert reply.end_if_cancelled()
    reply.cancel_all()
    assert reply.cancelled == ["0", "1"]
    give(reply, "c", choice=0)
    assert send(reply).final["error_type"] == "cancelled"


def test_each_choice_has_its_own_latencies(make, monkeypatch):
    clock, latency = iter(range(1, 1000)), LatencyStats()
    monkeypatch.setattr(reply_module.time, "time", lambda: float(next(clock)))
    reply = make(n=2)
    for choice in (0, 1):
        for reason in (None, "length"):
            give(reply, "a", reason, choice)
            reply.send_pending(latency)
    assert sum(latency.time_to_first_token.counts) == sum(latency.inter_token.counts) == 2
    assert (sum(latency.request.counts), latency.num_ended) == (2, {"length": 2})
