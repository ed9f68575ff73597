"""Answers of a mixture of experts on two GPUs, split by width and by experts, compared with those on one.

    python -m benchmarks.gpu_ranks qwen3-30b-a3b --layers 24 --gpus 0 1

The weights are random, and the same in every run: a rank draws whole tensors of a checkpoint, whose values depend on
their names, and keeps its share of each. Values of bfloat16 are used in float32 as well. As in GPT-2 and most models
since, matrices whose products are added to the residual stream are initialized smaller the more layers there are:
otherwise a difference of one rounding grows from layer to layer, unlike in trained models. Several requests decode in
the same steps, then two alone. Log-probabilities are those of the likeliest tokens, up to the first token that differs.
The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.models.config_fields import read_json
from engine.models.families import read_model
from engine.models.formats import FORMATS
from engine.models.weights import Shard, TensorShard, Weight, weights_of

if TYPE_CHECKING:
    import torch

    from engine.graph import Graph

ONE, WIDTH, EXPERTS = "one GPU", "two, by width", "two, by experts"
SPLITS, DTYPES = (ONE, WIDTH, EXPERTS), ("float32", "bfloat16")
OUTPUT_MATRICES = ("o_proj", "down_proj", ".w2.")  # in names of tensors
LENGTHS, NUM_ALONE, NUM_TOKENS, NUM_LIKELIEST = (1, 24, 64, 127, 1, 24, 64, 127), 2, 64, 5
NUM_FDS = 2  # arguments of the process of another rank
Answer = dict[str, list[Any]]  # the tokens, and for each the likeliest tokens with their log-probabilities


def exported(shape: str, layers: int, dtype: str, split: str) -> Path:
    """Return the folder of the model, which is exported once and kept in build/bench."""
    out = Path("build/bench") / f"ranks-{shape}-{layers}-{dtype}-{split.rpartition(' ')[2]}"
    if not out.exists():
        from benchmarks.random_checkpoint import write_shape
        from engine.exporting.export import ExportOptions, export

        overrides = json.dumps({"num_hidden_layers": layers})
        options = ExportOptions(dtype=dtype, max_seq_len=1024, load_format="dummy", hf_overrides=overrides)
        options = replace(options, num_ranks=1 + (split != ONE), expert_parallel=split == EXPERTS)
        export(write_shape(shape, Path("build/bench") / f"{shape}-checkpoint"), out, options)
    return out


def draw_shares(
    weights: Mapping[str, Weight],
    num_layers: int,
    graph: Graph,
    constants: Mapping[str, np.ndarray],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return the parameters of a rank: its shares of random matrices, norms of one and biases of zero."""
    import torch

    def deviation(part: TensorShard) -> float:
        if "embed_tokens" in part.tensor:
            return 1.0
        is_output = any(name in part.tensor for name in OUTPUT_MATRICES)
        return (part.shape[1] * (2 * num_layers if is_output else 1)) ** -0.5

    def whole(part: TensorShard) -> torch.Tensor:
        if len(part.shape) == 1:
            return torch.full(part.shape, float("norm" in part.tensor), device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(part.tensor.encode()))
        numbers = torch.empty(part.shape, device=device).normal_(generator=generator)
        return numbers.mul_(deviation(part)).to(torch.bfloat16)

    tensors = {}
    for name, value in graph.parameters.items():
        if name in constants:
            tensors[name] = torch.from_numpy(constants[name]).to(device)
            continue
        parts = weights[name].parts
        assert not weights[name].of_heads, "latent attention is not supported"
        shares = [whole(part)[tuple(slice(axis.start, axis.stop) for axis in part.axes)] for part in parts]
        tensors[name] = torch.cat(shares).to(getattr(torch, value.dtype))
        assert tensors[name].shape == value.shape, f"the share of {name} is padded or in another order"
    return tensors


def with_shares(make_rank: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `engine.executors.make_rank` for random weights that are shares of the same model."""

    def made(graph_dir: Path, config: Any, membership: Any = None, *given: Any, **named: Any) -> Any:
        from engine.executors.cuda import weights
        from engine.exporting.manifest import Manifest

        manifest, rank = Manifest.read(graph_dir), membership.rank if membership else 0
        dtype = manifest.weight_format
        shard = Shard(FORMATS[dtype], dtype, manifest.block_size, rank, manifest.num_ranks)
        shard = replace(shard, expert_parallel=manifest.expert_parallel)
        config_json = read_json(graph_dir / "config.json")
        network = read_model(config_json).network(shard)
        weights.draw = partial(draw_shares, weights_of(network), config_json["num_hidden_layers"])
        return make_rank(graph_dir, config, membership, *given, **named)

    return made


def other_rank() -> int:
    """Run the process of a rank that is not the first."""
    from engine.executors.distributed import rank_process

    rank_process.make_rank = with_shares(rank_process.make_rank)
    return rank_process.main()


def compute(graph_dir: Path, num_ranks: int) -> list[Answer]:
    """Return the answers of this process and of the ranks that it starts."""
    from engine import executors
    from engine.core.loop import EngineLoop
    from engine.core.types import Request, Sampling
    from engine.executors.distributed import ranks
    from engine.executors.memory import allocate_cache
    from engine.exporting.manifest import Manifest
    from engine.settings.config import Config

    executors.make_rank = with_shares(executors.make_rank)
    ranks.RANK_PROCESS = "benchmarks.gpu_ranks"
    config = Config(device="gpu", mp_num=num_ranks, batch_size=8, max_num_batched_tokens=512, block_bs=2.0)
    executor = executors.make_executor(graph_dir, config)
    loop = EngineLoop(executor, allocate_cache(executor, config, 1024), config)
    rng, found = np.random.default_rng(0), []
    vocab_size = Manifest.read(graph_dir).vocab_size
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]
    sampling = Sampling(NUM_TOKENS, temperature=0, num_logprobs=NUM_LIKELIEST)
    for group in (prompts, *([each] for each in prompts[1 : 1 + NUM_ALONE])):
        requests = [Request(str(n), list(prompt), len(prompt), sampling) for n, prompt in enumerate(group)]
        likeliest: dict[str, list[Any]] = {request.request_id: [] for request in requests}
        for request in requests:
            loop.add(request)
        while not loop.is_idle:
            for update in loop.step():
                likeliest[update.request.request_id] += [each.top for each in update.logprobs or ()]
        for request in requests:
            tokens = request.token_ids[request.prompt_len :]
            found.append({"tokens": tokens, "likeliest": likeliest[request.request_id]})
    executor.close()
    return found


def differences(found: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    """Return the differences of log-probabilities of likely tokens while the tokens before them are equal."""
    values = []
    for ours, theirs in zip(found, expected, strict=True):
        for n, (one, other) in enumerate(zip(ours["likeliest"], theirs["likeliest"], strict=True)):
            if ours["tokens"][:n] != theirs["tokens"][:n]:
                break
            known = dict(map(tuple, other))
            values += [abs(value - known[token]) for token, value in one if token in known]
    return values


def compared(found: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, float]:
    values = differences(found, expected)
    equal = sum(ours["tokens"] == theirs["tokens"] for ours, theirs in zip(found, expected, strict=True))
    p50, p99, most = np.quantile(values, (0.5, 0.99, 1)).tolist()
    quantiles = {"mean": float(np.mean(values)), "p50": p50, "p99": p99, "max": most}
    return {"equal": equal, "answers": len(found), "values": len(values), **quantiles}


def start(graph_dir: Path, num_ranks: int, gpus: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_ranks", "--compute", str(graph_dir), str(num_ranks)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def answers_of(process: subprocess.Popen[str]) -> list[Answer]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a process ended with status {process.returncode}")
    return json.loads(out.splitlines()[-1])


def main() -> int:
    if len(sys.argv) == 1 + NUM_FDS and all(each.isdigit() for each in sys.argv[1:]):
        return other_rank()
    if sys.argv[1:2] == ["--compute"]:
        print(json.dumps(compute(Path(sys.argv[2]), int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("shape", help="of benchmarks.random_checkpoint, without latent attention")
    parser.add_argument("--layers", type=int, default=8, help="of the model; float32 has to fit on one GPU")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--splits", nargs="+", choices=("width", "experts"), default=["width", "experts"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="those that are compared")
    args = parser.parse_args()
    alone = {
        dtype: start(exported(args.shape, args.layers, dtype, ONE), 1, gpu)
        for dtype, gpu in zip(DTYPES, args.gpus, strict=True)
    }
    one = {dtype: answers_of(process) for dtype, process in alone.items()}
    report = {"bfloat16 and float32, one GPU": compared(one["bfloat16"], one["float32"])}
    print("bfloat16 and float32", *report.values(), flush=True)
    for split, dtype in itertools.product(args.splits, args.dtypes):
        name, folder = f"{dtype}, two, by {split}", exported(args.shape, args.layers, dtype, f"two, by {split}")
        report[name] = compared(answers_of(start(folder, 2, ",".join(args.gpus))), one[dtype])
        print(name, report[name], flush=True)
    print(json.dumps({"shape": args.shape, "layers": args.layers, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
