"""Load of the stress test: clients that send requests and report the results to the ledger."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.storm.clients import BAD_BODIES, CUT, LAST_EVENT_ID, Clients, Parts, a_hostile_request, a_request
from benchmarks.storm.ledger import Attempt, Ledger, Part, Right

BATCH_SIZE, MAX_WAITING = 32, 64
BURST_EVERY_S, BURST = 10.0, BATCH_SIZE + MAX_WAITING + 50  # more than the server accepts
BAD, HOSTILE, SLOW = 0.03, 0.03, 0.05  # shares of the requests
SLOW_S = 0.05  # between two parts of an answer
PATIENCE_S = 90.0  # without a part, or for all attempts of a request; then it is lost
REFUSALS = ("invalid_request", "prompt_too_long")
DISCONNECTED = (*CUT, asyncio.TimeoutError, StopAsyncIteration)


@dataclass(frozen=True)
class Manner:
    """Behaviour of a client during one request."""

    style: str  # one of Clients.styles
    leave_after: int | None = None  # number of parts after which it disconnects
    pause_s: float = 0.0  # after each part
    asks_again: bool = True  # after the server refused it as overloaded


class Load:
    """Clients of one server. Owns the recorded requests and their right answers."""

    def __init__(self, clients: Clients, ledger: Ledger, rng: random.Random, image_share: float = 0.0):
        self._clients, self._ledger, self._rng, self._image_share = clients, ledger, rng, image_share
        self._cases: list[tuple[dict[str, Any], Right]] = []
        self._num_asked = 0

    async def make_cases(self, count: int) -> None:
        """Record random requests and their answers while nothing disturbs the server."""
        at_once = asyncio.Semaphore(BATCH_SIZE)

        async def answer(fields: dict[str, Any]) -> tuple[dict[str, Any], Right]:
            async with at_once:
                [part] = [part async for part in self._clients.whole(self._named(fields))]
            assert not part.error, part
            return fields, Right(part.token_ids or (), part.text, part.finish_reason or "")

        self._cases = await asyncio.gather(*(answer(a_request(self._rng, self._image_share)) for _ in range(count)))

    def _named(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._num_asked += 1
        return fields | {"req_id": f"storm-{self._num_asked}"}

    async def client(self, until: float, leave: float) -> None:
        """Send one request after another until the time `until`. `leave` is the share of streams that it abandons."""
        while time.monotonic() < until:
            if self._rng.random() < BAD:
                await self._ask_badly()
                continue
            if self._rng.random() < HOSTILE:
                await self._ask_with_hostile_grammar()
                continue
            style = self._rng.choice(list(self._clients.styles))
            leaves = style != "whole" and self._rng.random() < leave
            pause_s = SLOW_S if self._rng.random() < SLOW else 0.0
            await self._ask(Manner(style, self._rng.randrange(1, 20) if leaves else None, pause_s))

    async def bursts(self, until: float) -> None:
        while time.monotonic() + BURST_EVERY_S < until:
            await asyncio.sleep(BURST_EVERY_S)
            await asyncio.gather(*(self._ask(Manner("whole", asks_again=False)) for _ in range(BURST)))

    async def _ask(self, manner: Manner) -> None:
        fields, right = self._rng.choice(self._cases)
        fields = self._named(fields)
        lost_at, tries = time.monotonic() + PATIENCE_S, 1
        attempt = await self._try(manner, fields, right, None)
        while attempt.outcome in ("error", "cut"):
            if attempt.error == "overloaded" and not manner.asks_again:
                return self._ledger.settle("refused", tries)
            if time.monotonic() > lost_at:
                return self._ledger.settle("lost", tries)
            await asyncio.sleep(self._rng.uniform(0.2, 1.0))
            tries += 1
            attempt = await self._try(manner, fields, right, attempt)
        self._ledger.settle(attempt.outcome, tries, attempt.why_wrong)

    async def _try(self, manner: Manner, fields: dict[str, Any], right: Right, before: Attempt | None) -> Attempt:
        """Make one attempt, which resumes after what the attempt `before` has received."""
        name = f"{manner.style} {fields['req_id']}" + ("" if manner.asks_again else " in a burst")
        attempt = self._ledger.begin(right, time.monotonic(), manner.style != "whole", before, name)
        if before:
            fields = fields | {"resume_from": len(before.token_ids), LAST_EVENT_ID: before.event_id}
        parts, num_parts, outcome = self._clients.styles[manner.style](fields), 0, "cut"
        try:
            while num_parts != manner.leave_after or attempt.outcome:
                attempt.take(await _next(parts), time.monotonic())
                num_parts += 1
                await asyncio.sleep(manner.pause_s)
            outcome = "left"
        except DISCONNECTED:
            pass  # `end` decides: a finished answer stays right
        except (ValueError, LookupError, TypeError) as error:
            attempt.is_wrong(f"unreadable: {error!r}")
        finally:
            await parts.aclose()
        self._ledger.end(attempt, time.monotonic(), outcome)
        return attempt

    async def _ask_badly(self) -> None:
        parts = self._clients.native_stream(self._rng.choice(BAD_BODIES))
        try:
            error = (await _next(parts)).error
        except DISCONNECTED:
            return
        finally:
            await parts.aclose()
        if error in REFUSALS:
            self._ledger.settle("refused")
        elif error not in ("overloaded", "engine_unavailable"):  # refused before it was validated
            self._ledger.settle("wrong", why=f"a bad request got {error or 'an answer'}")

    async def _ask_with_hostile_grammar(self) -> None:
        """Send a hostile grammar. The server may refuse or answer it, as long as other requests are not affected."""
        parts, error = self._clients.native_stream(self._named(a_hostile_request(self._rng))), ""
        try:
            async for part in parts:
                error = part.error
        except DISCONNECTED:
            pass
        finally:
            await parts.aclose()
        is_expected = error in ("", "overloaded", "engine_unavailable", *REFUSALS)
        why = "" if is_expected else f"a hostile grammar got {error}"
        self._ledger.settle("hostile" if is_expected else "wrong", why=why)


async def _next(parts: Parts) -> Part:
    return await asyncio.wait_for(anext(parts), PATIENCE_S)
