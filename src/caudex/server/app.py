"""The ASGI application: which path leads where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from caudex.server import anthropic, chat, completions, responses
from caudex.server.activity import ActivityLog
from caudex.server.endpoint import GenerationEndpoint
from caudex.server.errors import HANDLERS
from caudex.server.middleware import IdentifyAndCount, RequireKey
from caudex.server.operations import OperationEndpoints
from caudex.server.service import Service
from caudex.server.settings import ServerSettings
from caudex.server.tokens import TokenEndpoints

if TYPE_CHECKING:
    from caudex.engine.engine import Engine


def create_app(engine: Engine, settings: ServerSettings | None = None) -> Starlette:
    """The OpenAI-compatible application over a started engine, which the caller shuts down afterwards."""
    service = Service(engine, settings or ServerSettings())
    routes = all_routes(service)
    return Starlette(
        routes=routes,
        middleware=all_middleware(service, routes),
        exception_handlers=HANDLERS,
        lifespan=lambda app: lifespan(service),
    )


@asynccontextmanager
async def lifespan(service: Service) -> AsyncIterator[None]:
    """From before the first request to after the last."""
    interval = service.settings.log_interval
    activity = asyncio.create_task(ActivityLog(service.engine, interval).run()) if interval else None
    try:
        yield
    finally:
        if activity is not None:
            activity.cancel()
        service.close()


def all_routes(service: Service) -> list[Route]:
    operations, tokens = OperationEndpoints(service), TokenEndpoints(service)
    return [
        Route("/v1/chat/completions", GenerationEndpoint(service, chat.prepare), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(service, completions.prepare), methods=["POST"]),
        Route("/v1/responses", GenerationEndpoint(service, responses.prepare), methods=["POST"]),
        Route("/v1/messages", GenerationEndpoint(service, anthropic.prepare), methods=["POST"]),
        Route("/v1/models", operations.models),
        Route("/v1/models/{name:path}", operations.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", operations.health),
        Route("/version", operations.version),
        Route("/metrics", operations.metrics),
        Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
    ]


def all_middleware(service: Service, routes: list[Route]) -> list[Middleware]:
    settings = service.settings
    chain = [Middleware(IdentifyAndCount, service.metrics, frozenset(route.path for route in routes))]
    if settings.allowed_origins:
        origins = list(settings.allowed_origins)
        chain.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    if settings.api_keys:
        chain.append(Middleware(RequireKey, settings.api_keys))
    return chain
