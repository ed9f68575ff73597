"""Guesses of what follows."""

from engine.core.drafting import NgramDrafter
from engine.core.types import Request, Sampling


def test_a_draft_that_no_step_has_tried_is_proposed_again():
    """A request whose mask is late is left out of a step that it was scheduled for."""
    drafter = NgramDrafter(max_ngram=3, max_draft=4)
    request = Request("a", [1, 2, 3, 1, 2], 5, Sampling(10))
    assert [*drafter.propose(request, 4)] == [*drafter.propose(request, 4)] == [3]
    request.token_ids += [3, 1]
    assert [*drafter.propose(request, 4)] == [2, 3]  # it was right, so that the next one is longer
