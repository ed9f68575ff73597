"""Tests of the limits of an owner: concurrent requests and tokens per minute."""

import pytest

from engine.errors import Overloaded
from engine.serving import rate_limits
from engine.serving.rate_limits import RateLimiter
from engine.wire import Owner


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(rate_limits, "time", clock)
    return clock


def refusal(usage, owner):
    with pytest.raises(Overloaded) as caught:
        usage.admit(owner)
    return caught.value


def test_tokens_flow_off_at_the_rate_of_the_limit(clock):
    owner = Owner("alice", tokens_per_minute=600)
    usage = RateLimiter().usage_of(owner)
    usage.admit(owner)
    usage.charge(500, 299)
    error = refusal(usage, owner)
    assert str(error) == "alice has used 799 tokens within a minute, at most 600 may be"
    assert error.retry_after_s == 18  # after 60 s * ln(799 / 600) = 17.2 s
    clock.now += 17.1
    refusal(usage, owner)
    clock.now += 0.2
    usage.admit(owner)
    assert (usage.num_requests, usage.num_refused, usage.num_open) == (2, 2, 2)


def test_the_use_of_other_replicas_counts_and_flows_off_like_its_own(clock):
    usages = [RateLimiter().usage_of(Owner("alice")) for _ in range(3)]

    def owner_at(usage, **limits):
        others = [each for each in usages if each is not usage]
        num_tokens = sum(each.num_recent_tokens for each in others)
        return Owner("alice", None, 600, 0, sum(each.num_open for each in others), num_tokens)

    for usage in usages:
        usage.charge(0, 250)
    for usage in usages:
        assert refusal(usage, owner_at(usage)).retry_after_s == 14  # after 60 s * ln(750 / 600) = 13.4 s
    clock.now += 13.5
    usages[0].admit(owner_at(usages[0]))
    usages[0].charge(0, 10)
    refusal(usages[1], owner_at(usages[1]))
    assert str(refusal(usages[1], Owner("alice", 3, None, 0, 3))) == "3 requests of alice are open, at most 3 may be"
    usages[1].admit(Owner("alice", 4, None, 0, 3))


def test_the_report_has_owners_with_limits_that_use_them_and_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_REPORTED", 2)
    limiter = RateLimiter()
    for name, limit, num_tokens in (("a", 5, 0), ("free", None, 9), ("b", 5, 3), ("idle", 5, 0), ("c", 5, 0)):
        usage, owner = limiter.usage_of(Owner(name)), Owner(name, limit)
        for _ in range(2 if name == "a" else 1):
            usage.admit(owner)
        usage.charge(0, num_tokens)
        if name == "idle":
            usage.release()
    assert limiter.report() == {"a": (2, 0.0), "b": (1, 3.0)}


def test_nothing_is_saved_up_in_idle_hours(clock):
    owner = Owner("alice", tokens_per_minute=600)
    usage = RateLimiter().usage_of(owner)
    clock.now += 3600
    usage.admit(owner)
    usage.charge(600, 0)
    assert refusal(usage, owner).retry_after_s == 1


def test_an_owner_has_one_usage_record_by_name_whatever_the_limits(clock):
    limiter = RateLimiter()
    assert limiter.usage_of(Owner("a")) is limiter.usage_of(Owner("a", max_requests=3))
    assert limiter.usage_of(Owner()) is not limiter.usage_of(Owner("a"))
    assert [usage.name for usage in limiter.named_owners()] == ["a"]


def test_names_without_end_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_OWNERS", 3)
    limiter = RateLimiter()
    found = {limiter.usage_of(Owner(str(number))) for number in range(10)}
    assert len(found) == 4
