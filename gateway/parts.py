"""What one worker's HTTP application is made of, by the keys under which aiohttp keeps it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from engine import wire
from engine.settings.config import Config
from engine.settings.served import OWN_NAME, ServedModel
from gateway.anthropic import Anthropic
from gateway.embeddings import Embeddings
from gateway.health import Shared
from gateway.intake import Intake
from gateway.lasting import LastingBackend
from gateway.native import Native
from gateway.openai import OpenAI
from gateway.protocol import Call, Exchange
from gateway.ranking import Reranking, Scores
from gateway.received import Peer
from gateway.responses import Responses
from gateway.triton import Triton
from gateway.triton.text import TritonText

NATIVE, OPENAI, EMBEDDINGS = Native(), OpenAI(), Embeddings()
RESPONSES, ANTHROPIC, TRITON, TRITON_TEXT = Responses(), Anthropic(), Triton(), TritonText()
RANKINGS = (Scores(), Reranking())

BACKEND = web.AppKey("backend", LastingBackend)
CONFIG = web.AppKey("config", Config)
INTAKE = web.AppKey("intake", Intake)
READY = web.AppKey("ready", Shared)
SERVED = web.AppKey("served", ServedModel)
RUNNING = web.AppKey("running", list)  # the requests being answered
BEGUN = web.AppKey("begun", set[Peer])  # who has begun one since heads.py has looked
DRAINING = web.AppKey("draining", asyncio.Event)
LABELS = web.AppKey("labels", dict[str, int])  # how many a model tells apart, by its id
DOCUMENT = web.AppKey("document", dict[str, Any])  # OpenAPI's


def served_name(app: web.Application) -> str:
    return app[SERVED].name(app[CONFIG].served_model_name)


def name_adapter(call: Call, exchange: Exchange, model: str | None) -> None:
    """Say in the model's requests which adapter they are for, if `model` names one."""
    if call.config.has_loras and model not in (None, "", call.model_name, OWN_NAME):
        for each in exchange.requests:
            each["lora_name"] = wire.FIELDS["lora_name"].check("model", model)


async def num_labels(app: web.Application) -> int:
    """By which the served model scores prompts. Asked once, so that later requests can wait for one that is away."""
    served, known = app[SERVED].now(), app[LABELS]
    if served.is_changing or served.id not in known:
        known[served.id] = (await app[BACKEND].probe()).num_labels
    return known[served.id]
