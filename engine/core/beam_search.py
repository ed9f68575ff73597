"""Beam search of one request, with the results of Hugging Face's `generate`. It handles tokens and log-probabilities
only and is independent of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.types import Logprobs, Sampling


class Beam(NamedTuple):
    """An answer or the beginning of one."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # of each token, as the client asked for them
    score: float = 0.0  # sum of the log-probabilities; of a finished beam divided by length ** length_penalty


class BeamSearch:
    """State of a search: the beams that continue and the best finished ones, both sorted by score, best first."""

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        self.restart()

    def restart(self) -> None:
        """Forget everything: the search begins again behind the prompt."""
        self.running = [Beam()]
        self.finished: list[Beam] = []
        self.parents: list[int] = []  # for each running beam, the index of its parent before the last `advance`
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """Return whether the beams have tokens."""
        return bool(self.running and self.running[0].token_ids)

    def finish_reason(self, beam: Beam) -> str:
        """Return the finish reason of a finished beam: 'stop' or 'length'."""
        return "stop" if beam.token_ids[-1] in self._sampling.stop_token_ids else "length"

    def advance(self, logprobs: Sequence[Logprobs]) -> None:
        """Extend the beams by one token. `logprobs` has the candidates for the next token of each running beam, at
        least num_beams + len(stop_token_ids) of them unless the vocabulary is smaller."""
        sampling, width = self._sampling, self._sampling.num_beams
        length = len(self.running[0].token_ids) + 1
        stop_ids = sampling.stop_token_ids if length > sampling.min_new_tokens else ()
        banned = () if stop_ids else sampling.stop_token_ids
        candidates = [
            (beam.score + logprob, index, token_id, logprob)
            for index, (beam, of_beam) in enumerate(zip(self.running, logprobs, strict=True))
            for token_id, logprob in of_beam.top
            if token_id not in banned
        ]
        candidates.sort(key=lambda each: -each[0])
        running: list[Beam] = []
        parents, norm = [], length**sampling.length_penalty
        for rank, (score, index, token_id, logprob) in enumerate(candidates):
            chosen = Logprobs(logprob, logprobs[index].top)
            if length == sampling.max_new_tokens or token_id in stop_ids:
                if rank < width:  # lower ranks are candidates for running beams only
                    self.finished.append(self._extended(index, token_id, chosen, score / norm))
            elif len(running) < width:
                running.append(self._extended(index, token_id, chosen, score))
                parents.append(index)
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        is_full = len(self.finished) == width
        self.is_over = not running or (is_full and running[0].score / norm <= self.finished[-1].score)
        self.running, self.parents = running, parents

    def _extended(self, index: int, token_id: int, logprobs: Logprobs, score: float) -> Beam:
        beam, count = self.running[index], self._sampling.num_logprobs
        wanted = (Logprobs(logprobs.chosen, logprobs.top[:count]),) if count >= 0 else ()
        return Beam((*beam.token_ids, token_id), (*beam.logprobs, *wanted), score)
