"""The book of the storm's oracle: what counts as right, wrong and lost, who is blamed for what; and what a leak is."""

import itertools
import math

import pytest

from benchmarks.storm.ledger import PAUSE_S, Ledger, Part, Right
from benchmarks.storm.watch import Sample, growth

RIGHT = Right((1, 2, 3), "abc", "length")
FIRST, SECOND, LAST = Part("a", (1,), 0), Part("b", (2,), 1), Part("c", (3,), 2, "length")


def outcome_of(*parts, outcome="cut"):
    ledger = Ledger()
    attempt = ledger.begin(RIGHT, 0.0)
    for part in parts:
        attempt.take(part, 0.0)
    return ledger.end(attempt, 0.0, outcome), attempt.why_wrong


@pytest.mark.parametrize(
    "parts",
    [
        [FIRST, SECOND, LAST],
        [FIRST, Part("bc", (2, 3), 1, "length")],
        [Part("abc", (1, 2, 3), 0, "length")],
        [Part("ab"), Part("c", finish_reason="length")],
    ],
    ids=["one by one", "merged", "whole", "without tokens"],
)
def test_the_right_answer_is_right_in_whatever_parts_it_comes(parts):
    assert outcome_of(*parts) == ("right", "")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([FIRST, LAST], "send_idx is 2 after 1 tokens"),
        ([FIRST, FIRST], "send_idx is 0 after 1 tokens"),
        ([FIRST, Part("b", (9,), 1)], "another token within the first 2"),
        ([FIRST, Part("x", (2,), 1)], "another text within the first 2 characters"),
        ([FIRST, Part("b", (2,), 1, "length")], "the end, length, after 2 characters"),
        ([FIRST, SECOND, LAST._replace(finish_reason="stop")], "the end, stop, after 3 characters"),
        ([Part("abc", (1, 2), 0, "length")], "the end, length, after 3 characters"),
        ([Part("ab", finish_reason="length")], "the end, length, after 2 characters"),
        ([FIRST, SECOND, LAST, LAST._replace(text="", token_ids=(), send_idx=3)], "something came after the end"),
        ([FIRST, SECOND, LAST, Part(error="internal")], "something came after the end"),
        ([FIRST, Part(error="internal"), SECOND], "something came after the end"),
        ([*[FIRST, Part("b", (9,), 1)], LAST], "another token within the first 2"),
    ],
)
def test_an_answer_that_differs_is_wrong_and_says_where(parts, why):
    assert outcome_of(*parts) == ("wrong", why)


def test_an_answer_without_its_end_is_what_its_client_says():
    assert outcome_of(FIRST) == ("cut", "")
    assert outcome_of(FIRST, outcome="left") == ("left", "")
    assert outcome_of(FIRST, Part(error="timeout")) == ("error", "")


def test_a_disturbance_is_blamed_for_what_was_open_and_for_what_was_refused_after_it():
    ledger = Ledger()
    early = ledger.begin(RIGHT, 0.0)
    ledger.end(early, 1.0, "cut")
    paused, quick, whole, failed, cut = (ledger.begin(RIGHT, 9.8, n != 2) for n in range(5))
    ledger.strike("kill stub", 10.0)
    quick.take(FIRST, 10.1)
    paused.take(FIRST, 10.3 + PAUSE_S)
    failed.take(Part(error="engine_unavailable"), 10.1)
    whole.take(Part("abc", (1, 2, 3), 0, "length"), 20.0)  # says nothing of pauses
    for attempt in (paused, quick, whole, failed, cut):
        ledger.end(attempt, 11.0, "cut" if attempt is cut else "left")
    crowded = ledger.begin(RIGHT, 11.0)
    crowded.take(Part(error="overloaded"), 11.1)
    for attempt in (crowded, ledger.begin(RIGHT, 11.0)):
        ledger.end(attempt, 12.0, "cut")
    effects = ledger.report()["effects"]
    assert effects["nothing"]["refused"] == 1
    assert effects["kill stub"] == {
        **{"times": 1, "open": 5, "paused": 1, "error": 1, "cut": 1, "refused": 1},
        "longest_s": pytest.approx(0.5 + PAUSE_S),
    }


def test_a_request_struck_twice_is_counted_with_both_disturbances():
    ledger = Ledger()
    attempt = ledger.begin(RIGHT, 0.0)
    ledger.strike("kill engine", 1.0)
    ledger.strike("stop engine", 5.0)
    ledger.end(attempt, 5.1, "cut")
    first, second = ledger.effects["kill engine"], ledger.effects["stop engine"]
    assert (first.open, first.paused, first.cut, first.longest_s) == (1, 1, 0, 5.0)
    assert (second.open, second.paused, second.cut) == (1, 0, 1)


def test_the_longest_waits_are_reported_with_their_disturbances():
    ledger = Ledger()
    quick, slow = ledger.begin(RIGHT, 0.0, name="whole a"), ledger.begin(RIGHT, 1.0, name="native stream b")
    quick.take(Part("abc", (1, 2, 3), 0, "length"), 2.0)
    ledger.end(quick, 2.0, "cut")
    slow.take(FIRST, 2.0)
    ledger.strike("kill stub", 2.5)
    slow.take(Part(error="engine_unavailable"), 3.0)
    ledger.end(slow, 3.0, "cut")
    ledger.strike("kill engine", 9.0)
    again = ledger.begin(RIGHT, 3.5, before=slow, name="native stream b")
    again.take(SECOND, 6.0)
    again.take(LAST, 6.5)
    ledger.end(again, 6.5, "cut")
    assert ledger.report()["slowest"][:2] == [
        "4.0 s without a part, native stream b: kill stub at 0.5 s",
        "2.0 s without a part, whole a: no disturbance",
    ]


def broken_by(kind, error="", outcome="cut"):
    ledger = Ledger()
    attempt = ledger.begin(RIGHT, 0.0)
    ledger.strike(kind, 1.0)
    if error:
        attempt.take(Part(error=error), 1.0)
    ledger.end(attempt, 1.0, outcome)
    return ledger.broken_promises()


def test_only_the_end_of_a_gateway_cuts_a_stream():
    assert broken_by("kill engine", outcome="left") == []
    assert broken_by("kill engine") == ["more than a pause: 1 attempts were cut, errors {}"]
    assert broken_by("stop rank", "internal") == ["more than a pause: 0 attempts were cut, errors {'internal': 1}"]
    assert broken_by("kill engine", "overloaded") == []
    assert broken_by("kill gateway") == []
    assert broken_by("kill tritonserver", "engine_unavailable") != []


def test_an_attempt_goes_on_after_the_one_before():
    ledger = Ledger()
    first = ledger.begin(RIGHT, 0.0)
    first.take(Part(RIGHT.text[:1], RIGHT.token_ids[:1], 0, event_id="1"), 1.0)
    ledger.end(first, 1.0, "cut")
    again = ledger.begin(RIGHT, 2.0, before=first)
    assert (again.token_ids, again.event_id) == ([RIGHT.token_ids[0]], "1")
    again.take(Part(RIGHT.text[1:], RIGHT.token_ids[1:], 1, RIGHT.finish_reason), 3.0)
    assert ledger.end(again, 3.0, "cut") == "right"


def test_a_lost_or_wrong_answer_is_broken_whatever_was_killed():
    ledger = Ledger()
    ledger.strike("kill supervisor", 0.0)
    ledger.settle("right", tries=3)
    ledger.settle("lost")
    ledger.settle("wrong", why="another token")
    assert ledger.broken_promises() == ["1 requests are lost", "1 requests are wrong"]
    assert ledger.report()["requests"] == {"right": 1, "asked again": 1, "lost": 1, "wrong": 1}
    assert ledger.report()["wrong"] == ["another token"]


def samples(ends, mb_of):
    """Return samples of a process every two seconds. The process restarts at each of `ends`; `mb_of` is a function of
    the second and the process's age.
    """
    return [
        Sample(at_s, at_s - began, mb_of(at_s, at_s - began))
        for began, end in itertools.pairwise([-5, *ends])
        for at_s in range(max(0, began + 1), end, 2)
    ]


NEVER, OFTEN = [400], [*range(8, 160, 8), *range(160, 401, 30)]  # the latter lives longer in the second half


def warm_up(age_s):
    return 60 + 20 * (1 - math.exp(-age_s / 10))


@pytest.mark.parametrize("ends", [NEVER, OFTEN, [40, *NEVER], [150, *NEVER], [390, *NEVER]])
def test_memory_grows_when_it_does_at_the_same_age_and_not_when_a_process_is_older_than_those_before(ends):
    assert growth(samples(ends, lambda at_s, age_s: warm_up(age_s)))[2] == pytest.approx(0, abs=0.01)
    _, _, left_behind = growth(samples(ends, lambda at_s, age_s: warm_up(age_s) + 0.05 * at_s))
    assert left_behind > 0.04


def test_one_leak_of_two_processes_shows_and_what_is_watched_too_shortly_has_not_grown():
    steady, leaking = (samples(NEVER, lambda at_s, age_s, leak=leak: 80 + leak * age_s) for leak in (0, 0.05))
    before, after, grown = growth(samples(OFTEN, lambda at_s, age_s: warm_up(age_s)) + leaking)
    assert (before, after, grown) == (
        pytest.approx(92.7, abs=0.2),
        pytest.approx(97.7, abs=0.2),
        pytest.approx(0.054, abs=0.002),
    )
    assert growth(steady) == (80, 80, 0)
    assert growth([Sample(1.0, 0.5, 80.0)]) == (80, 80, 0)
