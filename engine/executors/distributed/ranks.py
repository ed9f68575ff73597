"""Executor of all ranks of one model. This process is the first rank of its host; the others are its children.

Each launch is sent to all ranks. They compute in lockstep, and the ops of the graph sum their partial results. A rank
that ends also ends this process, and so the whole group; its supervisor restarts it. In a process that belongs to
another program, the end of a CPU rank ends only the group, and launched steps raise. The end of a GPU rank ends the
process in any case, because nothing else would wake a thread that waits for it.
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from engine.core.executor import Executor, Step
from engine.core.spans import PromptSpan
from engine.core.types import Arrival, Batch, Copy, PromptOutputSpec, Row, Sampling, StepOutput, Swaps
from engine.errors import ConfigError, InvalidRequest, SetupError, escape_braces
from engine.executors.device_executor import DeviceExecutor
from engine.executors.distributed.blocks import BlocksOfRanks
from engine.executors.distributed.draft_graph import DraftGraphOfRanks, ServedDraftGraph
from engine.executors.speculation.draft_model import DraftGraph
from engine.executors.step import Mask
from engine.ops.cpu import group
from engine.ops.cpu.group import Membership
from engine.settings.config import Config

log = logging.getLogger(__name__)

RANK_PROCESS = "engine.executors.distributed.rank_process"  # the module that runs in the process of another rank
LAUNCH, ALLOCATE, WARM_UP, FREE_BYTES = "launch", "allocate", "warm_up", "free_bytes"  # FREE_BYTES has a reply
LOAD, DROP = "load", "drop"  # adapters; the reply to LOAD is an error message, or empty
DRAFT = "draft"  # a call of `ServedDraftGraph`
READY = "ready"  # sent by a rank that has loaded its graph; otherwise it sends why it failed
PR_SET_PDEATHSIG = 1
CLOSING_S = 5  # seconds that a rank has to close its resources
ROOT = Path(__file__).resolve().parents[3]


class RankFailed(SetupError):
    """Error of a rank that could not be started or that has ended. The message gives the reason."""


class RanksExecutor:
    """Executor that sends every call to all ranks. `first` is this process's own rank; `others` are connections to the
    others. All of them have joined the group."""

    def __init__(self, first: DeviceExecutor, others: Sequence[Connection], of_blocks: Sequence[Connection] = ()):
        self.block_size, self.block_bytes = first.block_size, first.block_bytes
        self.runs_ahead, self.max_prompt_logits = first.runs_ahead, first.max_prompt_logits
        self.takes_spans, self.max_drafts = first.takes_spans, first.max_drafts
        self.vision = first.vision  # this rank encodes images and sends the others the embeddings
        self.expert_usage, self.draft_counts = first.expert_usage, first.draft_counts
        self.cache_groups = first.cache_groups
        self.thread = first.thread
        self.first = first
        self._others, self._of_blocks = others, of_blocks
        self._has_failed = False

    def free_bytes(self) -> int:
        for other in self._others:
            other.send_bytes(pack(FREE_BYTES))
        return min(self.first.free_bytes(), *(unpack(other.recv_bytes())[0] for other in self._others))

    def allocate(self, num_blocks: int) -> None:
        self._tell(pack(ALLOCATE, num_blocks))
        with self._all_or_none():
            self.first.allocate(num_blocks)

    def warm_up(self) -> None:
        self._tell(pack(WARM_UP))
        with self._all_or_none():
            self.first.warm_up()

    def load_adapter(self, adapter: tuple[str, ...]) -> None:
        """Load the adapter on all ranks, or on none. Raises InvalidRequest."""
        self._tell(pack(LOAD, adapter))
        troubles: list[str] = [_load_adapter_error(self.first, adapter)]
        troubles += [unpack(other.recv_bytes())[0] for other in self._others]
        if trouble := next(filter(None, troubles), ""):
            self.drop_adapter(adapter[0])
            raise InvalidRequest(escape_braces(trouble), field="lora_name")

    def drop_adapter(self, adapter_id: str) -> None:
        self._tell(pack(DROP, adapter_id))
        self.first.drop_adapter(adapter_id)

    def launch(self, batch: Batch) -> Step:
        self._tell(pack(LAUNCH, *batch))
        with self._all_or_none():
            return self.first.launch(batch)

    def compute(self, batch: Batch, wait_for_mask: Callable[[], Mask]) -> StepOutput:
        """Compute a step on all ranks, in the thread of the first one."""
        self._tell(pack(LAUNCH, *batch))
        return self.first.compute(batch, wait_for_mask)  # type: ignore[attr-defined]

    def load_draft_graph(self, name: str) -> DraftGraphOfRanks:
        """Load a graph of the model that drafts for it, on all ranks."""
        with self._all_or_none():
            first: DraftGraph = self._draft("load", name, lambda: self.first.load_draft_graph(name))
            return DraftGraphOfRanks(first, self._draft)

    def _draft(self, method: str, argument: Any, call_first: Callable[[], Any]) -> Any:
        """Call a method of the graph that drafts on all other ranks, and make the call on the first one."""
        self._tell(pack(DRAFT, method, argument))
        return call_first()

    def blocks(self) -> BlocksOfRanks:
        """Return the access to the blocks of all ranks."""
        return BlocksOfRanks(self.first.blocks(), self._of_blocks)

    def close(self) -> None:
        for other in (*self._others, *self._of_blocks):
            other.close()
        if not self._has_failed:  # otherwise closing it would wait for the other ranks
            self.first.close()

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Close the group if this rank fails: the other ranks would otherwise wait forever inside an op."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            self.close()
            raise

    def _tell(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises RankFailed if one has ended."""
        try:
            for other in self._others:
                other.send_bytes(message)
        except OSError:
            raise RankFailed("a rank has ended, and the group with it") from None


def serve(first: Connection, executor: DeviceExecutor) -> None:
    """Execute the messages of the first rank on another rank, until the connection ends."""
    with contextlib.suppress(ConnectionError):  # A first rank that failed has already logged the reason.
        first.send_bytes(pack(READY))
    steps: deque[Step] = deque()  # steps in flight; this rank runs ahead when the first one does
    draft_graph = ServedDraftGraph(executor)
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
        if kind == DRAFT:
            draft_graph.call(*fields)
        elif (reply := _call(executor, kind, fields)) is not None:
            first.send_bytes(pack(reply))


def _call(executor: Executor, kind: str, fields: Sequence[Any]) -> Any:
    """Make the call of a message between steps. Return the reply, or None if the message has none."""
    if kind == ALLOCATE:
        executor.allocate(fields[0])
    elif kind == WARM_UP:
        executor.warm_up()
    elif kind == FREE_BYTES:
        return executor.free_bytes()
    elif kind == LOAD:
        return _load_adapter_error(executor, fields[0])
    elif kind == DROP:
        executor.drop_adapter(fields[0])
    return None


def _load_adapter_error(executor: Executor, adapter: tuple[str, ...]) -> str:
    """Load the adapter and return the error message, or an empty string on success."""
    try:
        executor.load_adapter(adapter)
    except InvalidRequest as error:
        return str(error)
    return ""


def exit_with_first_rank(first: Connection) -> None:
    """End this process at most CLOSING_S seconds after `first` has closed the connection, even inside an op."""

    def watch() -> None:
        poll = select.poll()
        poll.register(first, select.POLLRDHUP)
        poll.poll()
        time.sleep(CLOSING_S)
        os._exit(1)

    threading.Thread(target=watch, name="watches the first rank", daemon=True).start()


_open: list[Connection] = []  # connections to the ranks of this process


def refuse_second_group(config: Config) -> None:
    """Raise ConfigError while this process has ranks, because the ops support one group only."""
    _open[:] = [connection for connection in _open if not connection.closed]
    if _open:
        raise ConfigError(
            f"MP_NUM is {config.mp_num}, but this process has a model of several ranks, of which it can have one at a"
            " time: close() that one first, or use another process"
        )


def start_ranks(
    graph_dir: Path, config: Config, memberships: Sequence[Membership], ends_process: bool
) -> list[tuple[Connection, Connection]]:
    """Start one process for each membership, which load in parallel, and return two connections to each, the second
    one for its blocks.

    Call this from the main thread: the processes die with the thread that started them.
    """
    connections = []
    for membership in memberships:
        (ours, theirs), (blocks, their_blocks) = Pipe(), Pipe()
        fds = (theirs.fileno(), their_blocks.fileno(), membership.shared_memory_fd)
        command = [sys.executable, "-m", RANK_PROCESS, *map(str, fds[:2])]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        their_blocks.close()
        ours.send((graph_dir.absolute(), config, membership))
        connections.append((ours, blocks))
        _open.append(ours)
        name = f"rank {membership.rank}"
        shared_memory_fd = None if ends_process else os.dup(membership.shared_memory_fd)
        args = (name, process, ours, shared_memory_fd)
        threading.Thread(target=_watch_rank, args=args, name=name, daemon=True).start()
    return connections


def wait_until_ready(connections: Sequence[Connection]) -> None:
    """Wait until all these ranks have loaded the model. Raises RankFailed."""
    for connection in connections:
        try:
            kind, *why = unpack(connection.recv_bytes())
        except EOFError:
            raise RankFailed("a rank has ended before it was ready; it has said why") from None
        if kind != READY:
            raise RankFailed(why[0])


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch_rank(
    name: str, process: subprocess.Popen[bytes], connection: Connection, shared_memory_fd: int | None
) -> None:
    """Wait for the rank's process and, if it failed, end the group to wake threads that wait for the rank inside an op.

    With `shared_memory_fd` only the group in that shared memory is aborted; without it this process exits.
    """
    status = process.wait()
    if status and not connection.closed:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        log.error("%s %s: its group ends", name, how)
        if shared_memory_fd is None:
            logging.shutdown()
            os._exit(1)
        group.abort(shared_memory_fd)
    if shared_memory_fd is not None:
        os.close(shared_memory_fd)


def pack(*fields: Any) -> bytes:
    """Serialize a message to or from a rank. Objects become lists of their attributes."""
    return msgpack.packb(fields, default=_fields_of)


def _fields_of(value: Any) -> Sequence[Any]:
    return msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else list(vars(value).values())


def unpack(message: bytes) -> list[Any]:
    """Return the fields of a message of `pack`. Lists arrive as tuples."""
    return msgpack.unpackb(message, use_list=False)


def unpack_batch(fields: Sequence[Any]) -> Batch:
    """Rebuild the batch of a LAUNCH message from its fields."""
    rows, arrivals, copies, has_mask, has_prompt_outputs, swaps, max_drafts = fields
    return Batch(
        [
            Row(slot, start, ids, block_ids, num_sampled, forks, spec and PromptOutputSpec(*spec), max_row_drafts)
            for slot, start, ids, block_ids, num_sampled, forks, spec, max_row_drafts in rows
        ],
        [
            Arrival(slot, ids, prompt_len, Sampling.of(sampling), [PromptSpan(*span) for span in spans], scope)
            for slot, ids, prompt_len, sampling, spans, scope in arrivals
        ],
        [Copy(*copy) for copy in copies],
        has_mask,
        has_prompt_outputs,
        swaps and Swaps(*swaps),
        max_drafts,
    )
