"""Tests of the search for the request that crashes the engine: the order of trials, and the request that is blamed."""

import pytest

from engine.link.crash_search import CrashSearch


@pytest.fixture
def bench():
    """Return a CrashSearch, the set of open requests, and the list of those that the engine was given."""
    opened, given = set("abcd"), []

    def submit(request_id):
        if request_id in opened:
            given.append(request_id)
        return request_id in opened

    return CrashSearch(submit), opened, given


def begin(trials, request_ids):
    """Begin a search in a new engine process that computes at once."""
    trials.hold(request_ids)
    trials.begin()


def test_without_a_crash_every_request_is_submitted_at_once(bench):
    trials, _, given = bench
    for request_id in "abc":
        trials.add(request_id)
    assert given == list("abc")
    assert trials.note_crash() is None


def test_after_a_crash_each_waits_for_the_first_token_of_the_one_before(bench):
    trials, _, given = bench
    assert trials.note_crash() is None
    begin(trials, "ab")
    trials.add("c")
    assert given == ["a"]
    trials.survived("b")  # which were not mentioned
    assert given == ["a"]
    trials.survived("a")
    trials.survived("b")
    assert given == ["a", "b", "c"]
    trials.survived("c")
    trials.add("d")
    trials.add("a")
    assert given == ["a", "b", "c", "d", "a"]


def test_one_that_has_been_cancelled_is_passed_over(bench):
    trials, opened, given = bench
    begin(trials, "abc")
    opened -= {"b"}
    trials.survived("a")
    assert given == ["a", "c"]


def test_the_suspect_comes_first_and_alone_and_is_the_culprit_if_that_crashes(bench):
    trials, _, given = bench
    begin(trials, "abc")
    trials.survived("a")
    assert trials.note_crash() is None  # with b on trial, a running
    begin(trials, "abc")
    assert given == ["a", "b", "b"]
    assert trials.note_crash() == "b"
    begin(trials, "ac")
    assert given == ["a", "b", "b", "a"]


def test_a_suspect_that_gets_a_token_alone_was_none(bench):
    trials, _, given = bench
    begin(trials, "ab")
    trials.note_crash()
    begin(trials, "ab")
    trials.survived("a")
    assert given == ["a", "a", "b"]
    assert trials.note_crash() is None  # now b is the suspect
    begin(trials, "ab")
    assert given[-1] == "b"
    assert trials.note_crash() == "b"


def test_a_lost_connection_ends_the_trials_without_a_verdict(bench):
    trials, _, given = bench
    begin(trials, "ab")
    trials.note_crash()
    begin(trials, "ab")
    trials.call_off()
    trials.add("c")
    assert given == ["a", "a", "c"]
    assert trials.note_crash() is None


def test_no_request_is_blamed_for_crashes_while_the_model_is_loaded(bench):
    trials, _, given = bench
    for _ in range(3):
        trials.hold("ab")
        trials.add("c")
        assert given == []
        assert trials.note_crash() is None
    begin(trials, "abc")
    assert trials.note_crash() is None
    trials.hold("abc")
    assert trials.note_crash() is None
    begin(trials, "abc")
    assert given == ["a", "a"]
    trials.begin()  # it is called whenever the engine has said that it computes
    assert given == ["a", "a"]
    assert trials.note_crash() == "a"  # which has crashed every engine that computed it


def test_a_trial_of_one_request_is_announced_before_it_runs():
    said = []

    def submit(request_id):
        said.append(request_id)
        return request_id != "b"

    search = CrashSearch(submit, lambda request_id: said.append(f"alone: {request_id}"))
    begin(search, "abc")
    assert said == ["alone: a", "a"]
    search.survived("a")
    assert said[2:] == ["alone: b", "b", "alone: c", "c"]
    search.survived("c")
    search.add("d")
    assert said[6:] == ["alone: None", "d"]
    begin(search, "e")
    search.call_off()
    assert said[8:] == ["alone: e", "e", "alone: None"]
