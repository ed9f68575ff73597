"""Gain of a draft model (SPECULATE_METHOD=draft), by default of the demo's, and its cost where it does not pay.

    python -m benchmarks.draft_model [--requests 1 4 8] [--rounds 7] [--temperature 0] [--threads 1] [--wrong]

Answers eight questions, or as many as run at once, with and without drafts in alternating rounds, and checks that the
answers are identical. The first round is not measured. Of each question or group of questions the fastest round counts,
and for the processor time the one that took least. With `--wrong` the weights of the draft model are permuted, so that
its drafts are not accepted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.bench import cpu_name
from engine.core.draft_counts import ACCEPTED, DRAFTED
from engine.garbage import collect_garbage_seldom
from engine.llm import LLM

ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "Tell me a story about a lighthouse.",
    "Write a poem about the sea.",
    "How does a computer work?",
    "What is a database?",
    "Tell me a story.",
    "Write a poem about the moon.",
    "What is the capital of France?",
    "Who are you?",
)


def times(llm: LLM, groups: list[list[str]], temperature: float) -> tuple[np.ndarray, list[list[int]]]:
    """Return the seconds and the processor seconds of each group of prompts, and the tokens of all answers."""
    sampling = {"max_dec_len": 256, "temperature": temperature, "infer_seed": 1}
    measured, tokens = [], []
    for prompts in groups:
        began, used = time.perf_counter(), time.process_time()
        answers = llm.generate(prompts, sampling, progress=False)
        measured.append((time.perf_counter() - began, time.process_time() - used))
        tokens += [answer.token_ids for answer in answers]
    return np.array(measured), tokens


def drafts_of(llm: LLM) -> dict[str, float]:
    prefixes = (f"{DRAFTED}/", f"{ACCEPTED}/")
    return {name: number for name, number in llm._loop.stats().items() if name.startswith(prefixes)}


def acceptance(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """Return the share of accepted drafts at each position."""
    counts = {name: number - before.get(name, 0) for name, number in after.items()}
    drafted = {name: number for name, number in counts.items() if name.startswith(DRAFTED) and number}
    return [round(counts[name.replace(DRAFTED, ACCEPTED)] / number, 2) for name, number in drafted.items()]


def wrong_draft(draft: Path, out: Path) -> Path:
    """Write a copy of a draft model with permuted weights to `out`, unless it is there. Return `out`."""
    if not out.exists():
        shutil.copytree(draft, out)
        rng = np.random.default_rng(0)
        tensors = load_file(draft / "model.safetensors")
        permuted = {name: rng.permuted(tensor.reshape(-1)).reshape(tensor.shape) for name, tensor in tensors.items()}
        save_file(permuted, out / "model.safetensors", metadata={"format": "pt"})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "demo_model"))
    parser.add_argument("--draft", default=str(ROOT / "demo_model" / "draft"))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-drafts", type=int, default=4)
    parser.add_argument("--wrong", action="store_true")
    args = parser.parse_args()
    settings = {"batch_size": max(args.requests), "cpu_threads": args.threads, "device": "cpu"}
    path = wrong_draft(Path(args.draft), Path("build/bench/wrong-draft")) if args.wrong else args.draft
    drafting = {"speculate_method": "draft", "speculate_model_path": str(path)}
    plain = LLM(args.model, **settings)
    draft = LLM(args.model, **settings, **drafting, speculate_max_draft_token_num=args.max_drafts)
    collect_garbage_seldom()
    questions = (QUESTIONS * max(args.requests))[: max(len(QUESTIONS), *args.requests)]
    prompts = [plain.tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    rows = []
    for count in args.requests:
        groups = [prompts[start : start + count] for start in range(0, len(prompts), count)]
        before, best = drafts_of(draft), np.full((2, len(groups), 2), np.inf)
        for number in range(args.rounds + 1):
            (off, expected), (on, tokens) = (times(llm, groups, args.temperature) for llm in (plain, draft))
            assert tokens == expected, "the answers differ"
            if number:
                best = np.minimum(best, [off, on])
        (off_s, off_cpu_s), (on_s, on_cpu_s) = best.sum(axis=1)
        shares, rate = acceptance(before, drafts_of(draft)), sum(map(len, tokens)) / off_s
        row = {"requests": count, "off": rate, "ratio": off_s / on_s, "cpu_ratio": off_cpu_s / on_cpu_s}
        rows.append(row | {"accepted": shares})
        speedup = f"{off_s / on_s:5.2f} times with them, {off_cpu_s / on_cpu_s:5.2f} times less processor time"
        print(f"{count:3} x {rate:8.1f} tok/s without drafts, {speedup}, accepted {shares}", flush=True)
    plain.close()
    draft.close()
    print(json.dumps({"hardware": cpu_name(), "temperature": args.temperature, "rows": rows}))


if __name__ == "__main__":
    main()
