"""From a request under /v1 to the point where it may be sent: who asks, may they, what is it, is there room."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caudex.gateway.access_log import AccessRecord
from caudex.gateway.client_connection import ClientConnection
from caudex.gateway.forwarding import Forwarding
from caudex.gateway.http_messages import HttpError, HttpRequest
from caudex.gateway.prompt import Body, decode_body, describe
from caudex.gateway.salting import with_cache_salt, with_plain_names
from caudex.gateway.tenants import Tenant
from caudex.routing import RouteRequest

if TYPE_CHECKING:
    from caudex.gateway.gateway import Gateway


_PROMPT_PATHS = frozenset(
    {b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/v1/embeddings"}
)
_PLAIN_PATH = re.compile(rb"[A-Za-z0-9/._~:@!$&'()*+,;=-]*")
"""What a worker cannot read as another path than is read here: no escape, no backslash, no fragment."""

_RESPONSES = b"/v1/responses"
_MAX_MODEL_NAME_LOGGED = 200


def _must_be_json(request: HttpRequest) -> bool:
    """Whether the body is one to look into. What has a prompt is, whatever type it is said to be; uploads are not."""
    if request.method != "POST" or not request.body:
        return False
    content_type = request.header(b"content-type")
    return request.path in _PROMPT_PATHS or content_type is None or b"json" in content_type


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before a worker is chosen; `home` is the one that has what it builds on."""

    features: RouteRequest
    tenant: Tenant
    home: int | None


class Relay:
    """Serves requests under /v1 from the workers. With no worker available the answer is 503 at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def serve(self, request: HttpRequest, client: ClientConnection, record: AccessRecord) -> None:
        asked = self.read(request, record)
        forwarding = Forwarding(self._gateway, request, client, asked.features, record, asked.home)
        await self._admitted(forwarding, asked.tenant)

    def read(self, request: HttpRequest, record: AccessRecord) -> Asked:
        """Who asks for what, with the request's body made fit for a worker; HttpError if it may not go there."""
        gateway = self._gateway
        if b".." in request.path or b"//" in request.path or not _PLAIN_PATH.fullmatch(request.path):
            raise HttpError(400, "the path must be plain: without escapes, fragments, or dots that lead upwards")
        tenant = gateway.tenants.authenticate(request.header(b"authorization"))
        record.tenant = tenant.name
        if gateway.rules is not None and request.method == "POST":
            request.body, changed = gateway.rules.apply(request.body)
            for rule in changed:
                gateway.metrics.rules.labels(rule).inc()
        body = self._body(request)
        salt = tenant.cache_salt(body.cache_salt if isinstance(body.cache_salt, str) else "")
        if tenant.salt is not None and _must_be_json(request):
            request.body = with_cache_salt(request.body, body, salt)
        features = describe(body, session_header=request.header(b"x-session-id"), tenant=tenant.name, salt=salt)
        if gateway.token_prompts is not None and len(features.keys):
            adapter = features.model if features.model in gateway.workers.adapters else ""
            features = gateway.token_prompts.refine(features, request.body, adapter=adapter, salt=salt)
        record.model, record.prompt_tokens = features.model[:_MAX_MODEL_NAME_LOGGED], features.num_tokens
        if not gateway.workers.num_available():
            raise HttpError(503, "no worker is available", "overloaded_error", 1.0)
        tenant.check(features.num_tokens, request.received_at)
        return Asked(features, tenant, self._home(request, body, tenant))

    def _body(self, request: HttpRequest) -> Body:
        if not _must_be_json(request):
            return Body()
        body = decode_body(request.body)
        if request.path == _RESPONSES and not self._gateway.tenants.open:
            request.body = with_plain_names(request.body)
            body = decode_body(request.body)
        return body

    def _home(self, request: HttpRequest, body: Body, tenant: Tenant) -> int | None:
        """The worker with the response that this request builds on or asks for, if it is known. With tenants, what is
        not known to be the tenant's own does not exist: 404."""
        response_id = body.previous_response_id
        if request.path.startswith(_RESPONSES + b"/"):
            response_id = request.path[len(_RESPONSES) + 1 :].partition(b"/")[0].decode("latin-1")
        if not isinstance(response_id, str):
            return None
        home = self._gateway.response_homes.find(tenant.name, response_id)
        if home is None and not self._gateway.tenants.open:
            raise HttpError(404, f"there is no response {response_id[:200]!r}", "not_found_error")
        return home

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
