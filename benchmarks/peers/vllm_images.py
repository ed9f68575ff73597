"""Time of vLLM on a CPU to the first token of a prompt with an image, beside `benchmarks.images` for this server:

    python -m benchmarks.images qwen2.5-vl-3b --sizes 448 896                          # writes the shape to build/bench
    python -m benchmarks.peers.vllm_images build/bench/qwen2.5-vl-3b-shape 448 896     # in the environment of vLLM

The prompt has the image, which is square and random, and 20 tokens. The weights are random. docs/benchmarks.md says how
the environment is made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SPECIAL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151654: "<|vision_pad|>"}
SPECIAL |= {151652: "<|vision_start|>", 151653: "<|vision_end|>", 151655: "<|image_pad|>", 151656: "<|video_pad|>"}
ROUNDS, NUM_TEXT_TOKENS, LONGEST = 4, 20, 4096


def add_processor(folder: Path) -> None:
    """Write what vLLM reads besides config.json: the settings of images, and a tokenizer with a word for each id."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {SPECIAL.get(token_id, f"w{token_id}"): token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    names |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    images: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    images |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    images |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def main(folder: Path, sizes: list[int]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams  # vLLM reads the variable when it is imported

    add_processor(folder)
    limits = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST, "max_num_seqs": 4}
    images: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0}
    images |= {"mm_processor_kwargs": {"max_pixels": max(sizes) ** 2}, "skip_mm_profiling": True}
    llm = LLM(str(folder), load_format="dummy", dtype="bfloat16", enable_prefix_caching=False, **limits, **images)
    rng, sampling = np.random.default_rng(0), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for size in sizes:
        times = []
        for _ in range(ROUNDS):
            image = Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))
            text = " ".join(f"w{token_id}" for token_id in rng.integers(100, 1000, NUM_TEXT_TOKENS))
            prompt = {
                "prompt": f"<|vision_start|><|image_pad|><|vision_end|>{text}",
                "multi_modal_data": {"image": image},
            }
            began = time.perf_counter()
            llm.generate(prompt, sampling, use_tqdm=False)
            times.append(time.perf_counter() - began)
        print(f"{size} x {size}: first_token_s {', '.join(f'{each:.3f}' for each in times)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
