"""Resumable streams, as defined by server-sent events.

With the header `Last-Event-ID` every event has an id: the number of tokens of each choice so far. A request with the
last id that its client has received continues after it. The header `X-Request-Id` names the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.errors import InvalidRequest
from engine.wire import Delta, Usage, shown
from gateway.openai.answer import OpenAIExchange
from gateway.openai.logprobs import TextOffsets
from gateway.openai.output_syntax import NO_SYNTAX, output_syntax_of
from gateway.openai.request import parse
from gateway.protocol import RequestContext

LAST_EVENT_ID = "Last-Event-ID"


class ResumableExchange(OpenAIExchange):
    """OpenAIExchange whose events have ids."""

    def __init__(self, *args: Any, num_tokens: list[int]):
        super().__init__(*args)
        self.go_on(num_tokens)
        self._num_tokens = num_tokens

    def event(self, index: int, answer: Delta) -> bytes:
        choice = self._choice(index, answer)
        begins = self.completion.is_chat and not choice.has_begun
        if answer.send_idx and choice.usage == Usage():  # the first response of a stream that goes on
            choice.aligned = TextOffsets(len(self._echo(choice)) + answer.text_idx)
        before = list(self._num_tokens)
        self._num_tokens[answer.index] = answer.send_idx + len(answer.token_ids)
        events = super().event(index, answer).split(b"\n\n")[:-1]
        counts = [before if begins and place == 0 else self._num_tokens for place in range(len(events))]
        return b"".join(map(_with_id, counts, events))


def _with_id(num_tokens: Sequence[int], event: bytes) -> bytes:
    return b"id: %s\n%s\n\n" % (",".join(map(str, num_tokens)).encode(), event)


def parse_resumed(body: dict[str, Any], is_chat: bool, context: RequestContext) -> OpenAIExchange:
    """Return the exchange of a request with the header `Last-Event-ID`.

    An empty id or 0 starts a new answer. Raise InvalidRequest.
    """
    if not body.get("request_id"):
        raise InvalidRequest(f"with {LAST_EVENT_ID} the header `{{field}}` must name the request", field="X-Request-Id")
    completion = parse(body, is_chat, context.model_name, output_syntax_of(context.config))
    variables = completion.requests[0].get("chat_template_kwargs", {})
    if variables.get("enable_thinking") is False or variables.get("continue_final_message"):
        # A model that reasons nevertheless writes its reasoning as content.
        completion = replace(completion, syntax=replace(completion.syntax, reasoning="never"))
    if completion.syntax != NO_SYNTAX:
        text = "`{field}` is not supported with tools or reasoning, whose parsing needs the whole answer"
        raise InvalidRequest(text, field=LAST_EVENT_ID)
    if len(completion.requests) > 1:
        text = f"with {LAST_EVENT_ID} the `{{field}}` must be one, there are {{value}}"
        raise InvalidRequest(text, field="prompt", value=len(completion.requests), limit=1)
    num_tokens = _counts(context.headers[LAST_EVENT_ID], completion.n)
    if not completion.stream:
        num_tokens = [0] * completion.n
    if any(num_tokens) and completion.with_logprobs and completion.prompts.echo and None in completion.prompts.texts:
        text = "`{field}` of a prompt of token ids with `logprobs` cannot be resumed, as its text is not sent again"
        raise InvalidRequest(text, field="echo")
    completion.requests[0]["resume_from"] = list(num_tokens)
    completion = replace(completion, names={**completion.names, "resume_from": LAST_EVENT_ID})
    return ResumableExchange(completion, num_tokens=num_tokens)


def _counts(event_id: str, n: int) -> list[int]:
    if event_id.strip() in ("", "0"):
        return [0] * n
    counts = event_id.split(",")
    if len(counts) != n or not all(count.isascii() and count.isdigit() and len(count) < 10 for count in counts):
        text = f"the header `{{field}}` is {{value}}, expected the id of an event, with n={n} that is {n} numbers"
        raise InvalidRequest(text, field=LAST_EVENT_ID, value=shown(event_id))
    return [int(count) for count in counts]
