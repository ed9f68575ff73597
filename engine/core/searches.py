"""Beam searches in the batch: the beams of each are a request and its forks, which move on together. Knows the slots
and the blocks that they write to; which of them go on is `BeamSearch`'s to say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from engine.core import reading
from engine.core.roster import Roster
from engine.core.types import Logprobs, Request, Row, State
from engine.core.updates import FAILED, Update


class Searches:
    def __init__(self, roster: Roster):
        self._roster = roster
        self._found: list[Request] = []  # leaders of those that the step has ended

    def rows(self, leader: Request) -> Sequence[tuple[Request, Row]]:
        """One for each beam, if all have room."""
        assert leader.search
        running = [leader, *leader.forks][: len(leader.search.running)]
        for beam in running:
            if beam.num_computed >= beam.room and (beam.slot < 0 or not self._roster.has_room(beam)):
                return ()
        rows = []
        for beam in running:
            new = self._roster.cache.take_new_blocks(beam)
            rows.append((beam, Row(beam.slot, beam.num_computed, beam.token_ids[-1:], new)))
            beam.num_computed += 1
        return rows

    def grow(self, beam: Request, logprobs: Logprobs) -> None:
        """With the last of the beams of a search all go on, in whatever slot: what each wrote is held by those that it
        has become."""
        search, cache = beam.search, self._roster.cache
        assert search
        if not search.has_begun:
            cache.publish(beam)
        is_number = logprobs.chosen == logprobs.chosen
        if is_number and not search.hear(logprobs):
            return
        leader = self._roster.leader_of.get(beam.request_id, beam)
        if search.is_over or not is_number:
            self._found.append(leader)
            return
        members = [leader, *leader.forks]
        cache.branch(members, search.parents)
        for each, found in zip(members, search.running, strict=False):
            each.state = State.RUNNING
            each.token_ids[each.prompt_len :] = found.token_ids
            self._roster.announce(each)

    def end(self) -> list[Update]:
        """Those that are over."""
        updates = [update for leader in self._found for update in self._end(leader)]
        self._found.clear()
        return updates

    def _end(self, leader: Request) -> list[Update]:
        search, updates = leader.search, []
        assert search
        told = reading.whole(leader)
        answers = (leader, *leader.forks)[: search.num_answers]
        for answer, beam in zip_longest(answers, search.ended[: search.num_answers]):
            if beam and search.is_over:
                reason = search.reason_of(beam)
                updates.append(Update(answer, beam.token_ids, beam.logprobs or None, reason, None, told))
            else:
                updates.append(Update(answer, (), None, FAILED))
        for each in (leader, *leader.forks):
            each.state = State.ENDED
        self._roster.leave(leader)
        return updates
