"""Puts the service together from the settings and an exported model: what the Triton model does at its start."""

from __future__ import annotations

from engine.link.client import EngineClient
from engine.serving.prompt import PromptReader
from engine.serving.service import Service, ServiceOptions
from engine.settings.config import ENGINE_FAILED_FILE, STOPPING_FILE, Config
from engine.text.tokenizer import Tokenizer


def build_service(config: Config) -> Service:
    tokenizer = Tokenizer.load(config.graph_path)
    client = EngineClient(f"ipc://{config.engine_socket}", config.run_path / ENGINE_FAILED_FILE)

    def cache_size() -> tuple[int, int] | None:
        stats = client.stats
        return (stats["num_blocks"], stats["block_size"]) if "num_blocks" in stats else None

    reader = PromptReader.load(config, config.graph_path, tokenizer, cache_size)
    options = ServiceOptions(
        streaming=not config.disable_streaming,
        hang_after_s=config.check_health_interval_s,
        max_body_bytes=config.max_body_bytes,
        max_running=config.batch_size,
        max_waiting=config.max_cached_task_num,
        max_waiting_tokens=config.max_waiting_tokens,
        queue_timeout_s=config.queue_timeout_s,
        why_not_served=config.machines.why_not_served,
        stopping_file=config.run_path / STOPPING_FILE,
        drain_s=config.drain_timeout_s,
    )
    return Service(tokenizer, reader, client, options)
