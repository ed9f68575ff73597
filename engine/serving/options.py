"""Options of the service, derived from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.settings.config import Config
from engine.settings.processes import STOPPING_FILE
from engine.settings.served import ServedModel
from engine.tracing import Tracer


@dataclass(frozen=True)
class ServiceOptions:
    """Limits and options of a `Service`."""

    streaming: bool = True  # False: only complete answers are sent
    hang_after_s: float = 60.0  # a step that takes longer makes the server unready, unless earlier steps imply less
    max_body_bytes: int = 4 << 20  # per request
    max_running: int = 1 << 10  # requests
    max_waiting: int = 1 << 10  # requests, in addition to max_running
    max_waiting_tokens: int = 1 << 20  # prompt tokens of the waiting requests
    queue_timeout_s: float = 0.0  # from the arrival of a request until it is scheduled; 0: no limit
    stored_ttl_s: float = 3600.0  # lifetime of a stored response after its end
    max_stored_tokens: int = 1 << 20  # of all stored responses with their prompts
    why_not_served: str = ""  # reason with which a machine that only runs ranks refuses requests
    stopping_file: Path | None = None  # the supervisor writes here from when requests are refused
    cache_port: int = 0  # see `ModelState`
    drain_s: float = 30.0  # seconds from then on until open requests are ended
    tracer: Tracer | None = None  # receives the spans of requests
    vllm_model_name: Callable[[], str] = str  # label `model_name` of metrics with vLLM's names; empty: no such metrics
    is_first_model: bool = True  # of this run directory: then no client can have a part of an answer of another model

    @classmethod
    def of(cls, config: Config) -> ServiceOptions:
        """Return the options for the settings."""
        served = ServedModel(config.run_path)
        return cls(
            streaming=not config.disable_streaming,
            hang_after_s=config.check_health_interval_s,
            max_body_bytes=config.max_body_bytes,
            max_running=config.max_running,
            max_waiting=config.max_cached_task_num,
            max_waiting_tokens=config.max_waiting_tokens,
            queue_timeout_s=config.queue_timeout_s,
            stored_ttl_s=config.stored_response_ttl_s,
            max_stored_tokens=config.max_stored_response_tokens,
            why_not_served=config.machines.why_not_served,
            stopping_file=config.run_path / STOPPING_FILE,
            cache_port=config.replica_cache_port,
            drain_s=config.drain_timeout_s,
            tracer=Tracer.of(config, "model"),
            vllm_model_name=partial(served.name, config.served_model_name) if config.vllm_metrics else str,
            is_first_model=not served.now().id,
        )
