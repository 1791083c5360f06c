"""From a request under /v1 to the point where it may be sent: who asks, may they, what is it, is there room."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from caudex.gateway.access_log import AccessRecord
from caudex.gateway.client_connection import ClientConnection
from caudex.gateway.forwarding import Forwarding
from caudex.gateway.http_messages import HttpError, HttpRequest
from caudex.gateway.prompt import Body, decode_body, describe
from caudex.gateway.salting import with_cache_salt
from caudex.gateway.tenants import Tenant

if TYPE_CHECKING:
    from caudex.gateway.gateway import Gateway


_PROMPT_PATHS = frozenset(
    {b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings"}
)


def _must_be_json(request: HttpRequest) -> bool:
    """Whether the body is one to look into. What has a prompt is, whatever type it is said to be; uploads are not."""
    if request.method != "POST" or not request.body:
        return False
    content_type = request.header(b"content-type")
    return request.path in _PROMPT_PATHS or content_type is None or b"json" in content_type


class Relay:
    """Serves requests under /v1 from the workers. With no worker available the answer is 503 at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def serve(self, request: HttpRequest, client: ClientConnection, record: AccessRecord) -> None:
        gateway = self._gateway
        if b".." in request.path or b"%" in request.path:
            raise HttpError(400, "the path must be plain: without dots that lead upwards, and without escapes")
        tenant = gateway.tenants.authenticate(request.header(b"authorization"))
        record.tenant = tenant.name
        if gateway.rules is not None and request.method == "POST":
            request.body, changed = gateway.rules.apply(request.body)
            for rule in changed:
                gateway.metrics.rules.labels(rule).inc()
        body = decode_body(request.body) if _must_be_json(request) else Body()
        salt = tenant.cache_salt(body.cache_salt if isinstance(body.cache_salt, str) else "")
        if tenant.salt is not None and _must_be_json(request):
            request.body = with_cache_salt(request.body, body, salt)
        features = describe(body, session_header=request.header(b"x-session-id"), tenant=tenant.name, salt=salt)
        if gateway.token_prompts is not None and len(features.keys):
            adapter = features.model if features.model in gateway.workers.adapters else ""
            features = gateway.token_prompts.refine(features, request.body, adapter=adapter, salt=salt)
        record.model, record.prompt_tokens = features.model, features.num_tokens
        if not gateway.workers.num_available():
            raise HttpError(503, "no worker is available", "overloaded_error", 1.0)
        tenant.check(features.num_tokens, request.received_at)
        home = gateway.response_homes.find(body.previous_response_id)
        await self._admitted(Forwarding(gateway, request, client, features, record, home), tenant)

    async def _admitted(self, forwarding: Forwarding, tenant: Tenant) -> None:
        gateway = self._gateway
        tenant.in_flight += 1
        try:
            queued_at = time.monotonic()
            await gateway.admission.enter()
            began = time.monotonic()
            forwarding.queued_seconds = began - queued_at
            gateway.metrics.queue_seconds.observe(began - queued_at)
            try:
                await forwarding.run()
            finally:
                gateway.admission.leave(time.monotonic() - began)
        finally:
            tenant.in_flight -= 1
