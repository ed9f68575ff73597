"""Suffix matching: drafts what followed the longest earlier occurrences of the last tokens, in the request itself and
in recent answers to the same owner. It handles token ids and needs no model."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from engine.core.types import Arrival

MAX_OCCURRENCES = 32  # of the last two tokens that are compared, the most recent ones first
MAX_MATCH = 32  # tokens before an occurrence that are compared
MIN_SHARE = 0.3  # of the longest occurrences that must agree on a draft token and on those before it
MAX_ANSWER_TOKENS = 1 << 17  # of all recent answers together
SEPARATOR = -1  # between two answers
Scope = tuple[str, ...]  # see Arrival


class History:
    """Tokens in which earlier occurrences of any two tokens are found, the most recent first. Each position refers to
    the one before it that follows the same two tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}
        self._previous: list[int] = [0, 0]

    def read(self, token_ids: list[int]) -> None:
        """Enter the new tokens behind those of the last call. The last two are entered when it is known what follows
        them."""
        self.token_ids, latest, previous = token_ids, self._latest, self._previous
        for end in range(len(previous), len(token_ids)):
            pair = token_ids[end - 2], token_ids[end - 1]
            previous.append(latest.get(pair, 0))
            latest[pair] = end

    def ends(self, last: Sequence[int]) -> Iterator[int]:
        """Yield the positions that follow an occurrence of the two tokens `last`."""
        end = self._latest.get((last[0], last[1]), 0)
        for _ in range(MAX_OCCURRENCES):
            if not end:
                return
            yield end
            end = self._previous[end]


class RecentAnswers:
    """The last answers of an engine, by scope. A scope sees its own answers only. All of them together are bounded:
    scopes without a request for the longest time are dropped first, then the older half of the only one's answers."""

    def __init__(self, max_tokens: int = MAX_ANSWER_TOKENS):
        self._max_tokens = max_tokens
        self._histories: OrderedDict[Scope, History] = OrderedDict()
        self.num_tokens = 0

    def of(self, scope: Scope) -> History | None:
        """Return the answers of a scope, if there are any."""
        if history := self._histories.get(scope):
            self._histories.move_to_end(scope)
        return history

    def add(self, scope: Scope, answer: Sequence[int]) -> None:
        answer = answer[: self._max_tokens // 2]
        history = self.of(scope)
        if history is None:
            history = self._histories[scope] = History()
        history.token_ids += [SEPARATOR, *answer]
        history.read(history.token_ids)
        self.num_tokens += 1 + len(answer)
        while self.num_tokens > self._max_tokens:
            oldest, dropped = self._histories.popitem(last=False)
            self.num_tokens -= len(dropped.token_ids)
            if oldest == scope:
                self.add(scope, dropped.token_ids[-(self._max_tokens // 2) :])


class SuffixDrafter:
    """Drafter for one slot. It compares what precedes the earlier occurrences of the last two tokens, and proposes what
    most of those with the longest match continue with."""

    def __init__(self, arrival: Arrival, answers: RecentAnswers):
        self._arrival, self._answers = arrival, answers
        self._own = History()
        self.level = 0
        self._next: tuple[History, int, int] | None = None  # where the last match goes on if its drafts are correct

    def propose(self, token_ids: list[int], max_drafts: int) -> Sequence[int]:
        """Return the likely continuation, see `Drafter`."""
        self._own.read(token_ids)
        if len(token_ids) < 2:
            return []
        matches = list(self._matches(token_ids))
        longest = max((length for length, _, _ in matches), default=0)
        if longest < 2:
            return []
        self.level = min(longest.bit_length() - 2, 3)
        best = [(history, end) for length, history, end in matches if length == longest]
        self._next = *best[0], len(token_ids)
        return _continuation(best, max_drafts)

    def end(self, token_ids: Sequence[int]) -> None:
        """Remember the answer of the request, which has left its slot."""
        prompt_len = self._arrival.prompt_len
        if len(token_ids) > prompt_len + 2 and not self._arrival.sampling.num_beams:  # beams take a slot at each branch
            self._answers.add(self._arrival.scope, token_ids[prompt_len:])

    def _matches(self, token_ids: list[int]) -> Iterator[tuple[int, History, int]]:
        """Yield occurrences of the last two tokens: how many tokens match before each, and where it ends."""
        if self._next:  # It may be too long ago to be found otherwise.
            history, end, num_tokens = self._next
            end += len(token_ids) - num_tokens
            if end < len(history.token_ids):
                yield _match_len(history.token_ids, end, token_ids), history, end
        answers = self._answers.of(self._arrival.scope)
        for history in (self._own, answers) if answers else (self._own,):
            for end in history.ends(token_ids[-2:]):
                yield _match_len(history.token_ids, end, token_ids), history, end


def _match_len(earlier: Sequence[int], end: int, token_ids: Sequence[int]) -> int:
    """Return how many tokens before `end` are the last ones of `token_ids`, up to MAX_MATCH."""
    limit = min(MAX_MATCH, end, len(token_ids))
    length = 0
    while length < limit and earlier[end - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


def _continuation(occurrences: list[tuple[History, int]], max_drafts: int) -> list[int]:
    """Return the tokens that follow most of the occurrences, as long as enough of them agree."""
    drafts: list[int] = []
    num_all = len(occurrences)
    alive = [(history.token_ids, end) for history, end in occurrences]
    while len(drafts) < max_drafts:
        alive = [(ids, end) for ids, end in alive if end < len(ids) and ids[end] != SEPARATOR]
        votes = Counter(ids[end] for ids, end in alive)
        token_id, count = votes.most_common(1)[0] if votes else (SEPARATOR, 0)
        if count < max(1, MIN_SHARE * num_all):
            break
        drafts.append(token_id)
        alive = [(ids, end + 1) for ids, end in alive if ids[end] == token_id]
    return drafts
