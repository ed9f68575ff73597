"""Comparison of this engine with alternatives, on the same weights, in turn: `make bench-peers`, or

    python -m benchmarks.peers --peers llama openvino vllm --rounds 5

Random weights in a shape of benchmarks.random_checkpoint (`--shape`); each rival is installed into its own environment.
All engines with the same weight width are loaded, and in every round they answer a case one after the other while the
others wait: the memory of a machine can be half as fast a minute later, so only adjacent runs can be compared. Over
HTTP, with 1, 8 and 32 streaming clients, servers are started in turn. The rates of each turn are one line of the
results file of the shape. A run that was interrupted continues where it stopped and repeats turns that other load on
the machine disturbed; another results file starts a separate run. A rival that cannot be installed, or fails, is
reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.bench import cpu_name
from benchmarks.kernels import measured_limits
from benchmarks.peers import serve
from benchmarks.peers.clock import CASES, MAX_OTHERS, case_name
from benchmarks.peers.rivals import RIVALS, WORK, Failed, Loaded
from benchmarks.peers.table import Rates, limit, table
from benchmarks.random_checkpoint import SHAPES, make_checkpoint
from engine.exporting.cache import export_cached
from engine.exporting.export import ExportOptions
from engine.ops import cpu

SHAPE = "qwen2.5-0.5b"
LIMITED = ("llama", "qwen2")  # model types that `table.limit` describes; benchmarks.decode has limits of all
BY_NAME = {rival.name: rival for rival in RIVALS}
ALL_CASES = {case_name(case): case for case in CASES}
FORMATS = {  # columns: the machine's limit, then the engines in turn
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
    """One measurement: an engine and a format answer a case in one round."""

    width: str
    round: int
    case: str  # empty over HTTP, where a turn covers all cases
    engine: str
    format: str


def turns(num_rounds: int, engines: list[str], cases: Sequence[str] = tuple(ALL_CASES)) -> Iterator[Turn]:
    for width, formats in FORMATS.items():
        for number, case in itertools.product(range(1, num_rounds + 1), [""] if width == "HTTP" else cases):
            for engine in engines:
                for format in formats.get(engine, []):
                    yield Turn(width, number, case, engine, format)


def open_turns(all_turns: Iterator[Turn], results: list[dict]) -> list[Turn]:
    done = {Turn(*(result[field.name] for field in fields(Turn))) for result in results}
    return [turn for turn in all_turns if turn not in done]


class Engines:
    """Engines with one width of weights. Loads each engine when its first turn needs it."""

    def __init__(self, shape: str, checkpoint: Path):
        self._shape, self._checkpoint = shape, checkpoint
        self._loaded: dict[tuple[str, str], Loaded] = {}

    def rates(self, turn: Turn) -> tuple[Rates, float]:
        """Run a turn. Return its rates, and the number of cores that other processes used meanwhile (0 if unknown)."""
        if turn.engine == "limit":
            machine = measured_limits(cpu.num_threads())
            return {turn.case: limit(ALL_CASES[turn.case], self._shape, turn.width, machine)}, 0
        if turn.width == "HTTP":
            return self._over_http(turn), 0
        key = turn.engine, turn.format
        if key not in self._loaded:
            self._loaded[key] = self._load(*key)
        rates, others = self._loaded[key].answer(turn.case)
        return {turn.case: rates}, others

    def close(self) -> None:
        for engine in self._loaded.values():
            engine.close()
        self._loaded.clear()

    def _ours(self, format: str) -> Path:
        return export_cached(self._checkpoint, WORK / "exported", ExportOptions(quant_type=format))

    def _load(self, engine: str, format: str) -> Loaded:
        if engine == "ours":
            command = [sys.executable, "-m", "benchmarks.peers.ours", str(self._ours(format)), str(cpu.num_threads())]
            return Loaded("ours", WORK / "log", args=command)
        rival = BY_NAME[engine]
        return rival.loaded(rival.converted(self._checkpoint, format))

    def _over_http(self, turn: Turn) -> Rates:
        if turn.engine == "ours":
            return serve.ours(self._ours(turn.format), turn.round)
        rival = BY_NAME[turn.engine]
        return serve.theirs(rival, rival.converted(self._checkpoint, turn.format), turn.round)


def answered(todo: Iterable[Turn], shape: str, until: float) -> Iterator[dict]:
    """Yield the results of turns that begin before `until`. Turns that fail or are disturbed yield nothing."""
    checkpoint, failed = make_checkpoint(shape, WORK / shape), set[tuple[str, str, str]]()
    for _, of_width in itertools.groupby(todo, lambda turn: turn.width):
        with contextlib.closing(Engines(shape, checkpoint)) as loaded:
            for turn in of_width:
                who = turn.width, turn.engine, turn.format
                if who in failed or time.monotonic() > until:
                    continue
                try:
                    rates, others = loaded.rates(turn)
                except Failed as error:
                    failed.add(who)
                    print(f"left out from round {turn.round} on, {turn.width}, {turn.format}: {error}", flush=True)
                    continue
                if others > MAX_OTHERS:
                    print(f"not counted, as others used {others} cores: {turn}", flush=True)
                    continue
                rounded = {case: [round(rate, 1) for rate in each] for case, each in rates.items()}
                print(turn.round, *who, rounded, flush=True)
                yield asdict(turn) | {"others": others, "rates": rates}


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
    parser.add_argument("--shape", default=SHAPE, choices=SHAPES)
    parser.add_argument("--peers", nargs="*", default=list(BY_NAME), choices=BY_NAME)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--cases", nargs="+", default=list(ALL_CASES), choices=ALL_CASES)
    parser.add_argument("--results", type=Path, help="default: build/peers/results-SHAPE.jsonl")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no later turn; call again to continue"
    )
    args = parser.parse_args()
    started = time.monotonic()
    engines = ["ours", *installed(args.peers)]
    if SHAPES[args.shape]["model_type"] in LIMITED:
        engines.insert(0, "limit")
    path = args.results or WORK / f"results-{args.shape}.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    every = turns(args.rounds, engines, args.cases)
    todo = [turn for turn in open_turns(every, results) if turn.width in args.widths]
    for result in answered(todo, args.shape, started + args.seconds):
        results.append(result)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
    print(f"\n{args.shape}, {cpu_name()}, {cpu.num_threads()} threads")
    print("prefill / decode tok/s, over HTTP output tok/s")
    labels = {rival.name: rival.label for rival in RIVALS} | {"ours": "ours"}
    for width in {result["width"]: None for result in results if result["engine"] != "limit"}:
        print(f"\n{table(results, width, labels)}")


if __name__ == "__main__":
    main()
