"""Input of every engine, and the clock that measures it. It uses only the standard library, because each rival imports
it.

All prompts are submitted at once. Prefill ends when every request has its first token; decode is the rest. The CPU use
of other processes on the machine is measured, too.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable

CASES = [(1, 128, 64), (8, 128, 64), (32, 128, 64), (1, 1024, 32), (4, 512, 32)]  # requests, prompt, answer (tokens)
MAX_REQUESTS, MAX_ANSWER, MAX_TOKENS_IN_STEP = 32, 64, 4096  # a step has room for all prompts of a case
VOCAB_SIZE = 32768  # no shape has fewer token ids
WARM_UP = 4  # answer tokens of an untimed run, which allocates buffers and fills the CPU caches
TRIES, MAX_OTHERS = 2, 0.2  # runs at most; cores that others may use during a run before it is repeated

Prompts = list[list[int]]


def case_name(case: tuple[int, int, int]) -> str:
    return f"{case[0]}x{case[1]}"


def make_prompts(count: int, length: int, seed: int = 0) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def busy_seconds() -> float:
    """Return the CPU seconds that all other processes have used, including stolen time of the hypervisor."""
    with open("/proc/stat") as file:
        fields = file.readline().split()[1:]
    used = sum(int(fields[index]) for index in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")
    return used - sum(os.times()[:4])


class Clock:
    """Stopwatch of one run. It separates prefill from decode."""

    def start(self, num_requests: int) -> None:
        self.waiting, self.num_early, self.num_tokens = set(range(num_requests)), 0, 0
        self.busy = busy_seconds()
        self.started = self.prefilled = self.last = time.perf_counter()

    def tick(self, index: int, count: int) -> None:
        """Count `count` new tokens of one request. Tokens that arrive within a millisecond belong to the same step."""
        self.last = time.perf_counter()
        self.num_tokens += count
        if self.waiting:
            self.waiting.discard(index)
            self.prefilled = self.last
        if self.last - self.prefilled < 1e-3:
            self.num_early = self.num_tokens

    def rates(self, num_prompt_tokens: int) -> list[float]:
        """Return the prefill and decode rates in tokens per second."""
        num_late = self.num_tokens - self.num_early
        return [num_prompt_tokens / (self.prefilled - self.started), num_late / (self.last - self.prefilled)]

    def others(self) -> float:
        """Return the average number of cores that others have used since the start."""
        return (busy_seconds() - self.busy) / (time.perf_counter() - self.started)


def measure(run: Callable[[Prompts, int, Clock], None]) -> None:
    """Read case names from stdin and print a line of JSON for each. `run` starts the clock when its engine is ready for
    the prompts."""
    cases = {case_name(case): case for case in CASES}
    for line in sys.stdin:
        num_requests, prompt_len, answer_len = case = cases[line.strip()]
        prompts, clock = make_prompts(num_requests, prompt_len), Clock()
        runs: list[tuple[float, list[float]]] = []
        run(prompts, WARM_UP, clock)
        while len(runs) < TRIES and not (runs and min(runs)[0] < MAX_OTHERS):
            run(prompts, answer_len, clock)
            assert clock.num_tokens == num_requests * answer_len, f"{clock.num_tokens} tokens of {case}"
            runs.append((round(clock.others(), 2), clock.rates(num_requests * prompt_len)))
        others, rates = min(runs)
        print(json.dumps({"rates": rates, "others": others}), flush=True)
