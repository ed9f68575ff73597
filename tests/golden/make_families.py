"""Writes what Hugging Face transformers computes for the checkpoints of tests/family_checkpoints.py, for tests that run
without it. Run by hand, needs torch:

    python -m tests.golden.make_families [FAMILY ...]

families/FAMILY.npz: for prompts of several lengths N prompt_N, logprobs_N of its last positions, and tokens_N chosen
greedily.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.family_checkpoints import ALL, SEEDS, config_of, make_checkpoint, prompt_lens

FOLDER = Path(__file__).parent / "families"
NUM_TOKENS = 64
NUM_ROWS = 2  # the last positions of a prompt
MADE_WITH = f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}"


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Return the log-probabilities at the prompt's last positions, the tokens that follow, and the closest call."""
    out = model(torch.tensor([prompt]), use_cache=True)
    logprobs, tokens, gap = out.logits[0, -NUM_ROWS:].log_softmax(-1).numpy(), [], float("inf")
    for _ in range(NUM_TOKENS):
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return logprobs, tokens, gap


def make_family(family: str, directory: Path, seed: int) -> tuple[dict[str, np.ndarray], float, int]:
    make_checkpoint(directory, family, seed)
    [architecture] = config_of(family)["architectures"]  # transformers does not know every model_type
    network = getattr(transformers, architecture)
    config = network.config_class.from_pretrained(directory)
    config.model_type = network.config_class.model_type
    model, info = network.from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model.eval()
    rng = np.random.default_rng(7)
    checksum = zlib.crc32((directory / "model.safetensors").read_bytes())
    arrays = {"made_with": np.array(MADE_WITH), "checksum": np.array(checksum)}
    gaps, varieties = [], []
    for length in prompt_lens(family):
        prompt = rng.integers(0, 310, length).tolist()
        logprobs, tokens, gap = greedy(model, prompt)
        arrays[f"prompt_{length}"] = np.array(prompt, np.int16)
        arrays[f"logprobs_{length}"] = logprobs
        arrays[f"tokens_{length}"] = np.array(tokens, np.int16)
        gaps.append(gap)
        varieties.append(len(set(tokens)))
    return arrays, min(gaps), min(varieties)


def main() -> None:
    """Make the goldens. Without a seed in SEEDS, choose the best of five and print it."""
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for family in sys.argv[1:] or ALL:
            seeds = [SEEDS[family]] if family in SEEDS else range(5)
            made = [(seed, *make_family(family, Path(folder) / f"{family}-{seed}", seed)) for seed in seeds]
            varied = [each for each in made if each[3] > 10] or made
            seed, arrays, gap, variety = max(varied, key=lambda each: each[2])
            np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
            print(f'"{family}": {seed},  # closest call {gap:.4f}, at least {variety} different tokens of {NUM_TOKENS}')


if __name__ == "__main__":
    main()
