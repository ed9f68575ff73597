"""This engine and what a user would take instead, on the same weights, in turn: `make bench-peers`, or

    python -m benchmarks.peers --peers llama openvino vllm --rounds 5

Random weights in the shape of Qwen2.5-0.5B; each rival is installed into an environment of its own. In each round every
engine has its turn in every width of weights, then over HTTP with 1, 8 and 32 clients that stream; machines drift, so
only what ran in turn can be compared. A turn's rates are a line of the file of results: a call that was ended goes on
where it was, also with turns that others on the machine disturbed, and another file is another sitting. A rival that
cannot be installed, or fails, is said so and left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench import cpu_name
from benchmarks.kernels import measured_limits
from benchmarks.peers import serve
from benchmarks.peers.clock import CASES, MAX_OTHERS, case_name
from benchmarks.peers.rivals import RIVALS, WORK, Failed
from benchmarks.peers.table import Rates, limit, table
from benchmarks.random_checkpoint import make_checkpoint
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.ops import cpu

SHAPE = "qwen2.5-0.5b"
NAMES = [rival.name for rival in RIVALS]
FORMATS = {  # of the machine's limit, and of the engines in turn
    "bf16": {"limit": [""], "ours": ["none"], "llama": ["bf16"], "openvino": ["fp16"], "vllm": ["bf16"]},
    "int8": {
        "limit": [""],
        "ours": ["weight_only_int8", "a8w8"],
        "llama": ["q8_0"],
        "openvino": ["int8"],
        "vllm": ["w8a8"],
    },
    "int4": {"limit": [""], "ours": ["weight_only_int4"], "llama": ["q4_0"], "openvino": ["int4"]},
    "HTTP": {"ours": ["none"], "llama": ["bf16"], "vllm": ["bf16"]},
}


@dataclass(frozen=True)
class Turn:
    round: int
    width: str
    engine: str
    format: str


def turns(num_rounds: int, engines: list[str]) -> Iterator[Turn]:
    for number in range(1, num_rounds + 1):
        for width, formats in FORMATS.items():
            for engine in ["limit", "ours", *engines]:
                for format in formats.get(engine, []):
                    yield Turn(number, width, engine, format)


def open_turns(all_turns: Iterator[Turn], results: list[dict]) -> list[Turn]:
    done = {Turn(*(result[name] for name in ("round", "width", "engine", "format"))) for result in results}
    return [turn for turn in all_turns if turn not in done]


def rates_of(turn: Turn, checkpoint: Path) -> tuple[Rates, float]:
    """And the cores that others used meanwhile, as far as it is known."""
    if turn.engine == "limit":
        machine = measured_limits(cpu.num_threads())
        return {case_name(case): limit(case, SHAPE, turn.width, machine) for case in CASES}, 0
    if turn.engine == "ours":
        model = export_cached(checkpoint, WORK / "exported", ExportOptions(quant_type=turn.format))
        if turn.width == "HTTP":
            return serve.ours(model, turn.round), 0
        command = [sys.executable, "-m", "benchmarks.peers.ours", str(model), str(cpu.num_threads())]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        [rival] = [one for one in RIVALS if one.name == turn.engine]
        model = rival.form_of(checkpoint, turn.format)
        if turn.width == "HTTP":
            return serve.theirs(rival, model, turn.round), 0
        printed = rival.measure(model)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    return {row["case"]: row["rates"] for row in rows}, max(row["others"] for row in rows)


def installed(names: list[str]) -> list[str]:
    found = []
    for rival in RIVALS:
        if rival.name in names:
            try:
                rival.install_once()
                found.append(rival.name)
            except Failed as error:
                print(f"left out, as it could not be installed: {error}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--results", type=Path, default=WORK / "results.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no turn begins later; call again to go on")
    args = parser.parse_args()
    started = time.monotonic()
    engines, checkpoint = installed(args.peers), make_checkpoint(SHAPE, WORK / SHAPE)
    results = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    for turn in open_turns(turns(args.rounds, engines), results):
        if turn.width not in args.widths or time.monotonic() - started > args.seconds:
            continue
        try:
            rates, others = rates_of(turn, checkpoint)
        except Failed as error:
            print(f"left out of round {turn.round}, {turn.width}, {turn.format}: {error}", flush=True)
            continue
        if others > MAX_OTHERS:
            print(f"not counted, as others used {others} cores: {turn}", flush=True)
            continue
        results.append(asdict(turn) | {"others": others, "rates": rates})
        with args.results.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
        print(
            *asdict(turn).values(),
            {case: [round(rate, 1) for rate in each] for case, each in rates.items()},
            flush=True,
        )
    print(f"\n{cpu_name()}, {cpu.num_threads()} threads; prefill / decode tok/s, over HTTP output tok/s")
    labels = {rival.name: rival.label for rival in RIVALS} | {"ours": "ours"}
    for width in {result["width"]: None for result in results if result["engine"] != "limit"}:
        print(f"\n{table(results, width, labels)}")


if __name__ == "__main__":
    main()
