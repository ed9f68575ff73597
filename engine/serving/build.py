"""Puts the service together from the settings and an exported model: what the Triton model does at its start."""

from __future__ import annotations

from engine.link.client import EngineClient
from engine.serving.loras import LoraNames
from engine.serving.options import ServiceOptions
from engine.serving.prompt import PromptReader
from engine.serving.service import Service
from engine.settings.config import Config
from engine.settings.processes import ENGINE_FAILED_FILE, ENGINE_SUSPECT_FILE
from engine.text.tokenizer import Tokenizer


def build_service(config: Config) -> Service:
    tokenizer = Tokenizer.load(config.graph_path)
    files = (config.run_path / ENGINE_FAILED_FILE, config.run_path / ENGINE_SUSPECT_FILE)
    client = EngineClient(f"ipc://{config.engine_socket}", *files)

    def cache_size() -> tuple[int, int] | None:
        stats = client.stats
        return (stats["num_blocks"], stats["block_size"]) if "num_blocks" in stats else None

    loras = LoraNames.of_server(config)
    reader = PromptReader.load(config, config.graph_path, tokenizer, cache_size, loras)
    return Service(reader, client, ServiceOptions.of(config))
