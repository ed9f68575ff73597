"""Ledger of the stress test: records every request and its outcome, and the effects of each disturbance on open
requests.

It is independent of sockets, processes and clocks: callers report what arrived and when.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PAUSE_S = 0.5  # shorter pauses are indistinguishable from load
NUM_SLOWEST = 5
# The end of these processes causes only a pause. `fork` is the fork server of grammar workers, `grammar` is a worker.
INVISIBLE = frozenset({"engine", "rank", "fork", "grammar", "stub", "tritonserver", "health", "supervisor"})
TOO_MANY = frozenset({"overloaded", "duplicate_request"})  # caused by bursts and repeats, not by disturbances


class Right(NamedTuple):
    """The answer to a request without disturbance."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


class Part(NamedTuple):
    """One response in any protocol."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None  # None if the protocol has none
    send_idx: int | None = None
    finish_reason: str | None = None  # only in the last part
    error: str = ""  # kind of the error, only in the last part
    event_id: str = ""  # id of a server-sent event


@dataclass
class Effect:
    """Effects of one kind of disturbance. `refused` counts attempts that began after it and failed; the other fields
    count those that were open when it came."""

    times: int = 0
    open: int = 0
    paused: int = 0
    error: int = 0
    cut: int = 0
    refused: int = 0
    longest_s: float = 0.0


class Silence(NamedTuple):
    """Time that a client waited for a part of its answer."""

    seconds: float = 0.0
    since: float = 0.0
    name: str = ""  # name of the attempt


@dataclass(eq=False)
class Attempt:
    """One attempt to get an answer. It compares the parts with the right answer as they arrive."""

    right: Right
    last_at: float  # when its last part arrived
    is_stream: bool  # without streaming, pauses cannot be observed
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    event_id: str = ""  # of the last event received
    outcome: str = ""  # `right`, `wrong`, `error`, `cut`, `left`; empty while open
    error: str = ""
    why_wrong: str = ""
    struck_by: str = ""
    gap_s: float = 0.0  # longest gap since the last disturbance
    name: str = ""  # protocol and req_id
    silent_since: float = 0.0  # an attempt that resumes another inherits its silence
    longest: Silence = Silence()

    def take(self, part: Part, now: float) -> None:
        if not part.error:
            self.note_silence(now)
            self.silent_since = now
        self.gap_s, self.last_at = max(self.gap_s, now - self.last_at), now
        if self.outcome:
            self.is_wrong("something came after the end")
        elif part.error:
            self.outcome, self.error = "error", part.error
        else:
            self._compare(part)

    def _compare(self, part: Part) -> None:
        right, self.text = self.right, self.text + part.text
        self.event_id = part.event_id or self.event_id
        if part.token_ids is not None:
            if part.send_idx != len(self.token_ids):
                self.is_wrong(f"send_idx is {part.send_idx} after {len(self.token_ids)} tokens")
            self.token_ids += part.token_ids
            if right.token_ids[: len(self.token_ids)] != tuple(self.token_ids):
                self.is_wrong(f"another token within the first {len(self.token_ids)}")
        if not right.text.startswith(self.text):
            self.is_wrong(f"another text within the first {len(self.text)} characters")
        if part.finish_reason and not self.outcome:
            has_all_tokens = part.token_ids is None or len(self.token_ids) == len(right.token_ids)
            if not has_all_tokens or (self.text, part.finish_reason) != (right.text, right.finish_reason):
                self.is_wrong(f"the end, {part.finish_reason}, after {len(self.text)} characters")
            self.outcome = self.outcome or "right"

    def note_silence(self, now: float) -> None:
        self.longest = max(self.longest, Silence(now - self.silent_since, self.silent_since, self.name))

    def is_wrong(self, why: str) -> None:
        self.outcome, self.why_wrong = "wrong", self.why_wrong or why


class Ledger:
    """Record of all requests, attempts and disturbances. Produces the report and the list of broken promises."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by outcome, see `settle`
        self.attempts: Counter[str] = Counter()  # by outcome
        self.errors: Counter[str] = Counter()  # failed attempts by kind of error
        self.effects: dict[str, Effect] = defaultdict(Effect)  # by disturbance: `kill engine`, `stop gateway`, ...
        self.why_wrong: list[str] = []
        self._open: set[Attempt] = set()
        self._last = ""  # the last disturbance
        self._strikes: list[tuple[float, str]] = []
        self._silences: list[Silence] = []  # the longest ones

    def begin(
        self, right: Right, now: float, is_stream: bool = True, before: Attempt | None = None, name: str = ""
    ) -> Attempt:
        """Open an attempt at time `now` (seconds). `before` is the failed attempt that it resumes."""
        attempt = Attempt(right, now, is_stream, name=name, silent_since=now)
        if before:
            attempt.silent_since = now if before.error in TOO_MANY else before.silent_since
            attempt.token_ids, attempt.text, attempt.event_id = before.token_ids, before.text, before.event_id
        self._open.add(attempt)
        return attempt

    def strike(self, kind: str, now: float) -> None:
        """Record a disturbance at time `now`, which affects all open attempts."""
        self._last = kind
        self._strikes.append((now, kind))
        self.effects[kind].times += 1
        self.effects[kind].open += len(self._open)
        for attempt in self._open:
            self._account(attempt, now)
            attempt.struck_by, attempt.gap_s = kind, 0.0

    def end(self, attempt: Attempt, now: float, outcome: str) -> str:
        """Close an attempt and return its outcome: `outcome`, unless its parts have determined another."""
        attempt.outcome = attempt.outcome or outcome
        self._open.discard(attempt)
        self._account(attempt, now)
        if attempt.error not in TOO_MANY:
            attempt.note_silence(now)
            self._silences = sorted([*self._silences, attempt.longest], reverse=True)[:NUM_SLOWEST]
        self.attempts[attempt.outcome] += 1
        if attempt.error:
            self.errors[attempt.error] += 1
        return attempt.outcome

    def settle(self, outcome: str, tries: int = 1, why: str = "") -> None:
        """Record the final outcome of a request: `right`, `wrong`, `left` by its client, `refused` as expected, or
        `lost`."""
        self.requests[outcome] += 1
        self.requests["asked again"] += tries > 1
        if why:
            self.why_wrong.append(why)

    def _account(self, attempt: Attempt, now: float) -> None:
        """Add the effect of the last disturbance on this attempt."""
        has_failed = attempt.outcome in ("error", "cut") and attempt.error not in TOO_MANY
        if not attempt.struck_by:
            if has_failed:
                self.effects[self._last or "nothing"].refused += 1
            return
        effect = self.effects[attempt.struck_by]
        if has_failed:
            setattr(effect, attempt.outcome, getattr(effect, attempt.outcome) + 1)
        elif attempt.is_stream:
            gap_s = attempt.gap_s if attempt.outcome else max(attempt.gap_s, now - attempt.last_at)
            effect.paused += gap_s > PAUSE_S
            effect.longest_s = max(effect.longest_s, gap_s)

    def report(self) -> dict[str, Any]:
        effects = {kind: asdict(effect) for kind, effect in self.effects.items()}
        report = {"requests": dict(self.requests), "attempts": dict(self.attempts), "errors": dict(self.errors)}
        return report | {"effects": effects, "wrong": self.why_wrong[:10], "slowest": self.slowest()}

    def slowest(self) -> list[str]:
        """Return the longest silences with the disturbances during each, for a line of the report each."""
        lines = []
        for silence in self._silences:
            strikes = [
                (at - silence.since, kind) for at, kind in self._strikes if -1 < at - silence.since < silence.seconds
            ]
            causes = ", ".join(f"{kind} at {after_s:.1f} s" for after_s, kind in strikes)
            lines.append(f"{silence.seconds:.1f} s without a part, {silence.name}: {causes or 'no disturbance'}")
        return lines

    def broken_promises(self) -> list[str]:
        broken = [f"{self.requests[name]} requests are {name}" for name in ("lost", "wrong") if self.requests[name]]
        if all(kind.split()[-1] in INVISIBLE | {"nothing"} for kind in self.effects):
            failed = {kind: count for kind, count in self.errors.items() if kind not in TOO_MANY}
            if failed or self.attempts["cut"]:
                broken.append(f"more than a pause: {self.attempts['cut']} attempts were cut, errors {failed}")
        return broken
