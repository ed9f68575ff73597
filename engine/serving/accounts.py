"""What each owner has open and has used, and whether they may have more. Kept here, beside the one engine, and not in
the gateway, of which there may be several processes. Thread-safe."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

from engine.errors import Overloaded
from engine.wire import Owner

# Beyond, strangers share one: names come from the gateway's file, or from who asks Triton directly.
MAX_ACCOUNTS = 10_000


@dataclass(eq=False)
class Account:
    """Of one owner, in tokens and requests since the start."""

    name: str
    num_open: int = 0
    num_requests: int = 0  # let in
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    _used: float = 0.0  # tokens that count for the limit: they are forgotten at its rate
    _used_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, owner: Owner) -> None:
        """A request is let in; every one must `leave`. Raises Overloaded."""
        with self._lock:
            try:
                self._check(owner)
            except Overloaded:
                self.num_refused += 1
                raise
            self.num_open += 1
            self.num_requests += 1

    def charge(self, num_prompt: int, num_generated: int) -> None:
        with self._lock:
            self.num_prompt_tokens += num_prompt
            self.num_generated_tokens += num_generated
            self._used += num_prompt + num_generated

    def leave(self) -> None:
        with self._lock:
            self.num_open -= 1

    def _check(self, owner: Owner) -> None:
        if owner.max_requests is not None and self.num_open >= owner.max_requests:
            text = "{value} requests of {owner} are open, at most {limit} may be".replace("{owner}", owner.name)
            raise _overloaded(text, self.num_open, owner.max_requests, 1)
        if (limit := owner.tokens_per_minute) is None:
            return
        now, rate = time.monotonic(), limit / 60
        self._used, self._used_at = max(0.0, self._used - (now - self._used_at) * rate), now
        if self._used >= limit:
            text = "{owner} has used {value} tokens within a minute, at most {limit} may be"
            text = text.replace("{owner}", owner.name)
            raise _overloaded(text, int(self._used), limit, math.floor((self._used - limit) / rate) + 1)


class Accounts:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._lock = threading.Lock()

    def of(self, owner: Owner) -> Account:
        with self._lock:
            name = owner.name if owner.name in self._accounts or len(self._accounts) < MAX_ACCOUNTS else ""
            return self._accounts.setdefault(name, Account(name))

    def named(self) -> list[Account]:
        """All but the one of nobody in particular."""
        with self._lock:
            return [account for name, account in self._accounts.items() if name]


def _overloaded(text: str, value: int, limit: int, retry_after_s: int) -> Overloaded:
    error = Overloaded(text, value=value, limit=limit)
    error.retry_after_s = retry_after_s
    return error
