"""Components of one worker's HTTP application, and the keys under which aiohttp stores them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from engine import wire
from engine.settings.config import Config
from engine.settings.served import OWN_NAME, ServedModel
from gateway.anthropic import AnthropicProtocol
from gateway.body_memory import BodyMemoryBudget
from gateway.embeddings import EmbeddingsProtocol
from gateway.health import CachedHealthCheck
from gateway.inet_diag import Peer
from gateway.native import NativeProtocol
from gateway.openai import OpenAIProtocol
from gateway.protocol import Exchange, RequestContext
from gateway.rerank import RerankProtocol, ScoreProtocol
from gateway.responses import ResponsesProtocol
from gateway.retry import RetryingBackend
from gateway.triton import TritonGenerateProtocol
from gateway.triton.text import TritonTextProtocol
from gateway.vllm_generate import VllmGenerateProtocol

NATIVE, OPENAI, EMBEDDINGS = NativeProtocol(), OpenAIProtocol(), EmbeddingsProtocol()
RESPONSES, ANTHROPIC = ResponsesProtocol(), AnthropicProtocol()
TRITON, TRITON_TEXT = TritonGenerateProtocol(), TritonTextProtocol()
SCORING = (ScoreProtocol(), RerankProtocol())
VLLM_GENERATE = VllmGenerateProtocol()

BACKEND = web.AppKey("backend", RetryingBackend)
CONFIG = web.AppKey("config", Config)
BODY_MEMORY = web.AppKey("body_memory", BodyMemoryBudget)
READY = web.AppKey("ready", CachedHealthCheck)
SERVED = web.AppKey("served", ServedModel)
RUNNING = web.AppKey("running", list)  # the requests being answered
BEGUN = web.AppKey("begun", set[Peer])  # peers that have started one since the last check of connection_limits.py
DRAINING = web.AppKey("draining", asyncio.Event)
LABELS = web.AppKey("labels", dict[str, int])  # number of labels of a model, by the model's id
DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("document")  # returns the OpenAPI document


def served_name(app: web.Application) -> str:
    """Return the name of the served model, as clients see it."""
    return app[SERVED].name(app[CONFIG].served_model_name)


def served_names(app: web.Application) -> list[str]:
    """Return all names of the served model; `served_name` is the first."""
    return app[SERVED].names(app[CONFIG].served_model_name)


def served_config(app: web.Application) -> Config:
    """Return the settings, with the folder of the model that is served now, which a reload changes."""
    graph_dir = app[SERVED].now().graph_dir
    return _with_graph(app[CONFIG], graph_dir) if graph_dir else app[CONFIG]


@functools.lru_cache(maxsize=2)
def _with_graph(config: Config, graph_dir: str) -> Config:
    return replace(config, graph_dir=graph_dir)


def name_adapter(context: RequestContext, exchange: Exchange, model: str | None) -> None:
    """Set `lora_name` in the model's requests if `model` names an adapter."""
    if context.config.has_loras and model not in (None, "", context.model_name, OWN_NAME):
        for each in exchange.requests:
            each["lora_name"] = wire.FIELDS["lora_name"].check("model", model)


async def num_labels(app: web.Application) -> int:
    """Return the number of labels by which the served model scores prompts.

    It is cached for each model, so that later requests can wait for a model server that is restarting.
    """
    served, known = app[SERVED].now(), app[LABELS]
    if served.is_changing or served.id not in known:
        known[served.id] = (await app[BACKEND].probe()).num_labels
    return known[served.id]
