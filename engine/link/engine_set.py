"""Set of engine processes that serve one model, with the methods of the client of one engine. Places each request on an
engine, and moves the open requests of a lost engine to the others.

All answers of a request stay together. A request is placed on the engine with the lowest cost: the number of tokens
that have to be computed before its first one, those of its prompt that are not cached and those of the prompts before
it, multiplied by the number of open answers. If an engine is restarted, its open requests continue at once at engines
that are up. A request moves once only: if its second engine crashes as well it stays there, so that a request that
crashes every engine is found (`engine.link.crash_search`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.block_pool import hash_block, root_hash
from engine.core.loop import GAUGES, PROPERTIES
from engine.core.spans import hash_with_spans
from engine.errors import EngineUnavailable, RequestError
from engine.link.client import EngineClient
from engine.link.journal import JournalEntry
from engine.link.messages import STARTING
from engine.placement import KnownPrefixes, placement_cost

log = logging.getLogger(__name__)

PIECE_TOKENS = 64  # of the prompt in one key: the usual size of a block, the unit of the prefix cache
Connect = Callable[[Callable[[EngineClient], None]], EngineClient]  # with the function to call when the engine is lost


class EngineSet:
    """Owns the clients of all engines. Thread-safe. The lock is held while a request is placed, moved or cancelled, so
    that each is in the journal of exactly one client."""

    def __init__(self, connects: Sequence[Connect]):
        self._lock = threading.Lock()
        self._closing = False
        self._carried: dict[str, float] = {}  # counters of engine processes that have ended
        with self._lock:  # an engine may be lost before the last client is there
            self.engines: Sequence[EngineClient] = [connect(self._on_lost) for connect in connects]
            self._known = {engine: KnownPrefixes() for engine in self.engines}

    def submit(self, entry: JournalEntry) -> None:
        """Submit a prompt to one of the engines. Raises EngineUnavailable if all engines have been given up or the set
        is closed."""
        keys = prefix_keys(entry)
        with self._lock:
            engines = [engine for engine in self.engines if engine.is_up]
            engines = engines or [engine for engine in self.engines if not engine.failure()]
            if not engines:
                raise EngineUnavailable(self.failure() or "")
            self._place(entry, keys, engines)

    def _place(self, entry: JournalEntry, keys: Sequence[bytes], engines: Sequence[EngineClient]) -> None:
        def num_uncached(engine: EngineClient) -> int:
            return len(entry.prompt_ids) - PIECE_TOKENS * self._known[engine].count(keys)

        def cost(engine: EngineClient) -> int:
            return placement_cost(num_uncached(engine), engine.journal.num_queued_tokens, engine.num_open)

        engine = min(engines, key=cost)
        entry.num_uncached = num_uncached(engine)
        engine.add(entry)
        num_cached = engine.stats.get("num_blocks", 0) * engine.stats.get("block_size", 0)
        self._known[engine].add(keys, int(num_cached) // PIECE_TOKENS)

    def _on_lost(self, lost: EngineClient) -> None:
        """Move the open requests of a lost engine to engines that are up. Called by the thread of its client."""
        num_moved = 0
        with self._lock:
            for name, value in lost.stats.items():
                if name not in (*GAUGES, *PROPERTIES, STARTING):
                    self._carried[name] = self._carried.get(name, 0) + value
            lost.stats = {}
            self._known[lost] = KnownPrefixes()
            engines = [engine for engine in self.engines if engine is not lost and engine.is_up]
            if self._closing or not engines:
                return
            is_given_up = lost.failure() is not None
            for name, entry in lost.journal.entries().items():
                if (is_given_up or not entry.has_moved) and lost.journal.take(name):
                    entry.submitted, entry.replay, entry.has_moved = False, True, True
                    self._place(entry, prefix_keys(entry), engines)
                    num_moved += 1
        if num_moved:
            log.warning("an engine was lost, %d requests continue at others", num_moved)

    def cancel(self, request_id: str, is_complete: bool = False) -> None:
        """Cancel an answer, as `EngineClient.cancel`."""
        with self._lock:
            for engine in self.engines:
                engine.cancel(request_id, is_complete)

    def expire(self, request_id: str, error: RequestError) -> None:
        """End an answer with `error` if it is still waiting."""
        with self._lock:
            for engine in self.engines:
                if engine.journal.name_of(request_id):
                    engine.expire(request_id, error)

    def failure(self) -> str | None:
        """Return the reason why the first engine was given up if all have been, otherwise None."""
        reasons = [engine.failure() for engine in self.engines]
        return reasons[0] if all(reasons) else None

    @property
    def stats(self) -> dict[str, Any]:
        """Return the sums of the statistics of all engines. Counters do not fall when an engine is restarted; of
        `PROPERTIES` the largest values are returned."""
        with self._lock:
            total: dict[str, Any] = dict(self._carried)
            for engine in self.engines:
                for name, value in engine.stats.items():
                    if name in PROPERTIES:
                        total[name] = max(total.get(name, 0), value)
                    elif name != STARTING:
                        total[name] = total.get(name, 0) + value
        return total

    @property
    def num_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self.engines)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last message of any engine."""
        return min(engine.silent_s for engine in self.engines)

    @property
    def num_open(self) -> int:
        return sum(engine.num_open for engine in self.engines)

    def close(self) -> None:
        """End every open request with an error and stop the threads."""
        with self._lock:
            self._closing = True
        for engine in self.engines:
            engine.close()


Engines = EngineClient | EngineSet


def prefix_keys(entry: JournalEntry) -> list[bytes]:
    """Return a key for each prefix of the prompt of a multiple of PIECE_TOKENS tokens, except the whole prompt, whose
    last token is always computed."""
    sampling = next(iter(entry.answers.values())).sampling
    keys, key = [], root_hash(entry.salt, *sampling.adapter[:1])
    for begin in range(0, len(entry.prompt_ids) - PIECE_TOKENS, PIECE_TOKENS):
        end = begin + PIECE_TOKENS
        key = hash_with_spans(hash_block(key, entry.prompt_ids[begin:end]), entry.spans, begin, end)
        keys.append(key)
    return keys
