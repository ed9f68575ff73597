"""Watches a server from a process of its own: the memory of each kind of process, and how soon GET ready answers."""

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
AGES_EQUAL = 0.1  # within this share
MIN_PAIRS = 10  # fewer are chance


class Sample(NamedTuple):
    """Of one process."""

    at_s: float  # since the watch began
    age_s: float
    mb: float


def watch(server: StormServer, until_told: Connection) -> None:
    """Sends what it has seen: the memory of each kind, milliseconds of each question, number of noes."""
    memory: dict[str, list[Sample]] = defaultdict(list)
    ready_ms: list[float] = []
    began = time.monotonic()
    num_not_ready, look_at = 0, 0.0
    while not until_told.poll(ASK_EVERY_S):
        started = time.perf_counter()
        num_not_ready += not is_ready(server.ports["HEALTH_HTTP_PORT"])
        ready_ms.append(1e3 * (time.perf_counter() - started))
        if time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_EVERY_S
            for kind, processes in server.processes().items():
                looked = (Sample(time.monotonic() - began, age_s(each), resident_mb(each.pid)) for each in processes)
                memory[kind] += [sample for sample in looked if sample.mb]
    seen = {kind: samples for kind, samples in memory.items() if samples}  # one may never have been there to look at
    until_told.send((seen, ready_ms, num_not_ready))


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
    """MB before, after, and the share between, of like with like, as a process is small at first and one that is killed
    often always young. Who has been there since the first quarter is compared with itself, the last quarter with the
    one before; who is younger with those that were as old in the first half. The worse of both counts."""
    end = max(each.at_s for each in samples)
    first, last = ([each for each in samples if (each.at_s >= end / 2) == is_last] for is_last in (False, True))
    old = [each for each in last if each.at_s - each.age_s <= end / 4]
    pairs = [(mb_at(first, each.age_s), each.mb) for each in last if each.at_s - each.age_s > end / 4]
    pairs = [(before, after) for before, after in pairs if before]
    quarters = [[each.mb for each in old if (each.at_s >= end * 3 / 4) == is_last] for is_last in (False, True)]
    found = [(0.0, statistics.median(each.mb for each in samples))]  # too short to tell
    if all(quarters):
        before, after = map(statistics.median, quarters)
        found.append((after / before - 1, before))
    if len(pairs) >= MIN_PAIRS:
        grown = statistics.median(after / before - 1 for before, after in pairs)
        found.append((grown, statistics.median(before for before, _ in pairs)))
    grown, before = max(found[1:] or found)
    return before, before * (1 + grown), grown


def mb_at(samples: list[Sample], age_s: float) -> float:
    """0 when none was as old."""
    as_old = [each.mb for each in samples if abs(each.age_s - age_s) <= AGES_EQUAL * age_s]
    return statistics.median(as_old) if as_old else 0.0
