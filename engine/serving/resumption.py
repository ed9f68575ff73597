"""Resumption of answers: a client that has a part of an answer gets the rest, from an open or finished request or by
generating the same answer again."""

from __future__ import annotations

from engine.errors import Cancelled, UnknownAnswer
from engine.serving.choice import RequestState
from engine.serving.finished_requests import MAX_TOKENS, RETENTION_S, FinishedRequestCache, check_same
from engine.serving.input_processor import InputProcessor
from engine.serving.open_replies import OpenReplies
from engine.wire import GenerationRequest, Storing, shown

LEAVE_WITHIN_S = 5.0  # the reply to the connection before


class Resumption:
    """`is_first_model`: what is computed once more is what was computed, whoever computed it."""

    def __init__(self, reader: InputProcessor, replies: OpenReplies, is_first_model: bool):
        self.finished = FinishedRequestCache(RETENTION_S, MAX_TOKENS)
        self._is_first_model = is_first_model
        self._reader = reader
        self._replies = replies

    def request_state(self, request: GenerationRequest, owner: str, storing: Storing | None) -> RequestState:
        """With what is known of its answer. Raises UnknownAnswer when the client has a part of one that would not be
        the same again."""
        if request.resume_from is None:
            return self._anew(request, owner, storing)
        if finished := self.finished.get(owner, request.req_id):
            check_same(finished.state, request)
            self.finished.pop(owner, request.req_id)
            state = finished.state
        else:
            is_same_model = self._is_first_model and not request.lora_name  # its adapter may be another by now
            is_same = bool(request.answer_ids) or (request.is_repeatable and is_same_model)
            if any(request.resume_from) and not is_same:
                text = "The answer to {field} {value} is not known any more: ask again without `{resume_from}`"
                raise UnknownAnswer(text, field="req_id", value=shown(request.req_id))
            state = self._anew(request, owner, storing)
        state.resume(request)
        return state

    def _anew(self, request: GenerationRequest, owner: str, storing: Storing | None) -> RequestState:
        state = RequestState.create(request, self._reader.read(request), self._reader.tokenizer)
        return state._replace(owner=owner, storing=storing)

    def end_previous(self, request: GenerationRequest) -> None:
        """Its client asks again: it has lost a connection of which nobody has told us yet."""
        before = self._replies.get(request.req_id)
        if before is not None:
            check_same(before.state, request)
            before.ended(Cancelled("the answer goes on over another connection"))
            before.is_released.wait(LEAVE_WITHIN_S)
