"""Prefill side of disaggregation: computes prompts for decode instances and leases them the finished blocks. Other
replicas are leased the blocks that are cached. Independent of the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.cache_groups import FULL_ATTENTION
from engine.core.scheduler import Scheduler
from engine.core.types import Request, Sampling
from engine.core.updates import FAILED, Update
from engine.errors import RequestError


class JobListener(Protocol):
    """Connection of the decode instance that has asked for a prompt. Its methods do not block."""

    def ready(self, job: PrefillJob, indices: Sequence[int]) -> None:
        """Announce blocks that can be pulled, by their index in `PrefillJob.keys`."""
        ...

    def failed(self, job: PrefillJob, reason: str) -> None:
        """Announce that no more blocks will be ready."""
        ...


@dataclass(eq=False)
class PrefillJob:
    """Prompt that a decode instance needs the blocks of. The job holds every block that is ready, until it ends."""

    name: str  # unique to this process
    request: Request | None  # None: nothing is computed, and `ready` is called once for the blocks that are cached
    keys: Sequence[bytes]  # of the blocks that are needed
    listener: JobListener
    block_ids: dict[int, int] = field(default_factory=dict)  # index of the key -> leased block
    is_leased: bool = True  # False: the blocks may be overwritten
    is_computed: bool = False


def prefill_request(
    name: str,
    token_ids: Sequence[int],
    salt: str,
    queue_position: tuple[str, int],
    stop_token_ids: tuple[int, ...] = (),
) -> Request:
    """Return a request that computes a prompt without its last token, from which the decode instance samples. Its block
    hashes are those of the same prompt elsewhere. `stop_token_ids` show where its messages end."""
    owner, priority = queue_position
    sampling = Sampling(max_new_tokens=0, stop_token_ids=stop_token_ids)
    return Request(
        request_id=name,
        token_ids=list(token_ids),
        prompt_len=len(token_ids),
        sampling=sampling,
        salt=salt,
        owner=owner,
        priority=priority,
        keeps_tail=True,
    )


class PrefillJobs:
    """Jobs of all decode instances. `begin` and `end` may be called in any thread, all else in the engine's.
    `on_first_prompt` is called when the first prompt is computed."""

    def __init__(
        self,
        scheduler: Scheduler,
        wake: Callable[[], None] = lambda: None,
        on_first_prompt: Callable[[], None] = lambda: None,
    ):
        self._scheduler, self._wake, self._on_first_prompt = scheduler, wake, on_first_prompt
        self._jobs: dict[str, PrefillJob] = {}
        self._begun: deque[PrefillJob] = deque()
        self._ended: deque[PrefillJob] = deque()
        # Blocks that are announced when so many steps have ended, because these may still write them.
        self._found: deque[tuple[int, PrefillJob, Sequence[int]]] = deque()
        self.num_computed = 0  # prompts

    @property
    def num_open(self) -> int:
        """Return the number of jobs that hold blocks."""
        return len(self._jobs)

    def begin(self, job: PrefillJob) -> None:
        """Compute the prompt of a job and announce its blocks."""
        self._begun.append(job)
        self._wake()

    def end(self, job: PrefillJob) -> None:
        """Release the blocks of a job and stop computing it. A job may be ended twice."""
        self._ended.append(job)
        self._wake()

    def poll(self) -> None:
        """Begin and end jobs. Called between two steps."""
        while self._begun:
            self._begin(self._begun.popleft())
        self._announce()
        while self._ended:
            self._end(self._ended.popleft())

    def take(self, updates: list[Update]) -> list[Update]:
        """Lease the blocks that can be found after a step and return the updates of all other requests."""
        for each in self._jobs.values():
            if each.request:
                self._lease(each)
        self._announce()
        others: list[Update] = []
        for update in updates:
            if (job := self._jobs.get(update.request.request_id)) is None:
                others.append(update)
                continue
            job.is_computed = True
            self.num_computed += 1
            if self.num_computed == 1:
                self._on_first_prompt()
            if update.finish_reason == FAILED or len(job.block_ids) < len(job.keys):
                job.listener.failed(job, str(update.error or "some blocks are not in the prefix cache"))
        return others

    def _begin(self, job: PrefillJob) -> None:
        self._jobs[job.name] = job
        self._lease(job)
        if job.request is None or len(job.block_ids) == len(job.keys):
            job.is_computed = True
            return
        try:
            self._scheduler.add(job.request)
        except RequestError as error:
            job.is_computed = True
            job.listener.failed(job, str(error))

    def _end(self, job: PrefillJob) -> None:
        if self._jobs.pop(job.name, None) is None:
            return
        job.is_leased = False
        if not job.is_computed:
            self._scheduler.drop(job.name)
        self._scheduler.pool.give_back([job.block_ids[index] for index in sorted(job.block_ids)])

    def _lease(self, job: PrefillJob) -> None:
        pool = self._scheduler.pool
        found = [index for index, key in enumerate(job.keys) if index not in job.block_ids and pool.is_on_device(key)]
        if job.request is None and len(found) < len(job.keys):  # only the beginning of the prompt is of use, and only
            is_paged = self._scheduler.limits.cache_groups == FULL_ATTENTION  # without windows and states
            found = found[: next((i for i, j in enumerate(found) if i != j), len(found))] if is_paged else []
        if found or job.request is None:
            job.block_ids |= zip(found, pool.take(0, [job.keys[index] for index in found]), strict=True)
            self._found.append((self._scheduler.num_launched, job, found))

    def _announce(self) -> None:
        while self._found and self._found[0][0] <= self._scheduler.num_applied:
            _, job, indices = self._found.popleft()
            if job.is_leased:
                job.listener.ready(job, indices)
