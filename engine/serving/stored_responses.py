"""Stored responses: owners can retrieve, cancel and delete them while they are generated and for some time after."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from engine import wire
from engine.errors import Cancelled, InvalidRequest, RequestError, UnknownAnswer
from engine.serving.background_sender import BackgroundSender
from engine.serving.choice import RequestState
from engine.serving.finished_requests import FinishedRequest, FinishedRequestCache, check_same
from engine.serving.open_replies import OpenReplies
from engine.serving.reply import Reply, Sender
from engine.wire import GenerationRequest, Owner, StoredResponse

RELEASE_TIMEOUT_S = 5.0  # until the response of an ended reply is stored


class StoredResponses:
    """Stored responses by owner and id. Responses in progress are found among the open replies, those that have ended
    in a FinishedRequestCache. Thread-safe."""

    def __init__(self, replies: OpenReplies, ttl_s: float, max_tokens: int):
        self._replies, self._ttl_s = replies, ttl_s
        self.finished = FinishedRequestCache(ttl_s, max_tokens)

    def add(self, reply: Reply) -> None:
        """Store the response of a reply that ends, if its request asks for that."""
        if reply.storing:
            self.finished.add(FinishedRequest(reply.state, reply.error))

    def has(self, request: GenerationRequest, owner: Owner) -> bool:
        """Return True if the same request has been sent before. Raises DuplicateRequest if its id belongs to the
        response of another request."""
        reply, finished = self._replies.get(request.req_id), self.finished.get(owner.name, request.req_id)
        for each in (reply, finished):
            if each and each.state.storing and each.state.owner == owner.name:
                check_same(each.state, request)
                return True
        return False

    def watch(self, request: GenerationRequest, owner: Owner, sender: Sender) -> None:
        """Stream the answer to a background request, after the tokens that the client has, until the client
        disconnects. Raises UnknownAnswer."""
        [num_sent] = request.resume_from or (0,)
        reply = self._replies.get(request.req_id)
        if reply and reply.storing and isinstance(background := reply.sender, BackgroundSender):
            if reply.call_between_responses(partial(background.watch, sender, reply, num_sent)):
                return
            reply.is_released.wait(RELEASE_TIMEOUT_S)
        finished = self.finished.get(owner.name, request.req_id)
        if finished is None:
            raise self._unknown(request.req_id)
        end = (
            wire.Failure(finished.error, request.req_id)
            if finished.error
            else finished.state.choices[0].delta_from(num_sent)
        )
        sender.send(wire.write_answer(end), True)

    def answer(self, response_id: str, action: str, owner: Owner, sender: Sender) -> None:
        """Retrieve, cancel or delete a response and send it as a StoredResponse, from this thread or from the sender
        thread of its reply. Raises UnknownAnswer or InvalidRequest."""

        def send(response: StoredResponse) -> None:
            sender.send(wire.write_answer(response), True)

        reply = self._replies.get(response_id)
        if reply and reply.storing and reply.state.owner == owner.name:
            if self._answer_open(reply, action, send):
                return
            reply.is_released.wait(RELEASE_TIMEOUT_S)
        finished = (self.finished.pop if action == wire.DELETE else self.finished.get)(owner.name, response_id)
        if finished is None:
            raise self._unknown(response_id)
        if action == wire.CANCEL:
            _check_background(finished.state)
        send(
            _response(
                finished.state,
                wire.DELETED if action == wire.DELETE else _status(finished.state, finished.error),
                finished.error,
            )
        )

    def _unknown(self, response_id: str) -> UnknownAnswer:
        text = "there is no response {value}: with `store` or `background` one is stored for {limit} s after its end"
        return UnknownAnswer(text, value=wire.shown(response_id), limit=self._ttl_s)

    def _answer_open(self, reply: Reply, action: str, send: Callable[[StoredResponse], None]) -> bool:
        """Return False if the reply has ended."""

        def change_and_send() -> None:
            if action == wire.DELETE:
                reply.storing = None
            if action != wire.RETRIEVE and not reply.is_over:
                reply.ended(Cancelled(f"the response was {'deleted' if action == wire.DELETE else 'cancelled'}"))
                reply.cancel_all()
            status = wire.DELETED if action == wire.DELETE else _status(reply.state, reply.error, reply.has_begun)
            send(_response(reply.state, status, reply.error))

        if action == wire.CANCEL:
            _check_background(reply.state)
        return reply.call_between_responses(change_and_send)


def _check_background(state: RequestState) -> None:
    if not (state.storing and state.storing.is_background):
        text = "the response {value} cannot be cancelled: only one whose request has `background` set can be"
        raise InvalidRequest(text, value=wire.shown(state.request.req_id))


def _status(state: RequestState, error: RequestError | None, has_begun: bool = True) -> str:
    if reason := state.choices[0].answer.finish_reason:
        return wire.INCOMPLETE if reason == "length" else wire.COMPLETED
    if error:
        return wire.CANCELLED if isinstance(error, Cancelled) else wire.FAILED
    return wire.IN_PROGRESS if has_begun else wire.QUEUED


def _response(state: RequestState, status: str, error: RequestError | None) -> StoredResponse:
    """Return the StoredResponse of a request. Must be called by one thread at a time while its answer grows."""
    about = state.storing.about if state.storing else {}
    messages = wire.put_images(state.request.messages or [], state.request.images)
    error = error if status == wire.FAILED else None
    request = json.dumps([about, messages])
    return StoredResponse(state.request.req_id, status, request, state.choices[0].delta_from(), error)
