"""What an owner may have: so many requests at once, so many tokens a minute."""

import pytest

from engine.errors import Overloaded
from engine.serving import accounts
from engine.serving.accounts import Accounts
from engine.wire import Owner


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(accounts, "time", clock)
    return clock


def refusal(account, owner):
    with pytest.raises(Overloaded) as caught:
        account.enter(owner)
    return caught.value


def test_tokens_flow_off_at_the_rate_of_the_limit(clock):
    owner = Owner("alice", tokens_per_minute=600)
    account = Accounts().of(owner)
    account.enter(owner)
    account.charge(500, 299)
    error = refusal(account, owner)
    assert str(error) == "alice has used 799 tokens within a minute, at most 600 may be"
    assert error.retry_after_s == 20
    clock.now += 19.8
    refusal(account, owner)
    clock.now += 0.2
    account.enter(owner)
    assert (account.num_requests, account.num_refused, account.num_open) == (2, 2, 2)


def test_nothing_is_saved_up_in_idle_hours(clock):
    owner = Owner("alice", tokens_per_minute=600)
    account = Accounts().of(owner)
    clock.now += 3600
    account.enter(owner)
    account.charge(600, 0)
    assert refusal(account, owner).retry_after_s == 1


def test_an_owner_has_one_account_by_name_whatever_the_limits(clock):
    all_accounts = Accounts()
    assert all_accounts.of(Owner("a")) is all_accounts.of(Owner("a", max_requests=3))
    assert all_accounts.of(Owner()) is not all_accounts.of(Owner("a"))
    assert [account.name for account in all_accounts.named()] == ["a"]


def test_names_without_end_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 3)
    all_accounts = Accounts()
    found = {all_accounts.of(Owner(str(number))) for number in range(10)}
    assert len(found) == 4
