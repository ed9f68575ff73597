"""Grammar of `allowed_token_ids`: one mask for all tokens of the answer, without compilation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from engine.core.types import Grammar, Request
from engine.errors import InvalidRequest, RequestError

FIELD = "allowed_token_ids"


class AllowedTokens:
    """An `engine.core.grammar.Grammar` that never changes and is never complete: only an allowed token can end it."""

    error: RequestError | None = None
    is_complete = is_mask_missing = False
    is_ready = takes_drafts = True

    def __init__(self, grammar: str, vocab_size: int):
        self.token_ids = frozenset(json.loads(grammar))
        self.row = np.zeros(-(-vocab_size // 32), np.uint32)  # one bit per token, least significant first
        for token_id in self.token_ids:
            self.row[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def forced(self) -> Sequence[int]:
        """Return no tokens, even for a single allowed id, because the number of its repetitions is not determined."""
        return ()


def allowed_tokens(request: Request, vocab_size: int) -> Future[Sequence[Grammar]]:
    """Return the grammar that a request and its forks share, or an error if an answer already contains other tokens."""
    begun: Future[Sequence[Grammar]] = Future()
    answers = (request, *request.forks)
    grammar = AllowedTokens(request.sampling.structured_output[1], vocab_size)
    if all(grammar.token_ids.issuperset(each.token_ids[each.prompt_len :]) for each in answers):
        begun.set_result([grammar] * len(answers))
    else:
        begun.set_exception(answer_mismatch(FIELD))
    return begun


def answer_mismatch(field: str) -> InvalidRequest:
    """Return the error of a resumed answer whose known tokens do not match the grammar of `field`."""
    return InvalidRequest(f"The `{{field}}` do not have the form that `{{{field}}}` asks for", field="answer_ids")
