"""What operators, probes and routers ask: models, health, version, metrics, forgetting the cache."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from caudex.server.errors import engine_dead
from caudex.server.metrics import CONTENT_TYPE
from caudex.server.service import Service


class OperationEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._service.check_model(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """200 while the engine runs; 503, with what killed it, when it does not."""
        if not self._service.engine.is_alive:
            return engine_dead(self._service.engine.error).response()
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("caudex")})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget every block that no running request uses."""
        self._service.engine.reset_prefix_cache()
        return Response(status_code=200)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "caudex",
            "root": self._service.engine.model_name,
            "parent": None if self._service.adapter_of(name) is None else self._service.engine.model_name,
            "max_model_len": self._service.engine.max_model_len,
        }
