"""Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

log = logging.getLogger("caudex.server")

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


MAX_MESSAGE = 1000
"""Longer messages are cut: values that they name may be as long as a body."""


class APIError(Exception):
    """A refusal to show the client: `message` names the value and the remedy, `param` the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        self.status = status
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        return TYPE_OF_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """The JSON of the error, the same in a response body and in a stream's event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {"retry-after": "1"} if self.status in (429, 503) else None
        return Response(self.body(), status_code=self.status, media_type="application/json", headers=headers)


def engine_dead(error: object) -> APIError:
    """The engine has stopped: no request can be answered until the server is started again."""
    reason = f": {error}" if error else ""
    return APIError(f"the engine is not running{reason}; restart the server", status=503, code="engine_dead")


async def on_api_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, APIError)
    return exc.response()


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """Unknown paths and methods, in the same shape as every other refusal."""
    assert isinstance(exc, HTTPException)
    message = f"{request.method} {request.url.path}: {exc.detail}"
    response = APIError(message, status=exc.status_code).response()
    response.headers.update(exc.headers or {})
    return response


async def on_exception(request: Request, exc: Exception) -> Response:
    """A fault of ours. The client learns that it happened; the log learns what."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    return APIError("internal error; the server's log says more", status=500).response()


HANDLERS: dict[Any, Any] = {
    APIError: on_api_error,
    HTTPException: on_http_exception,
    Exception: on_exception,
}
