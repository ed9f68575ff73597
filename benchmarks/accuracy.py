"""Cost of quantization in accuracy: `python -m benchmarks.accuracy [CHECKPOINT] [--device gpu]`, by default of the
bundled model on the CPU.

For every weight format, and for an 8-bit KV cache, the benchmark reports how far the distribution of the next token is
from that of float32 on the CPU (KL divergence in nats, mean and 99th percentile), how often the most likely token
differs, the largest error of that token's log-probability, and the perplexity, all on the bundled questions with their
answers, and how many of the 50 questions are answered word for word. Any other checkpoint reads random tokens. The last
line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.random_checkpoint import DEMO_MODEL
from engine.dtypes import held_as
from engine.exporting.export import QUANT_TYPES, ExportOptions, export
from engine.exporting.manifest import Manifest, rank_dir
from engine.graph import load
from engine.graph.run import run_graph
from engine.llm import LLM
from engine.ops import cpu
from engine.text.tokenizer import Tokenizer

EXPORTS = {"float32": ExportOptions("float32"), "bfloat16": ExportOptions("bfloat16")}
EXPORTS |= {name: ExportOptions("bfloat16", name) for name in QUANT_TYPES[1:] if name != "mxfp4"}
EXPORTS |= {"a8w8c8_fp8": ExportOptions("bfloat16", "a8w8_fp8", int8_cache=True)}
EXPORTS |= {"float32, int8 cache": ExportOptions("float32", int8_cache=True)}
QUESTIONS: list[dict[str, str]] = json.loads((DEMO_MODEL / "questions.json").read_text())
Tokens = list[int]
Model = Callable[[Mapping[str, np.ndarray]], np.ndarray]  # inputs of the graph -> logits f32 [T, V]


def bundled_texts(tokenizer: Tokenizer) -> list[Tokens]:
    chats = [
        tokenizer.render_chat([{"role": "user", "content": entry["question"]}]) + entry["answer"] for entry in QUESTIONS
    ]
    return [tokenizer.encode(chat) for chat in chats]


def random_texts(vocab_size: int) -> list[Tokens]:
    return np.random.default_rng(0).integers(3, vocab_size, (4, 128)).tolist()


def cpu_model(graph_dir: Path) -> Model:
    """Return a model that computes as the ops are defined: 8-bit floats are not converted to bfloat16."""
    graph, params = load(graph_dir)
    return lambda inputs: run_graph(graph, params, inputs, cpu)["logits"]


def gpu_model(graph_dir: Path) -> Model:
    """Return a model that runs on the GPU, or with TRITON_INTERPRET=1 without one."""
    import torch

    from engine.executors.cuda.load import RankFiles, load_program
    from engine.ops import cuda

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    program = load_program(RankFiles(rank_dir(graph_dir, 0), Manifest.read(graph_dir).graph()), device, cuda)

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        given = {name: torch.from_numpy(array) for name, array in inputs.items()}
        given = {
            name: each.view(torch.bfloat16) if each.dtype == torch.uint16 else each for name, each in given.items()
        }
        logits: np.ndarray = (
            program({name: each.to(device) for name, each in given.items()}).logits.float().cpu().numpy()
        )
        return logits

    return run


MODELS = {"cpu": cpu_model, "gpu": gpu_model}


def logprobs(graph_dir: Path, texts: list[Tokens], device: str = "cpu") -> Iterator[np.ndarray]:
    """Yield for each text the log-probabilities of the next token after each of its tokens, f64 [T, V]."""
    run, model = MODELS[device](graph_dir), Manifest.read(graph_dir)
    for token_ids in texts:
        count = len(token_ids)
        num_blocks = -(-count // model.block_size)
        everything = np.arange(count, dtype=np.int32)
        step = {
            "token_ids": np.array(token_ids, np.int32),
            "positions": everything,
            "query_starts": np.array([0, count], np.int32),
            "context_lens": np.zeros(1, np.int32),
            "block_tables": np.arange(num_blocks, dtype=np.int32)[None],
            "logit_rows": everything,
        }
        caches = {c.name: np.zeros(c.shape_of(num_blocks), held_as(c.dtype)) for c in model.graph().caches}
        logits = run(step | caches).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def compare(exact: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    divergence = np.concatenate([(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(exact, found, strict=True)])
    changed = np.concatenate([p.argmax(axis=1) != q.argmax(axis=1) for p, q in zip(exact, found, strict=True)])
    likely = [(np.arange(len(p)), p.argmax(axis=1)) for p in exact]
    errors = [np.abs(p[at] - q[at]).max() for at, p, q in zip(likely, exact, found, strict=True)]
    return {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(np.percentile(divergence, 99)),
        "changed": float(changed.mean()),
        "largest_error": float(max(errors)),
    }


def perplexity(texts: list[Tokens], found: list[np.ndarray]) -> float:
    of_tokens = [q[np.arange(len(ids) - 1), ids[1:]] for ids, q in zip(texts, found, strict=True)]
    return float(np.exp(-np.concatenate(of_tokens).mean()))


def num_right(graph_dir: Path, device: str) -> int:
    messages = [{"messages": [{"role": "user", "content": entry["question"]}]} for entry in QUESTIONS]
    answers = LLM(graph_dir, device=device).generate(messages, {"max_dec_len": 640, "temperature": 0}, progress=False)
    return sum(answer.text == entry["answer"] for answer, entry in zip(answers, QUESTIONS, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--device", choices=MODELS, default="cpu", help="device to compare with the CPU in float32")
    args = parser.parse_args()
    checkpoint, device = args.checkpoint, args.device
    is_bundled = checkpoint.resolve() == DEMO_MODEL
    exact: list[np.ndarray] = []
    rows = []
    print("weights                KL mean     KL p99   other token   largest error   perplexity   right")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in EXPORTS.items():
            graph_dir = Path(folder) / name
            export(checkpoint, graph_dir, options, lambda step: None)
            vocab_size = Manifest.read(graph_dir).vocab_size
            texts = bundled_texts(Tokenizer.load(graph_dir)) if is_bundled else random_texts(vocab_size)
            exact = exact or list(logprobs(graph_dir, texts))
            found = list(logprobs(graph_dir, texts, device))
            row = {
                "weights": name,
                **compare(exact, found),
                "perplexity": perplexity(texts, found),
            }
            row |= {"right": num_right(graph_dir, device)} if is_bundled else {}
            rows.append(row)
            print(
                f"{name:20}{row['kl_mean']:10.6f}{row['kl_p99']:11.6f}{row['changed']:14.2%}"
                f"{row['largest_error']:16.3f}{row['perplexity']:13.3f}{row.get('right', '-'):>8}",
                flush=True,
            )
    print(json.dumps({"checkpoint": checkpoint.name, "device": device, "rows": rows}))


if __name__ == "__main__":
    main()
