"""The grammar of an answer that consists of some token ids: one mask for all of its tokens, nothing to compile."""

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

    def __init__(self, form: str, vocab_size: int):
        self.token_ids = frozenset(json.loads(form))
        self.row = np.zeros(-(-vocab_size // 32), np.uint32)  # a bit of each token, the lowest first
        for token_id in self.token_ids:
            self.row[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def forced(self) -> Sequence[int]:
        """Return no tokens, also of a single id: which one comes is known, how many do not need to be."""
        return ()


def allowed_tokens(request: Request, vocab_size: int) -> Future[Sequence[Grammar]]:
    """Return the grammar of a request and its forks, which they share, or the error of an answer that has others."""
    begun: Future[Sequence[Grammar]] = Future()
    answers = (request, *request.forks)
    grammar = AllowedTokens(request.sampling.form[1], vocab_size)
    if all(grammar.token_ids.issuperset(each.token_ids[each.prompt_len :]) for each in answers):
        begun.set_result([grammar] * len(answers))
    else:
        begun.set_exception(other_form(FIELD))
    return begun


def other_form(field: str) -> InvalidRequest:
    """Return the error of an answer that goes on, but has not begun in the form that `field` asks for."""
    return InvalidRequest(f"The `{{field}}` do not have the form that `{{{field}}}` asks for", field="answer_ids")
