"""Arrays that other programs have computed (tests/golden), and what is compared with them."""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file by the names in it. `name`: the path in tests/golden, without `.npz`."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of logits, f64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
