"""Logits and the ways to choose from them, for the tests of every sampler."""

import numpy as np

from engine.ops.sampling_rows import SamplingRows

VOCAB = 1000


def some_logits(num_rows=24, vocab=VOCAB, scale=3.0):
    return (np.random.default_rng(0).standard_normal((num_rows, vocab)) * scale).astype(np.float32)


def some_rows(num_rows=24, **settings):
    """Return rows that sample, each with its own seed. A setting is one value for all rows or one for each."""
    rows = SamplingRows.greedy(num_rows)
    for name, value in {"temperature": 1.0, "seed": np.arange(num_rows), "counter": 7, **settings}.items():
        getattr(rows, name)[:] = value
    return rows


def with_pairs(rows, seen=(), bias=()):
    """Return the rows with the same seen (id, count) pairs and (id, bias) pairs in each."""
    n = len(rows.temperature)
    rows.bias_starts = np.arange(n + 1, dtype=np.int32) * len(bias)
    rows.seen_starts = np.arange(n, dtype=np.int32) * (len(seen) + 1)  # between two rows unused elements
    rows.seen_ends = rows.seen_starts + np.int32(len(seen))
    rows.seen_ids, rows.seen_counts = np.array([*seen, (0, 9)] * n, np.int32).reshape(-1, 2).T.copy()
    rows.bias_ids = np.array([token for token, _ in bias] * n, np.int32)
    rows.bias = np.array([value for _, value in bias] * n, np.float32)
    return rows


def a_mask(allowed, num_rows):
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.tile(np.packbits(bits, bitorder="little").view(np.uint32), (num_rows, 1))


SEEN = [(token, token % 4) for token in range(0, VOCAB, 3)]
CASES = {
    "greedy": some_rows(temperature=0),
    "temperature": some_rows(temperature=np.linspace(0.1, 3, 24)),
    "top_p": some_rows(top_p=np.linspace(0.01, 0.99, 24)),
    "top_p of hot rows": some_rows(top_p=np.linspace(0.01, 0.99, 24), temperature=50),
    "top_k": some_rows(top_k=np.arange(1, 25) * 5),
    "top_k above the vocabulary": some_rows(top_k=VOCAB + 1),
    "top_n_sigma": some_rows(top_n_sigma=np.linspace(0, 4, 24)),
    "top_n_sigma and top_p": some_rows(top_n_sigma=np.linspace(0, 2, 24), top_p=0.7, temperature=2.0),
    "top_n_sigma and top_k": some_rows(top_n_sigma=1.5, top_k=np.arange(1, 25) * 7, min_p=0.01),
    "typical_p": some_rows(typical_p=np.linspace(0, 1, 24)),
    "typical_p and greedy rows": some_rows(typical_p=0.3, temperature=np.arange(24) % 2),
    "typical_p and the others": some_rows(typical_p=0.6, top_n_sigma=3, min_p=0.02, top_p=0.9, temperature=1.5),
    "typical_p and xtc": some_rows(typical_p=0.6, xtc_probability=1, xtc_threshold=0.01),
    "xtc": some_rows(xtc_probability=0.5, xtc_threshold=np.linspace(0, 0.3, 24)),
    "xtc of cold rows": some_rows(xtc_probability=1, xtc_threshold=0.01, temperature=0.005),
    "xtc with its default threshold": some_rows(xtc_probability=1, temperature=np.linspace(0, 2, 24)),
    "xtc and the others": some_rows(xtc_probability=1, xtc_threshold=0.02, top_n_sigma=3, min_p=0.05, top_p=0.9),
    "xtc and top_k": some_rows(xtc_probability=1, xtc_threshold=0.03, min_p=0.1, top_k=5, temperature=1.5),
    "min_p": some_rows(min_p=np.linspace(0, 1, 24)),
    "all three": some_rows(top_p=0.8, top_k=np.arange(1, 25) * 7, min_p=0.01, temperature=1.5),
    "repetition": with_pairs(some_rows(temperature=0.7, repetition_penalty=1.7), SEEN),
    "frequency": with_pairs(some_rows(temperature=0.7, frequency_penalty=1.1), SEEN),
    "presence": with_pairs(some_rows(temperature=0, presence_penalty=5.5), SEEN),
    "bias and bans": with_pairs(some_rows(top_p=0.9), SEEN, [(5, 12.0), (6, 11.0), (8, -np.inf)]),
    "a large counter": some_rows(counter=2**40 + np.arange(24), seed=2**64 - 1 - np.arange(24, dtype=np.uint64)),
}
CASES["mask"] = some_rows(top_p=0.9)
CASES["mask"].mask = a_mask(range(3, VOCAB, 5), 24)
