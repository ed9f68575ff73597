"""Writes gguf.npz: blocks of every quantized type of GGUF and the numbers that the `gguf` package reads in them.

`python -m tests.golden.make_gguf` needs the package `gguf` (0.19.0).
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}  # where 16-bit floats are; else in front
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
NUM_BLOCKS = 6


def main() -> None:
    rng, arrays = np.random.default_rng(0), {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (NUM_BLOCKS, num_bytes), np.uint8)
        for start in HALVES.get(name, (0,)):  # random bytes would often be infinite or no number
            raw[:, start : start + 2] = rng.uniform(-2, 2, (NUM_BLOCKS, 1)).astype(np.float16).view(np.uint8)
        arrays |= {name: raw, f"{name}_values": gguf.dequantize(raw, kind)}
    np.savez_compressed(Path(__file__).with_name("gguf.npz"), **arrays)


if __name__ == "__main__":
    main()
