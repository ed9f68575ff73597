"""Cost of structured output per step with a large vocabulary: masks, grammars and compilation.

    python -m benchmarks.structured_output

32 requests follow one schema over a synthetic vocabulary of 151,936 words; tokens are sampled at random among the
allowed ones. Times are milliseconds per step of 32 requests, including the worker process that computes them. Masks are
computed while the step runs, everything else before it. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import time

import numpy as np

from engine.core.grammar import MaskRow
from engine.core.types import Request, Sampling
from engine.grammars.pool import GrammarPool
from engine.text.grammars import write_grammar
from engine.wire.structured_output_fields import STRUCTURED_OUTPUT_FIELDS

NUM_ROWS, NUM_STEPS, VOCAB_SIZE = 32, 200, 151_936
EOS_ID = VOCAB_SIZE - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


class Words:
    """Synthetic tokenizer: bytes, words with and without a leading space, Chinese, numbers and combinations of JSON's
    punctuation."""

    eos_token_ids = (EOS_ID,)
    special_ids = frozenset(eos_token_ids)

    def __init__(self) -> None:
        rng = random.Random(1)
        words = dict.fromkeys(bytes([byte]) for byte in range(256))
        signs = ['"', '":', '",', '"}', "[", "]", "{", "}", ",", ":", "\n", " ", "0", "1", "//", "()"]
        makers = [
            lambda: rng.choice(["", " "]) + "".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 10))),
            lambda: "".join(chr(0x4E00 + rng.randrange(6000)) for _ in range(rng.randint(1, 3))),
            lambda: "".join(rng.choices(signs, k=rng.randint(1, 4))),
            lambda: str(rng.randrange(1000)) + rng.choice(["", "a", ".", " "]),
        ]
        while len(words) < EOS_ID:
            words[rng.choices(makers, [65, 25, 7, 3])[0]().encode()] = None
        self._words = [*words, b"<end>"]
        self._ids = {word: token_id for token_id, word in enumerate(self._words)}

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`, taking the longest matching word each time."""
        data, token_ids = text.encode(), []
        while data:
            size = next(size for size in range(12, 0, -1) if data[:size] in self._ids)
            token_ids.append(self._ids[data[:size]])
            data = data[size:]
        return token_ids


def main() -> None:
    from benchmarks.structured_output import Words as Imported  # a worker process cannot import classes from __main__

    grammars = GrammarPool(Imported, VOCAB_SIZE)  # type: ignore[arg-type]
    grammars.wait_until_loaded()
    structured_output = (
        "guided_json",
        write_grammar(STRUCTURED_OUTPUT_FIELDS["guided_json"]("guided_json", SCHEMA), any_whitespace=False),
    )
    requests, compiled_s = [], []
    for index in range(NUM_ROWS):
        request = Request(
            str(index), [1], 1, Sampling(1000, stop_token_ids=(EOS_ID,), structured_output=structured_output)
        )
        started = time.perf_counter()
        begun = grammars.begin(request)
        while not begun.done():
            grammars.poll(1)
        [request.grammar] = begun.result()
        compiled_s.append(time.perf_counter() - started)
        requests.append(request)
    choices = [MaskRow(request) for request in requests]
    rng = np.random.default_rng(0)
    masks_s, advance_s = [], []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        masks = grammars.masks(choices)
        masks_s.append(time.perf_counter() - started)
        allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")) for row in masks]
        chosen = [int(rng.choice(token_ids)) for token_ids in allowed]
        started = time.perf_counter()
        for request, token_id in zip(requests, chosen, strict=True):
            if token_id != EOS_ID and request.grammar:
                request.token_ids.append(token_id)
                request.grammar.advance([token_id])
        for request in requests:
            assert request.grammar
            request.grammar.forced()
        advance_s.append(time.perf_counter() - started)
    figures = {
        "vocabulary and first schema, ms": 1e3 * compiled_s[0],
        "the same schema again, ms": 1e3 * statistics.median(compiled_s[1:]),
        "masks a step, ms": 1e3 * statistics.mean(masks_s),
        "masks a step, median, ms": 1e3 * statistics.median(masks_s),
        "tokens and what they force a step, ms": 1e3 * statistics.mean(advance_s),
        "tokens and what they force a step, median, ms": 1e3 * statistics.median(advance_s),
    }
    for name, value in figures.items():
        print(f"{name:50}{value:9.2f}")
    print(json.dumps({"rows": NUM_ROWS, "vocabulary": VOCAB_SIZE, **figures}))


if __name__ == "__main__":
    main()
