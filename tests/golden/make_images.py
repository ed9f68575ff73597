"""Writes what Hugging Face transformers computes for prompts with images and the checkpoints of
tests/vision_checkpoints.py, for tests that run without it. Run by hand, needs torch and Pillow:

    python -m tests.golden.make_images [FAMILY ...]

images/FAMILY.npz: for each of tests.images.PROMPTS N logprobs_N of its last positions and tokens_N chosen greedily;
embeddings_N of its images, f16.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.family_checkpoints import SEEDS, config_of, make_checkpoint
from tests.golden.make_families import MADE_WITH, NUM_ROWS, NUM_TOKENS
from tests.golden.make_image_processors import processor_of
from tests.images import MODEL_TYPES, PROMPTS, an_image, token_ids_of

FOLDER = Path(__file__).parent / "images"


def answer(model: torch.nn.Module, family: str, parts: list) -> tuple[np.ndarray, list[int], np.ndarray, float]:
    """Return the log-probabilities at the prompt's last positions, the tokens that follow, the embeddings of the images
    and the closest call between two tokens. The pixels are those of the slow image processor of transformers."""
    images = [an_image(*part) for part in parts if isinstance(part, tuple)]
    made = {name: torch.tensor(array) for name, array in processor_of(family)(images, return_tensors="np").items()}
    made["pixel_values"] = made["pixel_values"].float()
    ids = torch.tensor([token_ids_of(family, parts)])
    types = (ids == model.config.image_token_id).int()
    out = model(ids, **made, mm_token_type_ids=types, use_cache=True)
    logprobs, tokens, gap = out.logits[0, -NUM_ROWS:].log_softmax(-1).numpy(), [], float("inf")
    found = model.model.get_image_features(**made)
    features = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    embeddings = torch.cat([torch.cat(list(each)) for each in features], dim=1).numpy()
    for _ in range(NUM_TOKENS):
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return logprobs, tokens, embeddings, gap


def main() -> None:
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for family in sys.argv[1:] or MODEL_TYPES:
            directory = make_checkpoint(Path(folder) / family, family, SEEDS[family])
            network = getattr(transformers, config_of(family)["architectures"][0])
            model = network.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
            arrays, gaps = {"made_with": np.array(MADE_WITH)}, []
            for number, parts in enumerate(PROMPTS):
                logprobs, tokens, embeddings, gap = answer(model, family, parts)
                arrays |= {f"logprobs_{number}": logprobs, f"tokens_{number}": np.array(tokens, np.int16)}
                arrays[f"embeddings_{number}"] = embeddings.astype(np.float16)
                gaps.append(gap)
            np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
            print(f"{family}: closest calls {', '.join(f'{gap:.4f}' for gap in gaps)}")


if __name__ == "__main__":
    main()
