"""Gain of drafts on one GPU, at an acceptance that is given, and their cost:

    python -m benchmarks.gpu_drafts eagle3 [--requests 1 8 64] [--acceptance 0.75] [--drafts 3] [--rounds 2]

Weights are random, in the shapes of Llama-3-8B with an EAGLE-3 head, of GLM-4.5-Air with its MTP layer (`mtp`), or of
Qwen2.5-7B with Qwen2.5-0.5B (`draft`), so their drafts are never right. GLM-4.5-Air has 8 of its 46 layers in bfloat16,
unless `--layers 46 --quant weight_only_int4` stores them all in 4 bits. All drafts are made and
verified as usual; then a sequence of numbers between 0 and 1 decides how many of them count as accepted. Its numbers
are evenly distributed, so that two runs of equal length accept equally many. Decoding without drafts, with all drafts,
and with those that the policy chooses, which has seen other requests before, alternates. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_checkpoint import LLAMA3, SHAPES
from engine.core.executor import Executor, Step
from engine.core.loop import EngineLoop
from engine.core.types import Batch, Request, Sampling, StepOutput
from engine.executors.cuda.draft_model import CudaDraftModel, CudaMtpLayer
from engine.executors.cuda.executor import CudaExecutor
from engine.executors.memory import allocate_cache
from engine.executors.speculation.draft_model import DraftRow
from engine.executors.speculation.draft_slots import SlotSizes
from engine.executors.speculation.executor import SpeculativeExecutor, with_speculation
from engine.executors.speculation.model_proposer import DraftModelProposer
from engine.executors.speculation.mtp_proposer import MtpProposer
from engine.executors.speculation.policy import DraftPolicy
from engine.exporting.export import QUANT_TYPES, ExportOptions, export
from engine.exporting.manifest import Manifest
from engine.garbage import collect_garbage_seldom
from engine.settings.config import Config

FOLDER, MAX_SEQ_LEN = Path("build/bench"), 8192
WARM_UP, MEASURED, LEARNING = 128, 512, 320  # tokens of each request
MANY, MEASURED_OF_MANY = 64, 192  # requests from which on fewer tokens of each are measured
GOLDEN = (5**0.5 - 1) / 2
HEAD = LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "draft_vocab_size": 32000,
}
GLM_AIR = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "bos_token_id": 151331,
    "eos_token_id": 151329,
}
MODELS = {"eagle3": SHAPES["llama-3-8b"], "mtp": GLM_AIR, "draft": SHAPES["qwen2.5-7b"]}


class Accepting:
    """Executor that computes steps as usual, but accepts each draft with a probability, up to the first that is not."""

    def __init__(self, executor: Executor, acceptance: float):
        self._executor, self._acceptance = executor, acceptance
        self._number = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, batch: Batch) -> AcceptingStep:
        return AcceptingStep(self, self._executor.launch(batch), batch)

    def wait(self, step: Step) -> StepOutput:
        return step.result()

    def right(self, num_drafts: int) -> int:
        """Return how many of the first drafts count as accepted."""
        self._number = (self._number + GOLDEN) % 1
        return sum(self._number < self._acceptance**position for position in range(1, num_drafts + 1))


class AcceptingStep:
    """A launched step of `Accepting`."""

    def __init__(self, executor: Accepting, step: Step, batch: Batch):
        self._executor, self._step, self._batch = executor, step, batch

    def result(self) -> StepOutput:
        output = self._executor.wait(self._step)
        sampled, token_ids = [row for row in self._batch.rows if row.num_sampled], []
        for row, tokens in zip(sampled, output.token_ids, strict=True):
            drafts = list(row.token_ids)[len(row.token_ids) - row.num_sampled + 1 :]
            token_ids.append([*drafts[: self._executor.right(len(drafts))], tokens[0]])
        return output._replace(token_ids=token_ids)


class Timed:
    """Function that adds up the seconds of its calls."""

    def __init__(self, function: Callable):
        self._function, self.seconds = function, 0.0

    def __call__(self, *given: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._function(*given)
        finally:
            self.seconds += time.perf_counter() - began


def exported(method: str, num_layers: int = 0, quant_type: str = "none") -> Path:
    """Return the folder of the exported model of a method, which is made once. `num_layers`, unless it is 0, replaces
    the number of layers of its shape."""
    keys = MODELS[method] | ({"num_hidden_layers": num_layers} if num_layers else {})
    head = str(write_config("head", HEAD)) if method == "eagle3" else ""
    name = f"drafts-{method}" + f"-{num_layers}" * bool(num_layers)
    return exported_as(name, keys, ExportOptions(quant_type=quant_type, mtp=method == "mtp", eagle3=head))


def exported_draft(quant_type: str = "none") -> Path:
    return exported_as("drafts-small", SHAPES["qwen2.5-0.5b"], ExportOptions(quant_type=quant_type))


def exported_as(name: str, keys: dict[str, Any], options: ExportOptions) -> Path:
    """Return the folder of an exported model with random weights, which is made once."""
    out = FOLDER / (name if options.quant_type == "none" else f"{name}-{options.quant_type}")
    if not out.exists():
        options = replace(options, max_seq_len=MAX_SEQ_LEN, load_format="dummy", block_size=16)
        export(write_config(f"{name}-shape", keys), out, options, report=print)
    return out


def write_config(name: str, keys: dict[str, Any]) -> Path:
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def proposer_of(method: str, draft_quant: str, executor: CudaExecutor, config: Config) -> DraftModelProposer:
    model = Manifest.read(executor.runner.graph_dir)
    if method == "draft":
        sizes = SlotSizes.of(model, config.batch_size)
        return DraftModelProposer(
            CudaDraftModel.load(exported_draft(draft_quant), executor.runner, config, sizes), model.vocab_size
        )
    layer = CudaMtpLayer(executor.runner, executor.load_draft_graph(method), config)
    return MtpProposer(layer, model.vocab_size, method)


def answer_room(count: int) -> int:
    """Return the tokens for which each of `count` requests has room behind its prompt."""
    return 1024 if count < MANY else 512


def measure(executor: Executor, num_blocks: int, config: Config, count: int, context: int) -> dict[str, float]:
    """Return the tokens, the steps, the seconds, and the seconds of the parts of the steps."""
    loop, rng = EngineLoop(executor, num_blocks, config), np.random.default_rng(0)
    seen: set[str] = set()
    for number in range(count):
        ids = rng.integers(100, 100000, context).tolist()
        loop.add(Request(str(number), ids, context, Sampling(answer_room(count) - 100, temperature=0)))
    while len(seen) < count:
        seen |= {update.request.request_id for update in loop.step()}
    generate(loop, WARM_UP * count)
    parts = parts_of(executor)
    timed = {part: Timed(getattr(owner, name)) for part, (owner, name) in parts.items()}
    for part, (owner, name) in parts.items():
        setattr(owner, name, timed[part])
    torch.cuda.synchronize()
    began = time.perf_counter()
    num_tokens, num_steps = generate(loop, (MEASURED if count < MANY else MEASURED_OF_MANY) * count)
    seconds = time.perf_counter() - began
    for owner, name in parts.values():
        delattr(owner, name)
    for number in range(count):
        loop.drop(str(number))
    while not loop.is_idle:
        loop.step()
    parts_s = {part: function.seconds for part, function in timed.items()}
    return {"tokens": num_tokens, "steps": num_steps, "seconds": seconds, **parts_s}


def summary(rounds: list[dict[str, float]], count: int) -> dict[str, float]:
    """Return the rate of tokens, the tokens that a row gets in a step, and the times of a step and its parts."""
    total = {name: sum(each[name] for each in rounds) for name in rounds[0]}
    num_tokens, num_steps, seconds = (total.pop(name) for name in ("tokens", "steps", "seconds"))
    return {
        "tok_s": num_tokens / seconds,
        "step_ms": 1e3 * seconds / num_steps,
        "tokens": num_tokens / num_steps / count,
        **{f"{part}_ms": 1e3 * part_s / num_steps for part, part_s in total.items()},
    }


def parts_of(executor: Any) -> dict[str, tuple[Any, str]]:
    """Return the calls of a step with drafts whose times are measured, as object and method. `propose` contains
    `submit`, the launch of the draft model, and `resolve` is the time spent waiting for it. `launch` and `wait` are
    those of the step that verifies."""
    proposer = getattr(executor, "_proposer", None)
    if proposer is None:
        return {}
    model, accepting = proposer._model, executor._executor
    parts = {"propose": (proposer, "propose"), "submit": (model._graph, "run"), "resolve": (model, "wait")}
    parts |= {"launch": (accepting, "launch"), "wait": (accepting, "wait")}
    return parts | {name: (proposer, name) for name in ("hidden_states", "add_hidden_states", "after_plain_step")}


def generate(loop: EngineLoop, num_wanted: int) -> tuple[int, int]:
    """Run steps until all requests together have got so many tokens. Return the numbers of tokens and of steps."""
    num_tokens = num_steps = 0
    while num_tokens < num_wanted:
        num_tokens += sum(len(update.token_ids) for update in loop.step())
        num_steps += 1
    return num_tokens, num_steps


def graph_ms(executor: CudaExecutor, num_rows: int, num_tokens: int, context: int) -> float:
    """Return the time of the model in a step with so many tokens for each row, without what the host does. Infinity if
    the step is not captured."""
    total, width = num_rows * num_tokens, -(-(context + num_tokens) // executor.block_size)
    starts = np.arange(0, total + 1, num_tokens, dtype=np.int32)
    arrays = {"token_ids": np.arange(total), "positions": np.arange(total) % num_tokens + context}
    arrays |= {"context_lens": np.full(num_rows, context), "logit_rows": np.arange(total)}
    inputs = {name: each.astype(np.int32) for name, each in arrays.items()} | {"query_starts": starts}
    inputs["block_tables"] = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    shape = executor.runner.graphs.shape_for(inputs)
    if shape is None:
        return float("inf")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(25):
        if number == 5:
            begin.record()
        executor.runner.graphs.replay(inputs, shape)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 20


def draft_graph_ms(proposer: DraftModelProposer, num_rows: int, num_drafts: int, context: int) -> float:
    """Return the time of a run of the draft model behind a step with accepted drafts, without what the host does
    between runs."""
    model: Any = proposer._model
    rows = [DraftRow(slot, context, [100, 101], True, 1) for slot in range(num_rows)]
    inputs = model._inputs(rows, num_drafts)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(25):
        if number == 5:
            begin.record()
        model._graph.run(inputs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 20


def learn(executor: Executor, num_blocks: int, config: Config, count: int) -> None:
    """Let the policy of `executor` see other requests."""
    loop = EngineLoop(executor, num_blocks, config)
    for number in range(count):
        sampling = Sampling(answer_room(count) - 100, temperature=0)
        loop.add(Request(str(number), [100 + number] * 100, 100, sampling))
    generate(loop, LEARNING * count)
    for number in range(count):
        loop.drop(str(number))
    while not loop.is_idle:
        loop.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=MODELS)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="of the served model; default: of its shape")
    parser.add_argument("--quant", choices=QUANT_TYPES, default="none", help="QUANT_TYPE of the served model")
    parser.add_argument("--draft-quant", choices=QUANT_TYPES, default="none", help="QUANT_TYPE of the draft model")
    parser.add_argument("--invariant", action="store_true", help="with BATCH_INVARIANT=1")
    args = parser.parse_args()
    config = Config(
        device="gpu",
        batch_size=max(args.requests),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        max_cached_task_num=10000,
        batch_invariant=args.invariant,
        num_gpu_blocks_override=max(each * (args.context + answer_room(each)) for each in args.requests) // 16 + 1024,
        block_ratio=2.0,
    )
    drafting_config = replace(config, speculate_method=args.method, speculate_max_draft_token_num=args.drafts)
    folder = exported(args.method, args.layers, args.quant)
    executor = CudaExecutor(folder, drafting_config)  # captures steps with drafts, too
    proposer = proposer_of(args.method, args.draft_quant, executor, drafting_config)
    accepting: Any = Accepting(executor, args.acceptance)
    drafting = with_speculation(accepting, drafting_config, None, proposer)
    collect_garbage_seldom()
    num_blocks = allocate_cache(drafting, drafting_config, MAX_SEQ_LEN)
    print(f"{torch.cuda.get_device_name()}, {args.method}, {num_blocks} blocks", flush=True)
    rows: list[dict[str, Any]] = []
    for count in args.requests:
        decode_ms, verify_ms = (
            graph_ms(executor, count, num_tokens, args.context + 200) for num_tokens in (1, args.drafts + 1)
        )
        run_ms = draft_graph_ms(proposer, count, args.drafts, args.context + 200)
        print(
            f"{count:3} x the graph alone: {decode_ms:.3f} ms, with drafts {verify_ms:.3f}, drafting {run_ms:.3f}",
            flush=True,
        )
        cases: dict[str, tuple[Executor, Config]] = {"without": (executor, config)}
        for name, policy in (("all", None), ("policy", DraftPolicy(runs_ahead=True))):
            made = SpeculativeExecutor(accepting, args.drafts, proposer, policy)
            cases[name] = made, drafting_config
        learn(cases["policy"][0], num_blocks, drafting_config, count)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(args.rounds if count < MANY else 1):
            for name, (each, settings) in cases.items():
                measured[name].append(measure(each, num_blocks, settings, count, args.context))
        off = 0.0
        for name, (each, _) in cases.items():
            row = summary(measured[name], count)
            off = off or row["tok_s"]
            rows.append({"requests": count, "drafts": name, **row, "ratio": row["tok_s"] / off})
            print(
                f"{count:3} x {name:8}{row['tok_s']:9.0f} tok/s {row['tok_s'] / off:5.2f} x, step {row['step_ms']:6.2f}"
                f" ms, {row['tokens']:.2f} tokens a row",
                *(f"{name} {number:.3f}" for name, number in row.items() if name[:-3] in parts_of(each)),
                flush=True,
            )
    print(json.dumps({"device": torch.cuda.get_device_name(), "method": args.method, "rows": rows}))


if __name__ == "__main__":
    main()
