"""What one worker's application holds, by these keys."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from engine.settings.config import Config
from gateway.backend import Backend
from gateway.health import Shared
from gateway.intake import Intake

BACKEND = web.AppKey("backend", Backend)
CONFIG = web.AppKey("config", Config)
INTAKE = web.AppKey("intake", Intake)
READY = web.AppKey("ready", Shared)
RUNNING = web.AppKey("running", list)  # the requests being answered
DRAINING = web.AppKey("draining", asyncio.Event)
DOCUMENT = web.AppKey("document", dict[str, Any])  # OpenAPI's


def served_name(app: web.Application) -> str:
    return app[CONFIG].served_model_name or "default"
