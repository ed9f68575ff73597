"""Monitor of a server from a separate process: memory of each kind of process, and latency of GET ready."""

from __future__ import annotations

import http.client
import os
import statistics
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from benchmarks.storm.server import StormServer, age_s

ASK_EVERY_S, LOOK_EVERY_S = 0.1, 2.0
MB = 2**20
AGES_EQUAL = 0.1  # relative difference
MIN_PAIRS = 10  # fewer pairs are not significant


class Sample(NamedTuple):
    """Memory of one process at one time."""

    at_s: float  # seconds since the watch began
    age_s: float
    mb: float


def watch(server: StormServer, stop: Connection) -> None:
    """Watch until a message arrives. Send the memory samples of each kind, the latencies of GET ready in milliseconds,
    and the number of negative answers."""
    memory: dict[str, list[Sample]] = defaultdict(list)
    ready_ms: list[float] = []
    began = time.monotonic()
    num_not_ready, look_at = 0, 0.0
    while not stop.poll(ASK_EVERY_S):
        started = time.perf_counter()
        num_not_ready += not is_ready(server.ports["HEALTH_HTTP_PORT"])
        ready_ms.append(1e3 * (time.perf_counter() - started))
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_EVERY_S
            for kind, processes in server.processes().items():
                looked = (Sample(time.monotonic() - began, age_s(each), resident_mb(each.pid)) for each in processes)
                memory[kind] += [sample for sample in looked if sample.mb]
    seen = {kind: samples for kind, samples in memory.items() if samples}  # omits kinds that no sample has seen
    stop.send((seen, ready_ms, num_not_ready))


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    except OSError:
        return 0.0


def growth(samples: list[Sample]) -> tuple[float, float, float]:
    """Return the memory in MiB before and after, and the relative growth.

    Processes are small at first, and a kind that is killed often has only young ones, so samples of equal age are
    compared. A process that has existed since the first quarter is compared with itself, the last quarter with the one
    before; a younger one is compared with processes that had the same age in the first half. The larger growth counts.
    """
    end = max(each.at_s for each in samples)
    first, last = ([each for each in samples if (each.at_s >= end / 2) == is_last] for is_last in (False, True))
    old = [each for each in last if each.at_s - each.age_s <= end / 4]
    pairs = [(mb_at(first, each.age_s), each.mb) for each in last if each.at_s - each.age_s > end / 4]
    pairs = [(before, after) for before, after in pairs if before]
    quarters = [[each.mb for each in old if (each.at_s >= end * 3 / 4) == is_last] for is_last in (False, True)]
    found = [(0.0, statistics.median(each.mb for each in samples))]  # in case the watch was too short to measure growth
    if all(quarters):
        before, after = map(statistics.median, quarters)
        found.append((after / before - 1, before))
    if len(pairs) >= MIN_PAIRS:
        grown = statistics.median(after / before - 1 for before, after in pairs)
        found.append((grown, statistics.median(before for before, _ in pairs)))
    grown, before = max(found[1:] or found)
    return before, before * (1 + grown), grown


def mb_at(samples: list[Sample], age_s: float) -> float:
    """Return the median memory of the samples of this age, or 0 if there are none."""
    as_old = [each.mb for each in samples if abs(each.age_s - age_s) <= AGES_EQUAL * age_s]
    return statistics.median(as_old) if as_old else 0.0
