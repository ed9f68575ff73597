"""Tables from the results of all turns: medians, ratios, and the limit of the machine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.random_checkpoint import SHAPES, tensors_of

Rates = dict[str, list[float]]  # case -> prefill and decode, or over HTTP the output rate; tokens per second
Runs = dict[tuple[str, str], dict[str, dict[int, list[float]]]]  # (engine, format) -> case -> round -> rates
BYTES = {"bf16": 2, "int8": 1, "int4": 0.53}  # bytes per weight; int4 has a bf16 scale for each 64 weights


def limit(case: tuple[int, int, int], shape: str, width: str, machine: tuple[float, float]) -> list[float]:
    """Return the prefill and decode rates that a machine with these bf16 FLOP/s and bytes/s could reach.

    A prompt takes the time of its operations, which run at twice the rate in int8. A decode step takes the time to read
    each weight and each request's keys and values once, or that of its operations if it is longer.
    """
    (num_requests, prompt_len, answer_len), config = case, SHAPES[shape]
    flops, bandwidth = machine[0] * (1 if width == "bf16" else 2), machine[1]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    head = config["vocab_size"] * hidden
    weights = sum(int(np.prod(sizes)) for sizes in tensors_of(config).values())  # the embedding is also the lm_head
    cache = layers * 2 * hidden // config["num_attention_heads"] * config["num_key_value_heads"] * 2  # bytes per token
    prompt = 2 * prompt_len * (weights - head) + 2 * head + 2 * layers * hidden * prompt_len**2
    context = prompt_len + answer_len / 2
    token = 2 * weights + 4 * layers * hidden * context
    read = weights * BYTES[width] + num_requests * context * cache
    step = max(read / bandwidth, num_requests * token / flops)
    return [prompt_len * flops / prompt, num_requests / step]


def runs_of(results: list[dict], width: str) -> Runs:
    """Return the rates of each run of each case, by round."""
    runs: Runs = defaultdict(lambda: defaultdict(dict))
    for result in results:
        if result["width"] == width:
            for case, rates in result["rates"].items():
                runs[result["engine"], result["format"]][case][result["round"]] = rates
    return runs


def medians(rounds: Iterable[list[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def ratios(ours: dict[int, list[float]], peers: list[dict[int, list[float]]]) -> list[float]:
    """Return the median ratios of our rates to the best peer's, over the rounds in which all took part. The best peer
    may differ between prefill and decode."""
    shared = [number for number in ours if all(number in peer for peer in peers)]
    return medians(
        [mine / max(theirs) for mine, *theirs in zip(ours[number], *(peer[number] for peer in peers), strict=True)]
        for number in shared
    )


def table(results: list[dict], width: str, labels: dict[str, str]) -> str:
    """Return a Markdown table with a row for each case and cells of `prefill / decode`."""
    runs = dict(sorted(runs_of(results, width).items(), key=lambda item: item[0][0] != "ours"))
    limits = runs.pop(("limit", ""), {})
    peers = [one for (engine, _), one in runs.items() if engine != "ours"]
    titles = {key: f"{labels[key[0]]} {key[1]}".removesuffix(" none") for key in runs}
    columns = {titles[key]: cells(of_cases, figure) for key, of_cases in runs.items()}
    for key in [key for key in runs if key[0] == "ours" and peers]:
        columns[f"{titles[key]} : best peer"] = {
            case: written(ratios(rounds, [peer[case] for peer in peers]), "{:.2f}".format)
            for case, rounds in runs[key].items()
        }
    if limits:
        columns["limit"] = cells(limits, figure)
    num_rounds = min(len(rounds) for of_cases in runs.values() for rounds in of_cases.values())
    lines = [[f"{width}, median of {num_rounds}", *columns], ["---"] * (1 + len(columns))]
    for case in next(iter(runs.values())):
        lines.append([case.replace("x", " x "), *(column[case] for column in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(of_cases: dict[str, dict[int, list[float]]], write: Callable[[float], str]) -> dict[str, str]:
    return {case: written(medians(rounds.values()), write) for case, rounds in of_cases.items()}


def written(rates: list[float], write: Callable[[float], str]) -> str:
    return " / ".join(map(write, rates))


def figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 99.95 else f"{rate:.1f}"
