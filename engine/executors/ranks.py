"""The ranks of one model as one executor: this process is the first rank of its host, the others are its children.

What is launched here is told to all of them; they compute in step, the ops of the graph add up what each has. A rank
that ends takes this process with it, and so the whole group: who started it starts it again. Where the process is
somebody else's, it ends the group alone, and what is launched raises; on a GPU nothing else would wake who waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import starmap
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgpack

from engine.core.spans import PromptSpan
from engine.core.types import Arrival, Batch, Copy, Executor, PromptOutputSpec, Row, Sampling, Step, Swaps
from engine.errors import ConfigError, InvalidRequest, SetupError, literally
from engine.ops.cpu import group
from engine.ops.cpu.group import Membership
from engine.settings.config import Config

log = logging.getLogger(__name__)

LAUNCH, ALLOCATE, WARM_UP, FREE_BYTES = "launch", "allocate", "warm_up", "free_bytes"  # free_bytes is answered
LOAD, DROP = "load", "drop"  # an adapter; load is answered with what is wrong
READY = "ready"  # of a rank that has loaded its graph; else it says why not
PR_SET_PDEATHSIG = 1
CLOSING_S = 5  # that a rank has to close what it has
ROOT = Path(__file__).resolve().parents[2]


class RankFailed(SetupError):
    """A rank could not be started, or has ended; the message says why."""


class RanksExecutor:
    """`first` is this process's own rank. It has joined its group, as have those behind `others`."""

    def __init__(self, first: Executor, others: Sequence[Connection]):
        self.block_size, self.block_bytes = first.block_size, first.block_bytes
        self.runs_ahead, self.max_prompt_logits = first.runs_ahead, first.max_prompt_logits
        self.takes_spans, self.max_drafts = first.takes_spans, first.max_drafts
        self.cache_groups = first.cache_groups
        self._first = first
        self._others = others
        self._has_failed = False

    def free_bytes(self) -> int:
        for other in self._others:
            other.send_bytes(pack(FREE_BYTES))
        return min(self._first.free_bytes(), *(unpack(other.recv_bytes())[0] for other in self._others))

    def allocate(self, num_blocks: int) -> None:
        self._tell(pack(ALLOCATE, num_blocks))
        with self._all_or_none():
            self._first.allocate(num_blocks)

    def warm_up(self) -> None:
        self._tell(pack(WARM_UP))
        with self._all_or_none():
            self._first.warm_up()

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        """By all or by none."""
        self._tell(pack(LOAD, adapter))
        troubles: list[str] = [_trouble_of_load(self._first, adapter)]
        troubles += [unpack(other.recv_bytes())[0] for other in self._others]
        if trouble := next(filter(None, troubles), ""):
            self.drop_adapter(adapter[0])
            raise InvalidRequest(literally(trouble), field="lora_name")

    def drop_adapter(self, adapter_id: str) -> None:
        self._tell(pack(DROP, adapter_id))
        self._first.drop_adapter(adapter_id)

    def launch(self, batch: Batch) -> Step:
        self._tell(pack(LAUNCH, *batch))
        with self._all_or_none():
            return self._first.launch(batch)

    def close(self) -> None:
        for other in self._others:
            other.close()
        if not self._has_failed:  # else it would wait for the others in turn
            self._first.close()

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Who fails here leaves the others in the middle of an op, where they would wait for ever: they end, too."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            self.close()
            raise

    def _tell(self, message: bytes) -> None:
        try:
            for other in self._others:
                other.send_bytes(message)
        except OSError:
            raise RankFailed("a rank has ended, and the group with it") from None


def serve(first: Connection, executor: Executor) -> None:
    """What a rank does that is not the first: as it is told, until the connection ends."""
    with contextlib.suppress(ConnectionError):  # where the first rank has failed, it has said why
        first.send_bytes(pack(READY))
    steps: deque[Step] = deque()  # that were launched; where the first rank runs ahead, so does this one
    while True:
        try:
            kind, *fields = unpack(first.recv_bytes())
        except (EOFError, ConnectionError):
            executor.close()
            return
        if kind == LAUNCH:
            steps.append(executor.launch(unpack_batch(fields)))
        while len(steps) > (kind == LAUNCH and executor.runs_ahead):
            steps.popleft().result()
        if kind == ALLOCATE:
            executor.allocate(fields[0])
        elif kind == WARM_UP:
            executor.warm_up()
        elif kind == FREE_BYTES:
            first.send_bytes(pack(executor.free_bytes()))
        elif kind == LOAD:
            first.send_bytes(pack(_trouble_of_load(executor, fields[0])))
        elif kind == DROP:
            executor.drop_adapter(fields[0])


def _trouble_of_load(executor: Executor, adapter: tuple[str, ...]) -> str:
    try:
        executor.load_adapter(adapter)
    except InvalidRequest as error:
        return str(error)
    return ""


def end_with(first: Connection) -> None:
    """This process ends soon after `first` has closed the connection, also in the middle of an op."""

    def watch() -> None:
        poll = select.poll()
        poll.register(first, select.POLLRDHUP)
        poll.poll()
        time.sleep(CLOSING_S)
        os._exit(1)

    threading.Thread(target=watch, name="watches the first rank", daemon=True).start()


_open: list[Connection] = []  # to the ranks of this process


def refuse_second_group(config: Config) -> None:
    """Raises ConfigError while this process has ranks: the ops know of one group."""
    _open[:] = [connection for connection in _open if not connection.closed]
    if _open:
        raise ConfigError(
            f"MP_NUM is {config.mp_num}, but this process has a model of several ranks, of which it can have one at a"
            " time: close() that one first, or use another process"
        )


def start_ranks(
    graph_dir: Path, config: Config, memberships: Sequence[Membership], ends_process: bool
) -> list[Connection]:
    """A process for each, which load at the same time. To be called by the main thread: they die with it."""
    connections = []
    for membership in memberships:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "engine.executors.rank_process", str(theirs.fileno())]
        fds = (theirs.fileno(), membership.segment_fd)
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        ours.send((graph_dir.absolute(), config, membership))
        connections.append(ours)
        _open.append(ours)
        name = f"rank {membership.rank}"
        segment_fd = None if ends_process else os.dup(membership.segment_fd)
        args = (name, process, ours, segment_fd)
        threading.Thread(target=_end_with, args=args, name=name, daemon=True).start()
    return connections


def wait_until_ready(connections: Sequence[Connection]) -> None:
    for connection in connections:
        try:
            kind, *why = unpack(connection.recv_bytes())
        except EOFError:
            raise RankFailed("a rank has ended before it was ready; it has said why") from None
        if kind != READY:
            raise RankFailed(why[0])


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_with(name: str, process: subprocess.Popen[bytes], connection: Connection, segment_fd: int | None) -> None:
    """Who waits for that rank in the middle of an op, perhaps the main thread, is woken by the end of the group, in
    `segment_fd`, or without it by that of the process."""
    status = process.wait()
    if status and not connection.closed:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        log.error("%s %s: its group ends", name, how)
        if segment_fd is None:
            logging.shutdown()
            os._exit(1)
        group.abort(segment_fd)
    if segment_fd is not None:
        os.close(segment_fd)


def pack(*fields: Any) -> bytes:
    return msgpack.packb(fields, default=lambda value: list(vars(value).values()))


def unpack(message: bytes) -> list[Any]:
    return msgpack.unpackb(message, use_list=False)


def unpack_batch(fields: Sequence[Any]) -> Batch:
    rows, arrivals, copies, has_mask, has_prompt_outputs, swaps, max_drafts = fields
    return Batch(
        [
            row._replace(prompt_spec=row.prompt_spec and PromptOutputSpec(*row.prompt_spec))
            for row in starmap(Row, rows)
        ],
        [
            Arrival(slot, ids, prompt_len, Sampling.of(sampling), [PromptSpan(*span) for span in spans])
            for slot, ids, prompt_len, sampling, spans in arrivals
        ],
        [Copy(*copy) for copy in copies],
        has_mask,
        has_prompt_outputs,
        swaps and Swaps(*swaps),
        max_drafts,
    )
