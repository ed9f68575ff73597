"""Answer to probes: limits of the model, statistics of the engine, and the readiness of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import wire
from engine.serving.metrics import samples

if TYPE_CHECKING:
    from engine.serving.input_processor import InputProcessor
    from engine.serving.service import Service


def model_state(service: Service, processor: InputProcessor, max_running: int, with_metrics: bool) -> wire.ModelState:
    """Return the current state of the service. `max_running` is the batch size of the engine."""
    client, reason = service.client, service.not_ready_reason()
    stats = client.stats
    return wire.ModelState(
        ready=not reason,
        reason=reason,
        model_len=processor.lengths.model_len,
        max_seq_len=processor.lengths.max_seq_len,
        max_dec_len=processor.lengths.max_dec_len,
        num_labels=0 if processor.classifier is None else len(processor.classifier),
        num_running=int(stats.get("num_running", 0)),
        num_waiting=int(stats.get("num_waiting", 0)),
        num_blocks_held=int(stats.get("num_blocks_held", 0)),
        num_open=service.num_open,
        engine_silent_s=min(client.silent_s, 1e9),
        engine_step_s=stats.get("step_age_s", 0.0),
        num_restarts=client.num_restarts,
        loras=processor.loras.names(),
        metrics=samples(service, max_running) if with_metrics else None,
        last_requests=service.latency.recent() if with_metrics else None,
        num_waiting_tokens=int(stats.get("num_waiting_tokens", 0)),
        reads_images=processor.images is not None,
        model_hash=processor.model_hash,
        engines=[
            (min(engine.silent_s, 1e9), engine.stats.get("step_age_s", 0.0))
            for engine in client.engines
            if len(client.engines) > 1
        ],
        fingerprint=int(stats.get("fingerprint", 0)),
        usage=service.rate_limiter.report(),
        num_prefill_instances=int(stats.get("num_prefill_instances", 0)),
        cache_port=service.cache_port,
        is_stopping=service.is_stopping,
    )
