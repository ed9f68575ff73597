"""Usage counters and rate limits by API key owner. They are kept beside the one engine and not in the gateway, which
may have several processes. Thread-safe."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from heapq import nlargest

from engine.errors import Overloaded
from engine.wire import Owner

# Owners beyond this number share one record: names come from the gateway's file, or from direct clients of Triton.
MAX_OWNERS = 10_000
MAX_REPORTED = 1000  # owners whose use the other replicas hear of


@dataclass(eq=False)
class OwnerUsage:
    """Requests and tokens of one owner since the start of the process, and the check of its limits."""

    name: str
    num_open: int = 0
    num_requests: int = 0  # admitted
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    is_limited: bool = False  # one of its requests had a limit
    _used: float = 0.0  # tokens, each weighted by exp(-age / 60 s), at `_used_at`
    _used_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, owner: Owner) -> None:
        """Count a request as open, or raise Overloaded. Every admitted request must call `release` once."""
        self.is_limited |= not owner.is_unlimited
        with self._lock:
            try:
                self._check(owner)
            except Overloaded:
                self.num_refused += 1
                raise
            self.num_open += 1
            self.num_requests += 1

    def charge(self, num_prompt: int, num_generated: int) -> None:
        """Add prompt and generated tokens to the counters and to the rate limit."""
        with self._lock:
            self.num_prompt_tokens += num_prompt
            self.num_generated_tokens += num_generated
            self._used = self.num_recent_tokens + num_prompt + num_generated
            self._used_at = time.monotonic()

    def release(self) -> None:
        """Count a request as no longer open."""
        with self._lock:
            self.num_open -= 1

    @property
    def num_recent_tokens(self) -> float:
        """Return the tokens of about the last minute. Those that flow off are a share of what is left, so the sum over
        several replicas flows off like the tokens of one.
        """
        return self._used * math.exp((self._used_at - time.monotonic()) / 60)

    def _check(self, owner: Owner) -> None:
        num_open = self.num_open + owner.num_open_elsewhere
        if owner.max_requests is not None and num_open >= owner.max_requests:
            text = "{value} requests of {owner} are open, at most {limit} may be".replace("{owner}", owner.name)
            raise _overloaded(text, num_open, owner.max_requests, 1)
        if (limit := owner.tokens_per_minute) is None:
            return
        num_tokens = self.num_recent_tokens + owner.num_tokens_elsewhere
        if num_tokens >= limit:
            text = "{owner} has used {value} tokens within a minute, at most {limit} may be"
            text = text.replace("{owner}", owner.name)
            raise _overloaded(text, int(num_tokens), limit, math.floor(60 * math.log(num_tokens / limit)) + 1)


class RateLimiter:
    """Owns the usage record of every API key owner."""

    def __init__(self) -> None:
        self._usages: dict[str, OwnerUsage] = {}
        self._lock = threading.Lock()

    def usage_of(self, owner: Owner) -> OwnerUsage:
        """Return the usage record of `owner`, which is created on first use."""
        with self._lock:
            name = owner.name if owner.name in self._usages or len(self._usages) < MAX_OWNERS else ""
            return self._usages.setdefault(name, OwnerUsage(name))

    def named_owners(self) -> list[OwnerUsage]:
        """Return the records of all owners that have a name."""
        with self._lock:
            return [owner_usage for name, owner_usage in self._usages.items() if name]

    def report(self) -> dict[str, tuple[int, float]]:
        """Return the open requests and recent tokens of the owners with limits, by name; of at most MAX_REPORTED."""
        used = [(each.num_open, each.num_recent_tokens, each.name) for each in self.named_owners() if each.is_limited]
        largest = nlargest(MAX_REPORTED, (each for each in used if each[0] or each[1] >= 1))
        return {name: (num_open, num_tokens) for num_open, num_tokens, name in largest}


def _overloaded(text: str, value: int, limit: int, retry_after_s: int) -> Overloaded:
    error = Overloaded(text, value=value, limit=limit)
    error.retry_after_s = retry_after_s
    return error
