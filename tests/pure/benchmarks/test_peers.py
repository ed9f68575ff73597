"""The benchmark against other engines: the clock, what is left to do after an interruption, the tables' arithmetic."""

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import clock as clock_module
from benchmarks.peers.table import limit, table
from benchmarks.random_checkpoint import SHAPES

CASES = [clock_module.case_name(case) for case in clock_module.CASES]


def a_result(engine, *rates, number=1, format="x", width="bf16"):
    cases = {f"{index}x128": rate for index, rate in enumerate(rates, 1)}
    return {"round": number, "width": width, "engine": engine, "format": format, "others": 0.0, "rates": cases}


def test_prefill_ends_with_the_last_first_token_and_tokens_of_that_step_are_none_of_the_decode(monkeypatch):
    now = iter([10.0, 11.0, 11.5, 12.0, 12.0004, 13.0, 14.0])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(now))
    clock = clock_module.Clock()
    clock.start(2)
    for request in (0, 0, 1, 0, 0, 1):  # the first request is ahead; two of its tokens come in the step of the other's
        clock.tick(request, 1)
    assert clock.rates(num_prompt_tokens=256) == [256 / 2, 2 / 2]


def test_a_repeated_call_goes_on_with_the_turns_that_have_no_result():
    every = list(peers.turns(2, ["limit", "ours", "llama", "vllm"]))
    assert [turn.engine for turn in every[:5]] == ["limit", "ours", "llama", "vllm", "limit"]
    assert [(turn.round, turn.case) for turn in every[:24:4]] == [*((1, case) for case in CASES), (2, CASES[0])]
    assert {turn.format for turn in every if turn.width == "int8"} == {"", "weight_only_int8", "a8w8", "q8_0", "w8a8"}
    assert not any(turn.engine == "vllm" and turn.width == "int4" for turn in every)
    assert {turn.case for turn in every if turn.width == "HTTP"} == {""}
    done = [peers.asdict(turn) | {"others": 0.0, "rates": {}} for turn in every[:22] if turn.engine != "vllm"]
    assert peers.open_turns(iter(every), done) == [turn for turn in every[:22] if turn.engine == "vllm"] + every[22:]


def test_a_cell_is_the_median_of_the_rounds_and_a_ratio_that_of_ratios_to_the_best_peer_of_each_figure():
    results = [a_result("limit", [2000, 100], [2000.4, 99.96], format="")]
    rounds = ([900, 30], [500, 80]), ([1000, 50], [250, 200]), ([5000, 40], [500, 80])
    for number, (ours, theirs) in enumerate(rounds, 1):
        results.append(a_result("ours", ours, [500, 20], number=number, format="none"))
        results.append(a_result("llama", theirs, [1000, 10], number=number))
        results.append(a_result("vllm", [300, 20], [100, 5], number=number))
    results.append(a_result("ours", [9000, 900], [9000, 900], number=4, format="none"))  # a round without peers
    results.append(a_result("vllm", [9000, 900], [9000, 900], width="int8"))
    labels = {"ours": "ours", "llama": "llama.cpp", "vllm": "vLLM"}
    assert table(results, "bf16", labels).splitlines() == [
        "| bf16, median of 3 | ours | llama.cpp x | vLLM x | ours : best peer | limit |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1 x 128 | 3,000 / 45.0 | 500 / 80.0 | 300 / 20.0 | 3.33 / 0.38 | 2,000 / 100 |",
        "| 2 x 128 | 500 / 20.0 | 1,000 / 10.0 | 100 / 5.0 | 0.50 / 2.00 | 2,000 / 100 |",
    ]
    alone = [result for result in results if result["engine"] == "ours"]
    assert table(alone, "bf16", labels).splitlines()[0] == "| bf16, median of 4 | ours |"


def test_the_limit_is_what_memory_or_arithmetic_allows():
    shape, weights, cache = "qwen2.5-0.5b", 494_032_768, 24 * 2 * 2 * 64 * 2
    assert SHAPES[shape]["num_hidden_layers"] == 24
    alone, many = (1, 128, 64), (32, 128, 64)
    prefill, decode = limit(alone, shape, "bf16", (1e12, 1e10))
    assert decode == pytest.approx(1e10 / (2 * weights + 160 * cache))
    head = 151936 * 896
    work = 2 * 128 * (weights - head) + 2 * head + 24 * 14 * sum(4 * 64 * seen for seen in range(129))
    assert prefill == pytest.approx(128 * 1e12 / work, rel=1e-3)
    assert limit(alone, shape, "int8", (1e12, 1e10))[0] == 2 * prefill
    assert limit(alone, shape, "int4", (1e12, 1e10))[1] > 1.8 * limit(alone, shape, "int8", (1e12, 1e10))[1]
    assert limit(many, shape, "bf16", (1e12, 1e15))[1] == pytest.approx(1e12 / (2 * weights), rel=0.02)
