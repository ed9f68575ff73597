"""Runs beam searches on the scheduler: submits the beams of a search as requests, branches them after each step and
returns the answers. It is independent of slots and blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

from engine.core.beam_search import BeamSearch
from engine.core.scheduler import Scheduler
from engine.core.types import PromptOutputs, Request
from engine.core.updates import FAILED, Update
from engine.errors import InvalidRequest


@dataclass(eq=False)
class _Search:
    """A search and the requests that compute its beams. If it has fewer beams than requests (the vocabulary is tiny),
    the last requests repeat the first beam and their output is ignored."""

    beams: BeamSearch
    num_answers: int
    requests: list[Request]  # as submitted: first those whose answers the client wants
    request_of: list[Request]  # the same requests in the order of the running beams
    updates: dict[Request, Update] = field(default_factory=dict)  # of the last step
    prompt_outputs: PromptOutputs | None = None


class BeamDriver:
    """The beam searches of one engine. Requests without beam search pass through."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._search_of: dict[str, _Search] = {}  # by the ids of its requests
        self._searches: dict[_Search, None] = {}  # a set in the order of their arrival

    def add(self, request: Request, replay: bool = False) -> None:
        """Add a request to the scheduler. A beam search becomes `num_beams` requests, of which the first ones are
        `request` and its forks. Raises as `Scheduler.add`, and InvalidRequest if there are more beams than slots."""
        if not (request.sampling.num_beams and request.sampling.max_new_tokens):
            self._scheduler.add(request, replay)
            return
        search = self._prepare(request)
        self._scheduler.add(request, replay)
        self._searches[search] = None
        self._search_of.update({each.request_id: search for each in search.requests})

    def drop(self, request_id: str) -> bool:
        """Drop a request, and of a beam search all others, too: its answers are wanted together or not at all. Return
        False if it has ended."""
        search = self._search_of.get(request_id)
        if search is None:
            return self._scheduler.drop(request_id) is not None
        self._forget(search)
        return True

    def advance(self, updates: list[Update]) -> list[Update]:
        """Continue the searches with the updates of a step. Return the updates of all other requests, and the answers
        of the searches that have ended. Called before the next step is scheduled."""
        if not self._searches:
            return updates
        others = []
        for update in updates:
            if search := self._search_of.get(update.request.request_id):
                search.updates[update.request] = update
            else:
                others.append(update)
        for search in list(self._searches):
            others += self._advance(search)
        return others

    def _prepare(self, request: Request) -> _Search:
        sampling, max_batch = request.sampling, self._scheduler.limits.max_batch
        if sampling.num_beams > max_batch:
            text = "The `{field}` is {value}, the server computes {limit} answers at once (BATCH_SIZE)"
            raise InvalidRequest(text, field="best_of", value=sampling.num_beams, limit=max_batch)
        num_answers = 1 + len(request.forks)
        for index in range(num_answers, sampling.num_beams):
            beam = Request(
                request_id=f"{request.request_id}/{index}",
                token_ids=list(request.token_ids),
                prompt_len=request.prompt_len,
                sampling=sampling,
                spans=request.spans,
                salt=request.salt,
                owner=request.owner,
            )
            request.forks.append(beam)
        requests = [request, *request.forks]
        # Enough candidates to extend every beam, even if all stop ids are among them.
        num_logprobs = max(sampling.num_beams + len(sampling.stop_token_ids), sampling.num_logprobs)
        for each in requests:
            each.in_lockstep = True
            each.sampling = replace(
                sampling, temperature=0.0, min_new_tokens=0, stop_token_ids=(), num_logprobs=num_logprobs
            )
        return _Search(BeamSearch(sampling), num_answers, requests, requests)

    def _advance(self, search: _Search) -> list[Update]:
        """Return the answers if the search has ended with this step."""
        beams, updates = search.beams, search.updates
        search.updates = {}
        if any(map(_has_failed, updates.values())):
            return self._end(search, has_failed=True)
        if len(updates) < len(search.requests):
            if beams.has_begun:  # some beams were preempted
                self._restart(search)
            return []
        for update in updates.values():
            search.prompt_outputs = update.prompt_outputs or search.prompt_outputs
        logprobs = [updates[request].logprobs or () for request in search.request_of]
        beams.advance([of_token for (of_token,) in logprobs[: len(beams.running)]])
        if beams.is_over:
            return self._end(search)
        self._branch(search)
        return []

    def _branch(self, search: _Search) -> None:
        """Let the requests continue the beams that the search has chosen. Where possible, a beam stays in the request
        of its parent."""
        before, beams = search.request_of, search.beams
        num_idle = len(before) - len(beams.running)
        parents = [before[index] for index in (*beams.parents, *beams.parents[:1] * num_idle)]
        token_ids = [beam.token_ids[-1] for beam in (*beams.running, *beams.running[:1] * num_idle)]
        stay = set(parents)
        free = [request for request in before if request not in stay]
        search.request_of = []
        for parent, token_id in zip(parents, token_ids, strict=True):
            request = parent if parent in stay else free.pop()
            stay.discard(parent)
            self._scheduler.branch(request, parent, token_id)
            search.request_of.append(request)

    def _restart(self, search: _Search) -> None:
        search.beams.restart()
        search.request_of = search.requests
        leader, *forks = search.requests
        self._scheduler.requeue(leader, forks)

    def _end(self, search: _Search, has_failed: bool = False) -> list[Update]:
        self._forget(search)
        beams = [] if has_failed else search.beams.finished[: search.num_answers]
        updates = []
        for request, beam in zip_longest(search.requests[: search.num_answers], beams):
            if beam:
                reason = search.beams.finish_reason(beam)
                updates.append(
                    Update(request, beam.token_ids, beam.logprobs or None, reason, None, search.prompt_outputs)
                )
            else:
                updates.append(Update(request, (), None, FAILED))
        return updates

    def _forget(self, search: _Search) -> None:
        del self._searches[search]
        for request in search.requests:
            del self._search_of[request.request_id]
            self._scheduler.drop(request.request_id)


def _has_failed(update: Update) -> bool:
    """Return whether the model has broken down: there is no token, or its log-probability is not a number."""
    return update.finish_reason == FAILED or any(each.chosen != each.chosen for each in update.logprobs or ())
