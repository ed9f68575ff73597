"""The oracle's book: every request and what became of it, and what each disturbance did to those that were open.

Plain bookkeeping without sockets, processes and clock: who calls says what has come, and when.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PAUSE_S = 0.5  # less is not noticed under load
NUM_SLOWEST = 5
# Their end is a pause only; `fork` is the fork server of grammar workers, `grammar` one of these.
INVISIBLE = frozenset({"engine", "rank", "fork", "grammar", "stub", "tritonserver", "health", "supervisor"})
TOO_MANY = frozenset({"overloaded", "duplicate_request"})  # no disturbance's fault: of bursts, and of who asks again


class Right(NamedTuple):
    """An answer as it is without disturbance."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


class Part(NamedTuple):
    """One response, whatever the protocol."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None  # None: the protocol has none
    send_idx: int | None = None
    finish_reason: str | None = None  # of the last part
    error: str = ""  # its kind; of the last part, too
    event_id: str = ""  # of a server-sent event


@dataclass
class Effect:
    """What a kind of disturbance has done. `refused` began after it and failed; the others were open when it came."""

    times: int = 0
    open: int = 0
    paused: int = 0
    error: int = 0
    cut: int = 0
    refused: int = 0
    longest_s: float = 0.0


class Silence(NamedTuple):
    """The time that a client waited for a part of its answer."""

    seconds: float = 0.0
    since: float = 0.0
    name: str = ""  # of the attempt


@dataclass(eq=False)
class Attempt:
    """One try at an answer, compared with the right one as it comes."""

    right: Right
    last_at: float  # when its last part came
    is_stream: bool  # if not, it can tell nothing of pauses
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    event_id: str = ""  # the last that has come
    outcome: str = ""  # `right`, `wrong`, `error`, `cut`, `left`; empty: open
    error: str = ""
    why_wrong: str = ""
    struck_by: str = ""
    gap_s: float = 0.0  # the longest since it was struck
    name: str = ""  # its protocol and req_id
    silent_since: float = 0.0  # an attempt that goes on after another has its silence as well
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
    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # see `settle`
        self.attempts: Counter[str] = Counter()  # by outcome
        self.errors: Counter[str] = Counter()  # of attempts, by kind
        self.effects: dict[str, Effect] = defaultdict(Effect)  # of `kill engine`, `stop gateway`, ...
        self.why_wrong: list[str] = []
        self._open: set[Attempt] = set()
        self._last = ""  # disturbance
        self._strikes: list[tuple[float, str]] = []
        self._silences: list[Silence] = []  # the longest

    def begin(
        self, right: Right, now: float, is_stream: bool = True, before: Attempt | None = None, name: str = ""
    ) -> Attempt:
        """`before`: the attempt that it goes on after."""
        attempt = Attempt(right, now, is_stream, name=name, silent_since=now)
        if before:
            attempt.silent_since = now if before.error in TOO_MANY else before.silent_since
            attempt.token_ids, attempt.text, attempt.event_id = before.token_ids, before.text, before.event_id
        self._open.add(attempt)
        return attempt

    def strike(self, kind: str, now: float) -> None:
        """The disturbance comes now, to all that are open."""
        self._last = kind
        self._strikes.append((now, kind))
        self.effects[kind].times += 1
        self.effects[kind].open += len(self._open)
        for attempt in self._open:
            self._account(attempt, now)
            attempt.struck_by, attempt.gap_s = kind, 0.0

    def end(self, attempt: Attempt, now: float, outcome: str) -> str:
        """-> what has become of it: `outcome`, unless its parts say more."""
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
        """A request is done: `right`, `wrong`, `left` by its client, `refused` as it should be, or `lost`."""
        self.requests[outcome] += 1
        self.requests["asked again"] += tries > 1
        if why:
            self.why_wrong.append(why)

    def _account(self, attempt: Attempt, now: float) -> None:
        """Puts down what the last disturbance has done to it."""
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
        told = {"requests": dict(self.requests), "attempts": dict(self.attempts), "errors": dict(self.errors)}
        return told | {"effects": effects, "wrong": self.why_wrong[:10], "slowest": self.slowest()}

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
