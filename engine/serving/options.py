"""What the service is told by the settings."""

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
    streaming: bool = True  # False: only whole answers leave the server
    hang_after_s: float = 60.0  # of a step, where those before do not say less
    max_body_bytes: int = 4 << 20  # of one request
    max_running: int = 1 << 10  # requests in the engine, and beyond them
    max_waiting: int = 1 << 10
    max_waiting_tokens: int = 1 << 20  # of their prompts
    queue_timeout_s: float = 0.0  # from a request's arrival until it begins; 0: it may wait for ever
    stored_ttl_s: float = 3600.0  # of a stored response, after its end
    max_stored_tokens: int = 1 << 20  # of all stored responses with their prompts
    why_not_served: str = ""  # of a machine that only holds ranks: what requests are told
    stopping_file: Path | None = None  # the supervisor writes when requests are refused from
    drain_s: float = 30.0  # from then on, until the open ones are ended
    tracer: Tracer | None = None  # of whom spans are told
    vllm_model_name: Callable[[], str] = str  # the model's name in metrics with vLLM's names; empty: there are none
    is_first_model: bool = True  # of this run directory: no client can have a part of another's answer

    @classmethod
    def of(cls, config: Config) -> ServiceOptions:
        served = ServedModel(config.run_path)
        return cls(
            streaming=not config.disable_streaming,
            hang_after_s=config.check_health_interval_s,
            max_body_bytes=config.max_body_bytes,
            max_running=config.batch_size,
            max_waiting=config.max_cached_task_num,
            max_waiting_tokens=config.max_waiting_tokens,
            queue_timeout_s=config.queue_timeout_s,
            stored_ttl_s=config.stored_response_ttl_s,
            max_stored_tokens=config.max_stored_response_tokens,
            why_not_served=config.machines.why_not_served,
            stopping_file=config.run_path / STOPPING_FILE,
            drain_s=config.drain_timeout_s,
            tracer=Tracer.of(config, "model"),
            vllm_model_name=partial(served.name, config.served_model_name) if config.vllm_metrics else str,
            is_first_model=not served.now().id,
        )
