"""Random grammars against the real grammar library: no grammar may harm the process that uses it.

    python -m benchmarks.fuzz_grammars --minutes 60

Random JSON schemas, regular expressions, Lark and GBNF grammars and structural tags are compiled and followed for some
random tokens, 4 at a time, with the vocabulary of benchmarks.structured_output. An error that ends this process, or a
grammar that does not end within the limits, is a failure. Grammars whose worker crashed or exceeded a limit are written
to `--folder`, for regression tests. The last line is JSON with the number of grammars per kind and result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_grammars import KINDS
from benchmarks.structured_output import EOS_ID, VOCAB_SIZE
from engine.core.grammar import MaskRow
from engine.core.types import Grammar, Request, Sampling
from engine.errors import EngineUnavailable, InvalidRequest
from engine.grammars.matcher import Matcher
from engine.grammars.pool import GrammarPool
from engine.text.grammars import write_grammar
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS

NUM_AT_ONCE, NUM_TOKENS = 4, 200
LIMIT_S = 300.0  # of one grammar; the longest compilation may take 5 s of CPU time at the lowest priority
LIMITS = ("crashes", "takes more than", "needs more than")


class Case:
    """One grammar, and how far it has come."""

    def __init__(self, kind: str, value: Any, pool: GrammarPool, rng: random.Random):
        self.kind, self.value, self._pool, self._rng = kind, value, pool, rng
        self.result, self._until = "", time.monotonic() + LIMIT_S
        self._begun: Future[Any] | None = None
        self._request: Request | None = None
        try:
            text = write_grammar(STRUCTURED_OUTPUT_FIELDS[kind](kind, value))
            self._request = Request(
                "fuzz", [1], 1, Sampling(10**6, stop_token_ids=(EOS_ID,), structured_output=(kind, text))
            )
            self._begun = pool.begin(self._request)
        except InvalidRequest:
            self.result = "refused before it is compiled"

    def go_on(self) -> None:
        """Take the next token if the grammar is ready for it, and set `result` at the end."""
        if time.monotonic() > self._until:
            self.result = "HUNG"
        if self.result or not (self._begun and self._request and self._begun.done()):
            return
        if self._request.grammar is None:
            if error := self._begun.exception():
                self._fail(error)
                return
            [self._request.grammar] = self._begun.result()
        self._take_token(self._request.grammar)

    def _take_token(self, matcher: Grammar) -> None:
        assert isinstance(matcher, Matcher) and self._request
        if matcher.error:
            self._fail(matcher.error)
            return
        [row] = self._pool.masks([MaskRow(self._request)])
        if matcher.is_mask_missing:
            matcher.is_mask_missing = False
            return
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = int(self._rng.choice(allowed)) if len(allowed) else EOS_ID
        if token_id == EOS_ID or len(self._request.token_ids) == NUM_TOKENS:
            self.result = "followed"
            return
        self._request.token_ids.append(token_id)
        matcher.advance([token_id])

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, InvalidRequest):
            self.result = f"{type(error).__name__}"
        else:
            self.result = next((each for each in LIMITS if each in str(error)), "refused by the compiler")


def fuzz(minutes: float, seed: int, folder: Path) -> Counter[tuple[str, str]]:
    from benchmarks.structured_output import Words

    rng, found = random.Random(seed), Counter[tuple[str, str]]()
    pool = GrammarPool(Words, VOCAB_SIZE)  # type: ignore[arg-type]
    pool.wait_until_loaded()
    until, cases = time.monotonic() + 60 * minutes, list[Case]()
    while time.monotonic() < until or cases:
        while len(cases) < NUM_AT_ONCE and time.monotonic() < until:
            kind, make = rng.choice(KINDS)
            cases.append(Case(kind, make(rng), pool, rng))
        pool.poll(0.01)
        for case in cases:
            case.go_on()
        ended, cases = [case for case in cases if case.result], [case for case in cases if not case.result]
        for case in ended:
            found[case.kind, case.result] += 1
            if case.result in (*LIMITS, "HUNG", EngineUnavailable.__name__) or case.result.endswith("Error"):
                record(case, folder)
    pool.close()
    return found


def record(case: Case, folder: Path) -> None:
    text = json.dumps({"field": case.kind, "value": case.value, "result": case.result}, indent=1)
    name = re.sub(r"\W+", "_", f"{case.result}_{case.kind}_{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    (folder / f"{name}.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="folder of grammars beyond a limit")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = fuzz(given.minutes, given.seed, given.folder)
    print(json.dumps({f"{kind}: {result}": count for (kind, result), count in sorted(found.items())}))


if __name__ == "__main__":
    main()
