"""Construction of the service from the settings and an exported model, as the Triton model does at its start."""

from __future__ import annotations

from dataclasses import replace

from engine.exporting.files import model_hash
from engine.link.client import EngineClient
from engine.serving.input_processor import InputProcessor
from engine.serving.lora_registry import LoraRegistry
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.settings.config import Config
from engine.settings.processes import ENGINE_FAILED_FILE, ENGINE_SUSPECT_FILE
from engine.text.tokenizer import Tokenizer


def build_service(config: Config) -> Service:
    """Return the running service of `config`, connected to the engine's socket. Raises
    AdapterError if an adapter of LORA_MODULES is invalid."""
    tokenizer = Tokenizer.load(config.graph_path)
    files = (config.run_path / ENGINE_FAILED_FILE, config.run_path / ENGINE_SUSPECT_FILE)
    client = EngineClient(f"ipc://{config.engine_socket}", *files)

    def cache_size() -> tuple[int, int] | None:
        stats = client.stats
        return (stats["num_blocks"], stats["block_size"]) if "num_blocks" in stats else None

    loras = LoraRegistry.of_server(config)
    processor = InputProcessor.load(config, config.graph_path, tokenizer, cache_size, loras)
    processor = replace(processor, model_hash=model_hash(config.graph_path))
    return Service(processor, client, ServiceOptions.of(config))
