"""Running queue of one engine: admits waiting requests, gives them slots of the batch and preempts them. Independent of
steps and the clock."""

from __future__ import annotations

from engine.core.block_pool import OutOfBlocks
from engine.core.image_queue import ImageQueue, without_computable
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.limits import Counters, Limits
from engine.core.types import Arrival, Copy, Request, State
from engine.core.waiting_queue import WaitingQueue
from engine.errors import InvalidRequest, queue_full, tokens_full

LOOK_AHEAD = 4  # waiting requests that are considered for admission
MAX_PASSED = 8  # later requests that may be admitted before one that does not fit yet


class RunningQueue:
    """Requests that have slots, and the `WaitingQueue`, which decides the order of admission.

    A request is admitted with all blocks of its prompt, as long as prompts leave `1 - block_ratio` of the pool for the
    answers of running requests. A few later requests may pass one that does not fit yet. If a running request needs a
    block and none is available, the request admitted last is preempted, whatever its priority: it loses its blocks,
    waits at the head of the queue and is computed again from its tokens. With `block_ratio >= 1` this never happens.

    A request with forks is their leader: it computes the prompt for all of them. With its first token they start to
    run and share its blocks.
    """

    def __init__(self, cache: KVCacheManager, limits: Limits, counters: Counters, images: ImageQueue | None):
        self.cache = cache
        self._images = images
        self.waiting = WaitingQueue()  # without forks: their leaders wait for them
        self.running: dict[str, Request] = {}  # oldest first
        self.leader_of: dict[str, Request] = {}  # of forks whose prompt is not computed yet
        self._limits = limits
        self._counters = counters
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._arrivals: list[Arrival] = []  # for the next batch

    @property
    def num_running(self) -> int:
        """Return how many slots are taken."""
        return self._limits.max_batch - len(self._free_slots)

    def add(self, request: Request, replay: bool) -> None:
        """See `Scheduler.add`."""
        apart = []  # forks that cannot run at the same time wait like requests and find the prompt in the cache
        while request.forks and not request.in_lockstep and not self._could_run(request):
            apart.append(request.forks.pop())
        if not self._could_run(request):
            pool, need = self.cache.pool, self.cache.max_blocks(request)
            text = f"prompt ({request.prompt_len} tokens) and answer (up to {{value}}) need {need} KV blocks of "
            text += f"{pool.block_size} tokens, the server has {pool.num_blocks}"
            field = "max_dec_len" if pool.blocks_for(request.prompt_len) <= pool.num_blocks else None
            raise InvalidRequest(text, field=field, value=request.sampling.max_new_tokens)
        num_queued = len(self.waiting) - len(self._free_slots)
        if num_queued >= self._limits.max_waiting and not replay:
            raise queue_full(num_queued, self._limits.max_waiting)
        num_tokens = self.waiting.num_tokens
        if num_tokens and num_tokens + request.prompt_len > self._limits.max_waiting_tokens and not replay:
            raise tokens_full(num_tokens, self._limits.max_waiting_tokens)
        self.waiting.add(request)
        for fork in request.forks:
            self.leader_of[fork.request_id] = request
        for fork in reversed(apart):
            self.waiting.add(fork)

    def _could_run(self, request: Request) -> bool:
        """Return whether the request and its forks fit when no other request runs."""
        has_slots = len(request.forks) < self._limits.max_batch
        return has_slots and self.cache.max_blocks(request) <= self.cache.pool.num_blocks

    def drop(self, request_id: str) -> Request | None:
        """See `Scheduler.drop`."""
        request: Request | None
        leader = self.leader_of.pop(request_id, None)
        if leader:
            request = next(fork for fork in leader.forks if fork.request_id == request_id)
            leader.forks.remove(request)
            self._give_up_slot(request)
            if leader.state is State.ENDED and not leader.forks:
                self.finish(leader)
        else:
            request = self.running.get(request_id) or self.waiting.get(request_id)
            if request is None or request.state is State.ENDED:
                return None
            if not request.forks:  # else it runs until their prompt is computed
                self.finish(request)
        request.state = State.ENDED
        return request

    def admit(self, is_ahead: bool, max_tokens: int | None = None) -> Request | None:
        """Start the first waiting request, or one of the next that fits, with blocks and slots. Return it, or None if
        none can start. `is_ahead`: a step is running. `max_tokens`: longer requests are skipped. Requests whose images
        are not encoded yet are passed by all others."""
        if not self._free_slots:
            return None
        passed: list[Request] = []
        for request in self.waiting.ready(max_tokens):
            if len(passed) == LOOK_AHEAD:
                return None
            if is_ahead and request.needs_output_tokens:  # its slot may be that of a request in the running step
                return None
            has_slots = len(request.forks) < len(self._free_slots)
            if has_slots and self._enqueue_images(request):
                if self._images and self._images.is_full:
                    return None
                continue
            if has_slots and self.cache.allocate_prompt(request, self._free_slots[-1], self.running.values()):
                for each in passed:
                    each.num_passed += 1
                self._begin(request)
                return request
            if request.num_passed >= MAX_PASSED:
                return None
            passed.append(request)
        return None

    def _enqueue_images(self, request: Request) -> bool:
        """Return whether a request has to wait for embeddings of images, which it does from then on. What the prefix
        cache has needs none."""
        if not self._images or not any(span.pixels for span in request.spans):
            return False
        return not self._images.fill_or_enqueue(request, self.cache.num_found(request))

    def _begin(self, request: Request) -> None:
        self.waiting.begin(request)
        self.running[request.request_id] = request
        if request.state is State.WAITING:  # else it was dropped and runs for its forks only
            request.state = State.RUNNING
        token_ids = list(request.token_ids)  # a launched batch must not change
        num_computed = request.num_computed
        for each in (request, *request.forks):
            each.slot = self._free_slots.pop()
            self._arrivals.append(_arrival(each, token_ids, num_computed))
            each.spans = without_computable(each.spans)
            num_computed = request.prompt_len  # forks do not compute the prompt
        if request.num_preemptions == 0:  # a preempted request finds its own blocks, which do not count as cached
            self._counters.num_prompt_tokens += len(request.token_ids)
            self._counters.num_cached_tokens += max(0, request.num_cached - request.num_pulled)
            self._counters.num_tokens_without_state += max(request.cache.branch_point - request.num_cached, 0)

    def reset_slot(self, request: Request) -> None:
        """Let the executor take over all tokens and blocks of a request in its slot again."""
        self.cache.resend_blocks(request)
        self._arrivals.append(_arrival(request, list(request.token_ids), request.num_computed))

    def take_slot_changes(self) -> tuple[list[Arrival], list[Copy]]:
        """Return the arrivals and copies since the last call, which belong to the next batch."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals, self.cache.take_copies()

    def allocate_or_preempt(self, request: Request) -> bool:
        """Allocate a block for the next position of `request`, preempting the youngest requests if necessary. Return
        False if `request` itself was preempted."""
        while True:
            try:
                self.cache.allocate(request)
                return True
            except OutOfBlocks:
                youngest = next(reversed(self.running.values()))
                self.preempt(youngest)
                if request.slot < 0:
                    return False

    def preempt(self, request: Request) -> None:
        """Take a request out of the batch and put it at the head of the waiting queue."""
        self._remove(request)
        if request.state is State.RUNNING:
            request.state = State.WAITING
        request.num_preemptions += 1
        request.num_passed = MAX_PASSED
        self._counters.num_preemptions += 1
        self.waiting.put_back(request)

    def requeue(self, request: Request, forks: list[Request]) -> None:
        """See `Scheduler.requeue`."""
        for each in (request, *forks):
            if not self.waiting.drop(each.request_id):
                self._remove(each)
            each.state, each.prompt_outputs_sent = State.WAITING, False
            del each.token_ids[each.prompt_len :]
            self.cache.forget_answer(each)
        request.forks = forks
        for fork in forks:
            self.leader_of[fork.request_id] = request
        request.num_preemptions += 1
        request.num_passed = MAX_PASSED
        self.waiting.put_back(request)

    def join_forks(self, leader: Request) -> None:
        """Let the forks run beside the request that has computed their prompt. They are as old as it is."""
        request_ids = list(self.running)
        younger = request_ids[request_ids.index(leader.request_id) + 1 :]
        for fork in leader.forks:
            self.cache.fork(leader, fork)
            del self.leader_of[fork.request_id]
            fork.state, fork.prompt_logprobs = State.RUNNING, leader.prompt_logprobs
            self.running[fork.request_id] = fork
        for request_id in younger:
            self.running[request_id] = self.running.pop(request_id)
        leader.forks = []

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and its forks, wherever they are."""
        if not self.waiting.drop(request.request_id):
            self._remove(request)
        for fork in request.forks:
            self.leader_of.pop(fork.request_id, None)

    def check(self) -> None:
        """Check that slots and blocks are consistent. Called between two steps."""
        self.cache.check(self.running.values())
        assert not any(request.cache.block_ids for request in self.waiting)
        holders = [each for request in self.running.values() for each in (request, *request.forks)]
        slots = [each.slot for each in holders] + self._free_slots
        assert sorted(slots) == list(range(self._limits.max_batch))

    def _remove(self, request: Request) -> None:
        del self.running[request.request_id]
        for each in (request, *request.forks):
            self.cache.free(each)
            self._give_up_slot(each)

    def _give_up_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1


def _arrival(request: Request, token_ids: list[int], num_computed: int) -> Arrival:
    """Return the arrival of a request that computes its tokens from position `num_computed` on."""
    spans = [each if each.end > num_computed else each.without_content() for each in request.spans]
    scope = (request.owner, request.salt)
    return Arrival(request.slot, token_ids, request.prompt_len, request.sampling, spans, scope)
