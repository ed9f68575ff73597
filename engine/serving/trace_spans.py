"""Trace spans of a request: queue, prefill and decode, with OpenTelemetry's attribute names for generative models. They
contain numbers only, no text of prompts and answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.tracing import Context, Span

if TYPE_CHECKING:
    from engine.serving.reply import Reply


def request_spans(reply: Reply, model_name: str) -> list[Span]:
    """Return the spans of a request that ends now; none if its trace is not sampled."""
    parent = Context.read(reply.state.request.traceparent)
    return [*_spans(reply, model_name, parent, parent.child())] if parent.is_sampled else []


def _spans(reply: Reply, model_name: str, parent: Context, own: Context) -> Iterator[Span]:
    request, sampling, now = reply.state.request, reply.prompt.sampling, time.time()
    outputs = [choice.prompt_outputs for choice in reply.choices if choice.prompt_outputs]
    operation = "embeddings" if request.pooling else "chat" if request.messages else "text_completion"
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "paddle",
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.choice.count": request.n,
        "gen_ai.usage.input_tokens": len(reply.prompt.token_ids),
        "gen_ai.usage.output_tokens": reply.num_generated,
        "gen_ai.usage.cache_read.input_tokens": outputs[0].num_cached if outputs else None,
        "gen_ai.response.finish_reasons": [each.answer.finish_reason or "error" for each in reply.choices],
        "error.type": reply.error_kind or None,
    }
    yield Span(
        f"{operation} {model_name}", own, parent.span_id, reply.received_at, now, attributes, error=reply.error_kind
    )
    began = min([each.began_at for each in outputs if each.began_at], default=0.0)
    first = min([choice.first_token_at for choice in reply.choices if choice.first_token_at], default=0.0)
    yield Span("queue", own.child(), own.span_id, reply.received_at, began or first or now)
    if began:
        yield Span("prefill", own.child(), own.span_id, began, first or now)
    if first:
        yield Span("decode", own.child(), own.span_id, first, now)
