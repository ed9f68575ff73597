"""Construction of the service from the settings and an exported model, as the Triton model does at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from engine.exporting.files import model_hash
from engine.link.client import EngineClient
from engine.serving.input_processor import InputProcessor
from engine.serving.lora_registry import LoraRegistry
from engine.serving.options import ServiceOptions
from engine.serving.service import Service
from engine.settings.config import Config
from engine.settings.processes import ENGINE_FAILED_FILE, ENGINE_SOCKET, ENGINE_SUSPECT_FILE
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.link.engine_set import Engines


def build_service(config: Config) -> Service:
    """Return the running service of `config`, connected to the engine's socket. Raises
    AdapterError if an adapter of LORA_MODULES is invalid."""
    tokenizer = Tokenizer.load(config.graph_path)
    client = connect(config)

    def cache_size() -> tuple[int, int] | None:
        """Return number and size of the blocks of the engine that has the fewest."""
        stats = [engine.stats for engine in client.engines]
        return min(((each["num_blocks"], each["block_size"]) for each in stats if "num_blocks" in each), default=None)

    loras = LoraRegistry.of_server(config)
    processor = InputProcessor.load(config, config.graph_path, tokenizer, cache_size, loras)
    processor = replace(processor, model_hash=model_hash(config.graph_path))
    return Service(processor, client, ServiceOptions.of(config))


def connect(config: Config) -> Engines:
    """Return the client of the engine, or of all engines."""

    def client_of(index: int, on_lost: Callable[[EngineClient], None] = lambda client: None) -> EngineClient:
        socket, failed_file, suspect_file = (
            config.engine_path(name, index) for name in (ENGINE_SOCKET, ENGINE_FAILED_FILE, ENGINE_SUSPECT_FILE)
        )
        return EngineClient(f"ipc://{socket}", failed_file, suspect_file, on_lost)

    if config.data_parallel_size == 1:
        return client_of(0)
    from engine.link.engine_set import EngineSet

    return EngineSet([partial(client_of, index) for index in range(config.data_parallel_size)])
