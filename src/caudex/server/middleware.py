"""What happens to every request before and after its path: keys, request ids, counting."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from caudex.server.errors import APIError
from caudex.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Paths that need no key: those that probes and scrapers ask."""

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequireKey:
    """Refuses requests without `Authorization: Bearer KEY` (or Anthropic's `x-api-key: KEY`) for one of the keys.

    Keys are compared in constant time: how long a refusal takes says nothing about how much of a guess was right.
    Each key is a tenant of its own, which `scope["tenant"]` names to the paths: by a digest of the key, so that it is
    the same tenant on every server that shares a KV tier, in whatever order each was given its keys.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._tenants = [f"key {hashlib.blake2b(key, digest_size=16).hexdigest()}" for key in self._keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        number = self._number_of_key(Headers(scope=scope))
        if number is not None:
            scope["tenant"] = self._tenants[number]
            await self._app(scope, receive, send)
        else:
            message = "this server wants an API key: send the header 'Authorization: Bearer KEY'"
            refusal = APIError(message, status=401, code="invalid_api_key").response()
            await refusal(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Probes, and the browser's question whether it may ask, which never carries a key."""
        return scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"

    def _number_of_key(self, headers: Headers) -> int | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [hmac.compare_digest(token.encode(), key) for key in self._keys]
        return matches.index(True) if any(matches) else None


class IdentifyAndCount:
    """Answers every request with an `x-request-id`, the client's own if it sent one, and counts it by path and status.

    Paths that are not the server's are counted together, so that a scanner cannot make series without end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = (given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex).encode()
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
                self._metrics.count_http(path, message["status"])
            await send(message)

        await self._app(scope, receive, send_marked)
