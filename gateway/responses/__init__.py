"""OpenAI's Responses API, translated into chat completions.

A stored response is written anew whenever it is retrieved. The model process stores the request, with `about` for the
fields that it does not need itself, and the tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.errors import InvalidRequest, RequestError
from engine.wire import COMPLETED, DELETED, INCOMPLETE, StoredResponse, shown
from gateway.openai import OpenAIProtocol
from gateway.openai.content_blocks import as_named_event
from gateway.openai.output_syntax import output_syntax_of
from gateway.openai.unsupported_fields import UNSUPPORTED_IN_BLOCKS, check_spelling
from gateway.protocol import RequestContext
from gateway.responses.answer import ResponseIdentity, ResponsesExchange
from gateway.responses.fields import REFUSED, fields
from gateway.responses.input_items import input_items
from gateway.responses.request import ERROR_NAMES, NAMES, add_items, exchange_of, instructions_of, parse, tools_of

PATH, PREVIOUS = "/v1/responses", "previous_response_id"


class ResponsesProtocol(OpenAIProtocol):
    """OpenAI's Responses API."""

    name = "responses"
    paths: Collection[str] = (PATH,)
    names = ERROR_NAMES

    def fields(self, path: str) -> dict[str, Any]:
        return fields()

    def needs(self, path: str) -> Collection[str]:
        return ("input",)

    def example(self, path: str) -> dict[str, Any]:
        return {"model": "default", "input": "What is the capital of France?", "max_output_tokens": 64}

    def parse(self, body: dict[str, Any], context: RequestContext) -> ResponsesExchange:
        check_spelling(body, fields(), ("include", *REFUSED, *UNSUPPORTED_IN_BLOCKS), NAMES)
        before = self._conversation(context.previous, context) if context.previous else ()
        return parse(body, context.model_name, output_syntax_of(context.config), before)

    def stored(self, stored: StoredResponse, context: RequestContext) -> dict[str, Any]:
        """Return the object of a stored response."""
        if stored.status == DELETED:
            return {"id": stored.response_id, "object": "response", "deleted": True}
        return self._exchange(stored, context).stored(stored)

    def resumed(self, stored: StoredResponse, context: RequestContext, starting_after: int) -> ResponsesExchange:
        """Return the exchange that streams a stored response, after the event of this number."""
        about, _ = stored.request_parts()
        body = about["body"]
        if not body.get("background"):
            text = "the response {value} cannot be streamed: only one whose request has `background` set can be"
            raise InvalidRequest(text, value=shown(stored.response_id))
        exchange = self._exchange(stored, context)
        exchange.resume(body, starting_after)
        return exchange

    def input_items(self, stored: StoredResponse) -> list[dict[str, Any]]:
        """Return the input items of a stored response: the conversation that it answers, without its instructions."""
        about, messages = stored.request_parts()
        return input_items(messages[len(instructions_of(about["body"])) :], about["ids"])

    def _exchange(self, stored: StoredResponse, context: RequestContext) -> ResponsesExchange:
        """Return the exchange of the request that created a stored response."""
        known, messages = stored.request_parts()
        body = known.pop("body")
        source = {"messages": messages, **tools_of(body)}
        named = {**body, "request_id": stored.response_id}
        return exchange_of(
            named, source, ResponseIdentity(**known), context.model_name, output_syntax_of(context.config)
        )

    def _conversation(self, previous: StoredResponse, context: RequestContext) -> list[dict[str, Any]]:
        """Return the messages of a stored response and its request, without the instructions."""
        if previous.status not in (COMPLETED, INCOMPLETE):
            text = "the response of `{field}` is {value}, only one that is {limit} can be continued"
            raise InvalidRequest(text, field=PREVIOUS, value=previous.status, limit=[COMPLETED, INCOMPLETE])
        about, messages = previous.request_parts()
        messages = messages[len(instructions_of(about["body"])) :]
        add_items(messages, self.stored(previous, context)["output"])
        return messages

    def error_event(self, error: RequestError, context: RequestContext) -> bytes:
        """Return the error event in both forms that clients know: the documented one, and the one that makes them
        raise.
        """
        body = self.error(error, context)
        exchange = context.exchange
        number = exchange.num_events if isinstance(exchange, ResponsesExchange) else 0
        return as_named_event({**body["error"], **body, "type": "error", "sequence_number": number})
