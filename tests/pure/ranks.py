"""Ranks for tests: as processes that speak through the CPU's group, and as threads that run the definition."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from multiprocessing import reduction
from types import SimpleNamespace

import numpy as np

from engine.ops import reference
from engine.ops.cpu import group

PATIENCE_S = 120  # machines are slow at times; a rank that takes longer hangs


class ThreadRank:
    """One of the ranks of `run_threads`: engine.ops.reference.Group."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: list):
        self.rank, self.num_ranks, self._barrier, self._given = rank, len(given), barrier, given

    def exchange(self, x: np.ndarray) -> list[np.ndarray]:
        self._given[self.rank] = x
        self._barrier.wait(PATIENCE_S)
        all_of_them = list(self._given)
        self._barrier.wait(PATIENCE_S)  # no rank gives the next one before all have taken this one
        return all_of_them


def run_threads(num_ranks: int, body: Callable[[int, SimpleNamespace], object]) -> list:
    """Return the results of body(rank, ops) on each rank, with the ops of the definition."""
    barrier, given = threading.Barrier(num_ranks), [None] * num_ranks

    def run(rank: int):
        return body(rank, reference.of(ThreadRank(rank, barrier, given)))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


class Processes:
    """Runs body(rank) on every rank, each a process that has joined. `body` is a function of a module."""

    def __init__(self, num_ranks: int, body: Callable[[int], object], num_hosts: int = 1, connect=socket.socketpair):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pytest"])  # imported once, not by each rank
        self.shared_memory_fds = [group.create_shared_memory(num_ranks, num_hosts) for _ in range(num_hosts)]
        links = {pair: connect() for pair in combinations(range(num_hosts), 2)}
        self.processes, self._results = [], []
        for rank in range(num_ranks):
            host, local_rank = divmod(rank, num_ranks // num_hosts)
            ours = [ends[pair.index(host)] for pair, ends in sorted(links.items()) if host in pair]
            peers = () if local_rank else tuple(ours)
            result, theirs = context.Pipe(duplex=False)
            shared = reduction.DupFd(self.shared_memory_fds[host])
            arguments = (body, (rank, num_ranks), shared, (num_hosts, peers), theirs)
            self.processes.append(context.Process(target=_run, args=arguments))
            self._results.append(result)
            self.processes[-1].start()
            theirs.close()
        for end in (end for ends in links.values() for end in ends):
            end.close()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_) -> None:
        for process, result in zip(self.processes, self._results, strict=True):
            process.kill()
            process.join()
            result.close()
        for fd in self.shared_memory_fds:
            os.close(fd)

    def results(self) -> list:
        return [self.result(rank) for rank in range(len(self.processes))]

    def result(self, rank: int) -> object:
        """Return what body returned or raised, or None for a rank that was killed."""
        assert self._results[rank].poll(PATIENCE_S), f"rank {rank} hangs"
        try:
            return self._results[rank].recv()
        except EOFError:
            return None


def _run(body, place, shared, others, result) -> None:
    group.join(group.Membership(*place, shared.detach(), *others))
    try:
        result.send(body(place[0]))
    except Exception as error:
        result.send(error)
    result.close()


def run_processes(num_ranks: int, body: Callable[[int], object], **hosts) -> list:
    with Processes(num_ranks, body, **hosts) as processes:
        return processes.results()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]
