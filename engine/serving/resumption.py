"""Resumption of answers: a client that has a part of an answer gets the rest, from an open or finished request or by
generating the same answer again."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import Cancelled, UnknownAnswer
from engine.serving.choice import RequestState
from engine.serving.finished_requests import MAX_TOKENS, RETENTION_S, FinishedRequestCache, check_same
from engine.serving.input_processor import InputProcessor
from engine.serving.open_replies import OpenReplies
from engine.wire import GenerationRequest, StoreOptions, shown

RELEASE_TIMEOUT_S = 5.0  # for the reply of the previous connection


class Resumption:
    """Finds or recreates the state of resumed requests. `is_first_model`: all answers of this run directory are by the
    current model, so that generating a repeatable answer again gives the same tokens."""

    def __init__(self, processor: InputProcessor, replies: OpenReplies, is_first_model: bool):
        self.finished = FinishedRequestCache(RETENTION_S, MAX_TOKENS)
        self._is_first_model = is_first_model
        self._processor = processor
        self._replies = replies

    def request_state(self, request: GenerationRequest, owner: str, storing: StoreOptions | None) -> RequestState:
        """Return the state of a request, with the known part of its answer if it is resumed. Raises UnknownAnswer if
        the client has a part of an answer that is not known and would not be generated identically."""
        resume_from = request.resume_from
        if resume_from is None:
            return self._create(request, owner, storing)
        if finished := self.finished.get(owner, request.req_id):
            check_same(finished.state, request)
            self.finished.pop(owner, request.req_id)
        if finished and finished.state.has_logprobs_after(resume_from):
            state = self._with_images(finished.state, request)
        else:
            if finished:  # the client has fewer tokens than this process was given, so all are generated again
                request = replace(request, infer_seed=finished.state.prompt.sampling.seed)
            is_same_model = self._is_first_model and not request.lora_name  # its adapter may have been replaced
            is_same = bool(request.answer_ids) or (request.is_repeatable and is_same_model)
            if any(resume_from) and not is_same:
                raise _unknown(request)
            state = self._create(request, owner, storing)
        state.resume(request)
        return state

    def _with_images(self, state: RequestState, request: GenerationRequest) -> RequestState:
        """Return the state with what the engine needs to go on: the images, which finished requests do not keep."""
        if not (state.prompt.spans and any(choice.is_open for choice in state.choices)):
            return state
        restored = state.with_images_of(self._processor.process(request))
        if restored is None:  # what is at the URL of an image has changed
            raise _unknown(request)
        return restored

    def _create(self, request: GenerationRequest, owner: str, storing: StoreOptions | None) -> RequestState:
        state = RequestState.create(request, self._processor.process(request), self._processor.tokenizer)
        return state._replace(owner=owner, storing=storing)

    def end_previous(self, request: GenerationRequest) -> None:
        """End the open reply of a previous connection of the same request, whose loss was not noticed yet. Raises
        DuplicateRequest if it is another request."""
        previous = self._replies.get(request.req_id)
        if previous is not None:
            check_same(previous.state, request)
            previous.ended(Cancelled("the answer goes on over another connection"))
            previous.is_released.wait(RELEASE_TIMEOUT_S)


def _unknown(request: GenerationRequest) -> UnknownAnswer:
    text = "The answer to {field} {value} is not known any more: ask again without `{resume_from}`"
    return UnknownAnswer(text, field="req_id", value=shown(request.req_id))
