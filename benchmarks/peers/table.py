"""From the results of all turns to tables: medians, ratios, and what the machine could do at most."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from benchmarks.random_checkpoint import SHAPES, tensors_of

Rates = dict[str, list[float]]  # case -> prefill and decode, or what is answered over HTTP: tokens a second
BYTES = {"bf16": 2, "int8": 1, "int4": 0.53}  # a weight; int4 with a bf16 scale for each 64


def limit(case: tuple[int, int, int], shape: str, width: str, machine: tuple[float, float]) -> list[float]:
    """Of a machine with so many bf16 FLOP/s and so many bytes/s.

    A prompt is its products and sums, in int8 at twice the rate. A step reads each weight and each request's keys and
    values once, or is its products and sums where that takes longer.
    """
    (num_requests, prompt_len, answer_len), config = case, SHAPES[shape]
    flops, bandwidth = machine[0] * (1 if width == "bf16" else 2), machine[1]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    head = config["vocab_size"] * hidden
    weights = sum(int(np.prod(sizes)) for sizes in tensors_of(config).values())  # the head's are the embedding's
    cache = layers * 2 * hidden // config["num_attention_heads"] * config["num_key_value_heads"] * 2  # bytes a token
    prompt = 2 * prompt_len * (weights - head) + 2 * head + 2 * layers * hidden * prompt_len**2
    context = prompt_len + answer_len / 2
    token = 2 * weights + 4 * layers * hidden * context
    read = weights * BYTES[width] + num_requests * context * cache
    step = max(read / bandwidth, num_requests * token / flops)
    return [prompt_len * flops / prompt, num_requests / step]


def medians(results: list[dict], width: str) -> dict[tuple[str, str], Rates]:
    """(engine, format) -> its rates, each the median over the rounds."""
    runs: dict[tuple[str, str], list[Rates]] = defaultdict(list)
    for result in results:
        if result["width"] == width:
            runs[result["engine"], result["format"]].append(result["rates"])
    return {
        key: {
            case: [statistics.median(each) for each in zip(*(one[case] for one in rounds), strict=True)]
            for case in rounds[0]
        }
        for key, rounds in runs.items()
    }


def ratios(ours: Rates, peers: list[Rates]) -> Rates:
    """To the best peer, which need not be the same one in prefill and in decode."""
    return {
        case: [mine / max(theirs) for mine, *theirs in zip(rates, *(peer[case] for peer in peers), strict=True)]
        for case, rates in ours.items()
    }


def table(results: list[dict], width: str, labels: dict[str, str]) -> str:
    """Markdown: a row for each case, `prefill / decode`."""
    rates = dict(sorted(medians(results, width).items(), key=lambda item: item[0][0] != "ours"))
    limits = rates.pop(("limit", ""), {})
    peers = [one for (engine, _), one in rates.items() if engine != "ours"]
    titles = {key: f"{labels[key[0]]} {key[1]}".removesuffix(" none") for key in rates}
    columns = {titles[key]: cells(one, figure) for key, one in rates.items()}
    for key in [key for key in rates if key[0] == "ours" and peers]:
        columns[f"{titles[key]} : best peer"] = cells(ratios(rates[key], peers), "{:.2f}".format)
    if limits:
        columns["limit"] = cells(limits, figure)
    num_rounds = min(sum(r["width"] == width and (r["engine"], r["format"]) == key for r in results) for key in rates)
    lines = [[f"{width}, median of {num_rounds}", *columns], ["---"] * (1 + len(columns))]
    for case in next(iter(rates.values())):
        lines.append([case.replace("x", " x "), *(column[case] for column in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(rates: Rates, form: Callable[[float], str]) -> dict[str, str]:
    return {case: " / ".join(map(form, each)) for case, each in rates.items()}


def figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 99.95 else f"{rate:.1f}"
