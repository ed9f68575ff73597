"""Gain and cost of drafts on a CPU at an acceptance that is given, above all at none:

    python -m benchmarks.cpu_drafts mtp [--shape glm-moe-0.6b] [--requests 1 8 32] [--acceptance 0 0.75]
        [--warm-up 1] [--rounds 9]

Weights are random, so drafts are never right. All of them are made and verified as usual; then a random number decides
of each draft whether it counts as accepted. Rounds with and without drafts, of prompts and answers with random tokens,
alternate on the same executor. The policy keeps what it has learned from round to round, also from those of the
warm-up. Figures are medians of the ratios of two neighbouring rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench import cpu_name, prompt_ids
from benchmarks.random_checkpoint import write_shape
from engine.core.loop import EngineLoop
from engine.core.types import Batch, Request, Sampling, StepOutput
from engine.executors import make_draft_model_proposer, make_host, make_mtp_proposer
from engine.executors.device_executor import DeviceExecutor
from engine.executors.memory import allocate_cache
from engine.executors.speculation.executor import SpeculativeExecutor
from engine.executors.speculation.lookup import LookupProposer
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Proposer
from engine.executors.step import Mask, StepInThread
from engine.exporting.export import ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

FOLDER, BLOCK_SIZE, MAX_SEQ_LEN = Path("build/bench"), 64, 4096


class Accepting:
    """CPU executor that accepts each draft by chance, up to the first that is not."""

    def __init__(self, executor: Any):
        self._executor, self.acceptance = executor, 0.0
        self._rng = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch) -> StepInThread:
        return StepInThread(self._executor.thread, batch, self.compute)

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        output: StepOutput = self._executor.compute(batch, wait_for_mask)
        if all(row.num_sampled <= 1 for row in batch.rows):
            return output
        token_ids = []
        for row, tokens in zip((row for row in batch.rows if row.num_sampled), output.token_ids, strict=True):
            drafts = list(row.token_ids)[len(row.token_ids) - row.num_sampled + 1 :]
            is_wrong = self._rng.random(len(drafts)) >= self.acceptance
            token_ids.append([*drafts[: int(np.argmax([*is_wrong, True]))], tokens[0]])
        return output._replace(token_ids=token_ids)


def exported(shape: str, *, mtp: bool) -> Path:
    """Return the folder of an exported shape without weights, which is made once."""
    out = FOLDER / f"cpu-drafts-{shape}{'-mtp' * mtp}"
    if not out.exists():
        options = ExportOptions(block_size=BLOCK_SIZE, max_seq_len=MAX_SEQ_LEN, load_format="dummy", mtp=mtp)
        export(write_shape(shape, FOLDER / f"{shape}-shape"), out, options, report=print)
    return out


def proposer_of(config: Config, folder: Path, executor: DeviceExecutor, draft_shape: str) -> Proposer:
    """Return the proposer of the method in the settings."""
    model = Manifest.read(folder)
    if config.speculate_method == "mtp":
        return make_mtp_proposer(executor, model, config)
    if config.speculate_method == "draft":
        proposer = make_draft_model_proposer(exported(draft_shape, mtp=False), model, config)
        assert proposer
        return proposer
    return LookupProposer.of(config)


def turn(executor: Any, num_blocks: int, config: Config, prompts: list[list[int]], answer_len: int) -> np.ndarray:
    """Answer the prompts. Return the seconds and the processor seconds that it took."""
    loop = EngineLoop(executor, num_blocks, config)
    began, used = time.perf_counter(), time.process_time()
    for index, prompt in enumerate(prompts):
        loop.add(Request(str(index), list(prompt), len(prompt), Sampling(answer_len, temperature=0)))
    while not loop.is_idle:
        loop.step()
    return np.array([time.perf_counter() - began, time.process_time() - used])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["mtp", "draft", "ngram", "suffix"])
    parser.add_argument("--shape", default="glm-moe-0.6b")
    parser.add_argument("--draft-shape", default="tiny", help="shape of the draft model")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.0, 0.75])
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--answer-len", type=int, default=192)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    folder = exported(args.shape, mtp=args.method == "mtp")
    config = Config(
        batch_size=max(args.requests),
        device="cpu",
        cpu_threads=args.threads,
        enable_prefix_caching=False,
        speculate_method=args.method,
        speculate_model_path="." if args.method == "draft" else "",
    )
    executor: Any = make_host(folder, config)
    accepting: Any = Accepting(executor)
    proposer = proposer_of(config, folder, executor, args.draft_shape)
    collect_garbage_seldom()
    model, rng, rows = Manifest.read(folder), np.random.default_rng(0), []
    num_blocks = allocate_cache(SpeculativeExecutor(accepting, 4, proposer), config, model.max_seq_len)
    for acceptance in args.acceptance:
        accepting.acceptance = acceptance
        for count in args.requests:
            drafting = SpeculativeExecutor(accepting, config.speculate_max_draft_token_num, proposer, DraftPolicy())
            ratios = []
            for number in range(args.warm_up + args.rounds):
                prompts = [prompt_ids(rng, model.vocab_size, args.prompt_len) for _ in range(count)]
                cases = [accepting, drafting][:: 1 if number % 2 else -1]
                if number < args.warm_up:
                    cases = [drafting]
                took = {case: turn(case, num_blocks, config, prompts, args.answer_len) for case in cases}
                if number >= args.warm_up:
                    ratios.append(took[accepting] / took[drafting])
            ratio, cpu_ratio = (statistics.median(each) for each in zip(*ratios, strict=True))
            step_ms = 1e3 * took[accepting][0] / args.answer_len
            spread = [round(float(each), 3) for each in np.quantile([each[1] for each in ratios], [0.25, 0.75])]
            rows.append({"requests": count, "acceptance": acceptance, "ratio": ratio, "cpu_ratio": cpu_ratio,
                         "cpu_quartiles": spread, "step_ms": step_ms})  # fmt: skip
            print(f"{count:3} x acceptance {acceptance:.2f}, steps of {step_ms:6.2f} ms: {ratio:5.3f} x with drafts,"
                  f" {cpu_ratio:5.3f} x in processor time (quartiles {spread})", flush=True)  # fmt: skip
    executor.close()
    print(json.dumps({"hardware": cpu_name(), "method": args.method, "shape": args.shape, "rows": rows}))


if __name__ == "__main__":
    main()
