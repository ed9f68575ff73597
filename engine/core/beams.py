"""Beam search: of all that may follow the beams the likeliest go on, and answers that have ended compete by their mean
logprob. In every case as Hugging Face's `generate` decides it. Knows tokens; no blocks, no slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.core.types import Logprobs, Request, Sampling
from engine.errors import InvalidRequest


class Beam(NamedTuple):
    """An answer, or the beginning of one."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # of each, as its client has asked for them
    score: float = 0.0  # the sum of them; of one that has ended, by the power of its length that was asked for


class BeamSearch:
    """Of one request, with its `num_answers` and the beams beyond them."""

    def __init__(self, sampling: Sampling, num_answers: int):
        self.num_answers = num_answers
        self._sampling = sampling
        self.restart()

    def restart(self) -> None:
        self.running = [Beam()]  # the best first
        self.ended: list[Beam] = []  # the best first
        self.parents: list[int] = []  # of each that runs, its place among those before
        self.is_over = False
        self._heard: list[Logprobs] = []

    @property
    def has_begun(self) -> bool:
        return bool(self.running and self.running[0].token_ids)

    def hear(self, logprobs: Logprobs) -> bool:
        """What may follow the next of the running beams; True with the last of them: they have moved on, or all is
        over."""
        self._heard.append(logprobs)
        if len(self._heard) < len(self.running):
            return False
        heard, self._heard = self._heard, []
        self._advance(heard)
        return True

    def reason_of(self, beam: Beam) -> str:
        return "stop" if beam.token_ids[-1] in self._sampling.stop_token_ids else "length"

    def _advance(self, heard: Sequence[Logprobs]) -> None:
        sampling, width = self._sampling, self._sampling.num_beams
        length = len(self.running[0].token_ids) + 1
        stop_ids = sampling.stop_token_ids if length > sampling.min_new_tokens else ()
        banned = () if stop_ids else sampling.stop_token_ids
        found = [
            (beam.score + logprob, index, token_id, logprob)
            for index, (beam, logprobs) in enumerate(zip(self.running, heard, strict=True))
            for token_id, logprob in logprobs.top
            if token_id not in banned
        ]
        found.sort(key=lambda each: -each[0])
        running: list[Beam] = []
        parents, norm = [], length**sampling.length_penalty
        for rank, (score, index, token_id, logprob) in enumerate(found):
            if length == sampling.max_new_tokens or token_id in stop_ids:
                if rank < width:  # what comes after is there to go on only
                    self.ended.append(self._grown(index, token_id, Logprobs(logprob, heard[index].top), score / norm))
            elif len(running) < width:
                running.append(self._grown(index, token_id, Logprobs(logprob, heard[index].top), score))
                parents.append(index)
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[:width]
        is_full = len(self.ended) == width
        self.is_over = not running or (is_full and running[0].score / norm <= self.ended[-1].score)
        self.running, self.parents = running, parents

    def _grown(self, index: int, token_id: int, logprobs: Logprobs, score: float) -> Beam:
        beam, count = self.running[index], self._sampling.num_logprobs
        told = (Logprobs(logprobs.chosen, logprobs.top[:count]),) if count >= 0 else ()
        return Beam((*beam.token_ids, token_id), (*beam.logprobs, *told), score)


def prepare(request: Request, max_batch: int) -> None:
    """Its forks are its other answers, and from now on the other beams, too. Raises InvalidRequest."""
    sampling = request.sampling
    if sampling.num_beams > max_batch:
        text = "The `{field}` is {value}, the server computes {limit} answers at once"
        raise InvalidRequest(text, field="best_of", value=sampling.num_beams, limit=max_batch)
    search = BeamSearch(sampling, 1 + len(request.forks))
    # As many that follow a beam as may be needed, should all stop ids be among them.
    num_logprobs = max(sampling.num_beams + len(sampling.stop_token_ids), sampling.num_logprobs)
    for index in range(search.num_answers, sampling.num_beams):
        name = f"{request.request_id}/{index}"
        request.forks.append(Request(name, list(request.token_ids), request.prompt_len, sampling, spans=request.spans))
    for each in (request, *request.forks):
        each.search = search
        each.sampling = replace(sampling, temperature=0.0, min_new_tokens=0, num_logprobs=num_logprobs)
