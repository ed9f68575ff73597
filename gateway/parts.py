"""What one worker's HTTP application is made of, by the keys under which aiohttp keeps it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from engine.settings.config import Config
from engine.settings.served import ServedModel
from gateway.anthropic import Anthropic
from gateway.backend import Backend
from gateway.embeddings import Embeddings
from gateway.health import Shared
from gateway.intake import Intake
from gateway.native import Native
from gateway.openai import OpenAI
from gateway.received import Peer
from gateway.responses import Responses
from gateway.triton import Triton

NATIVE, OPENAI, EMBEDDINGS = Native(), OpenAI(), Embeddings()
RESPONSES, ANTHROPIC, TRITON = Responses(), Anthropic(), Triton()

BACKEND = web.AppKey("backend", Backend)
CONFIG = web.AppKey("config", Config)
INTAKE = web.AppKey("intake", Intake)
READY = web.AppKey("ready", Shared)
SERVED = web.AppKey("served", ServedModel)
RUNNING = web.AppKey("running", list)  # the requests being answered
BEGUN = web.AppKey("begun", set[Peer])  # who has begun one since heads.py has looked
DRAINING = web.AppKey("draining", asyncio.Event)
DOCUMENT = web.AppKey("document", dict[str, Any])  # OpenAPI's


def served_name(app: web.Application) -> str:
    return app[SERVED].now().name or app[CONFIG].served_model_name or "default"
