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
    assert error.retry_after_s == 20
    clock.now += 19.8
    refusal(usage, owner)
    clock.now += 0.2
    usage.admit(owner)
    assert (usage.num_requests, usage.num_refused, usage.num_open) == (2, 2, 2)


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
