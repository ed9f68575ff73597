"""Time to read an image: preparation, tower, and first token of a prompt with it. Preparation is what a worker process
does after decoding; the time of the tower includes the patches, on every device.

    python -m benchmarks.images paddleocr-vl --sizes 768 1512

The model is an exported one, or a shape of benchmarks.random_checkpoint, which is first exported without weights
(LOAD_FORMAT=dummy). Images are square and random, so that each is encoded. The second question is about the same image,
whose blocks are in the prefix cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.random_checkpoint import SHAPES
from engine.core.loop import EngineLoop
from engine.core.spans import PromptSpan
from engine.core.types import Request, Sampling
from engine.executors import make_executor
from engine.executors.memory import allocate_cache
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.images.processor import ImageProcessor
from engine.settings.config import Config

NUM_TEXT_TOKENS = 20


def exported(model: str) -> Path:
    """Return the folder of the exported model. A shape is exported once and kept in build/bench."""
    if model not in SHAPES:
        return Path(model)
    folder, out = Path("build/bench") / f"{model}-shape", Path("build/bench") / f"{model}-dummy-images"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        export(folder, out, ExportOptions(max_seq_len=8192, load_format="dummy"), report=print)
    return out


def first_token_s(loop: EngineLoop, request: Request) -> float:
    """Return the seconds from a request to its first token, which is also its last one."""
    began = time.perf_counter()
    loop.add(request)
    while not loop.is_idle:
        loop.step()
    return time.perf_counter() - began


def measure(loop: EngineLoop, processor: ImageProcessor, size: int, number: int) -> dict[str, float]:
    """Return the figures of an image of `size` x `size` pixels."""
    rng = np.random.default_rng(number)
    image = Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8))
    began = time.perf_counter()
    pixels = processor.resize(image)
    content_hash, data = processor.content_hash(pixels), pixels.tobytes()
    prepared = time.perf_counter() - began
    grid = processor.grid_of(*pixels.shape[:2])
    length = grid[1] * grid[2]
    span = PromptSpan(2, length, content_hash, grid=grid, pixels=data)
    found: dict[str, float] = {"image_tokens": length, "prepared_s": prepared}
    vision: Any = getattr(loop.executor, "vision", None)
    assert vision, "the model reads no images"
    began = time.perf_counter()
    vision.begin(span)
    while vision.advance().result().embeddings is None:
        pass
    found["tower_s"] = time.perf_counter() - began
    for name in ("first_token_s", "second_question_s"):
        text = rng.integers(100, 1000, NUM_TEXT_TOKENS).tolist()
        ids = [7, 8, *[processor.image_token_id] * length, *text]
        sampling = Sampling(1, temperature=0)
        found[name] = first_token_s(loop, Request(f"{number} {name}", ids, len(ids), sampling, spans=[span]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"an exported model's folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--sizes", nargs="+", type=int, default=[768, 1512], help="widths of the images in pixels")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds; the fastest is shown")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    logging.basicConfig(level="WARNING")
    folder = exported(args.model)
    config = Config(batch_size=4, device=args.device)
    executor = make_executor(folder, config)
    loop = EngineLoop(executor, allocate_cache(executor, config, Manifest.read(folder).max_seq_len), config)
    processor = ImageProcessor.read(folder)
    assert processor, "the model reads no images"
    processor = replace(processor, max_pixels=max(processor.max_pixels, max(args.sizes) ** 2))
    rows = {}
    for size in args.sizes:
        rounds = [measure(loop, processor, size, 10 * size + number) for number in range(args.rounds)]
        rows[str(size)] = {name: min(each[name] for each in rounds) for name in rounds[0]}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in rows[str(size)].items())
        print(f"{size} x {size}: {shown}", flush=True)
    print(json.dumps(rows), flush=True)
    executor.close()


if __name__ == "__main__":
    main()
