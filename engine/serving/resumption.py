"""Who has a part of an answer goes on after it: with what is open or kept of it, or with the same answer once more."""

from __future__ import annotations

from engine.errors import Cancelled, UnknownAnswer
from engine.serving.choice import Asked
from engine.serving.kept import KEPT_S, MAX_TOKENS, KeptAnswers, check_same
from engine.serving.open_replies import OpenReplies
from engine.serving.prompt import PromptReader
from engine.wire import GenerationRequest, Storing, shown

LEAVE_WITHIN_S = 5.0  # the reply to the connection before


class Resumption:
    """`is_first_model`: what is computed once more is what was computed, whoever computed it."""

    def __init__(self, reader: PromptReader, replies: OpenReplies, is_first_model: bool):
        self.kept = KeptAnswers(KEPT_S, MAX_TOKENS)
        self._is_first_model = is_first_model
        self._reader = reader
        self._replies = replies

    def asked(self, request: GenerationRequest, owner: str, storing: Storing | None) -> Asked:
        """With what is known of its answer. Raises UnknownAnswer when the client has a part of one that would not be
        the same again."""
        if request.resume_from is None:
            return self._anew(request, owner, storing)
        if kept := self.kept.get(owner, request.req_id):
            check_same(kept.asked, request)
            self.kept.pop(owner, request.req_id)
            asked = kept.asked
        else:
            is_same_model = self._is_first_model and not request.lora_name  # its adapter may be another by now
            is_same = bool(request.answer_ids) or (request.is_repeatable and is_same_model)
            if any(request.resume_from) and not is_same:
                text = "The answer to {field} {value} is not known any more: ask again without `{resume_from}`"
                raise UnknownAnswer(text, field="req_id", value=shown(request.req_id))
            asked = self._anew(request, owner, storing)
        asked.go_on(request)
        return asked

    def _anew(self, request: GenerationRequest, owner: str, storing: Storing | None) -> Asked:
        asked = Asked.now(request, self._reader.read(request), self._reader.tokenizer)
        return asked._replace(owner=owner, storing=storing)

    def end_before(self, request: GenerationRequest) -> None:
        """Its client asks again: it has lost a connection of which nobody has told us yet."""
        before = self._replies.get(request.req_id)
        if before is not None:
            check_same(before.asked, request)
            before.ended(Cancelled("the answer goes on over another connection"))
            before.has_left.wait(LEAVE_WITHIN_S)
