"""One admitted request: rank the workers, send it to the best, and to another if that one fails."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from caudex.gateway.access_log import AccessRecord
from caudex.gateway.attempt import Attempt, Outcome
from caudex.gateway.client_connection import ClientConnection
from caudex.gateway.http_messages import HOP_BY_HOP, Header, HttpError, HttpRequest, head
from caudex.gateway.upstream_connection import UpstreamConnection
from caudex.gateway.worker import Worker
from caudex.routing import Candidate, Flight, RouteRequest

if TYPE_CHECKING:
    from caudex.gateway.gateway import Gateway

log = logging.getLogger("caudex.gateway")

_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"accept-encoding"}
"""Besides what concerns one connection: what is written anew, and what would let a worker compress events, which are
looked at here."""


class Forwarding:
    """A worker that fails before the client has a byte costs a try at another worker, up to `max_attempts` in all.

    The same worker is never tried again, but for one case: there is no other, and the failure was that of a kept
    connection which the worker was just closing.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: HttpRequest,
        client: ClientConnection,
        features: RouteRequest,
        record: AccessRecord,
        home: int | None = None,
    ) -> None:
        """`home` is the worker that has what the request builds on, if there is one."""
        self._gateway = gateway
        self._home = home
        self._request = request
        self._client = client
        self._features = features
        self._record = record
        self._tried: set[int] = set()
        self._stale_slot: int | None = None
        self._why = ""
        self.queued_seconds = 0.0

    async def run(self) -> None:
        """Returns when the client has its answer; HttpError if no worker gave one."""
        while self._record.attempts < self._gateway.settings.max_attempts:
            candidate = self._gateway.decisions.choose(
                self._features, home=self._home, tried=self._tried, again=self._stale_slot
            )
            self._stale_slot = None
            if candidate is None:
                break
            self._tried.add(candidate.worker)
            self._record.attempts += 1
            worker = self._gateway.workers.at(candidate.worker)
            outcome = await self._try(worker, candidate)
            if outcome is not Outcome.RETRY:
                self._record.error = self._why
                return
            self._gateway.metrics.retries.labels(worker.url).inc()
            log.info("request %s: worker %s failed: %s", self._record.request_id, worker.url, self._why)
        if not self._tried:
            raise HttpError(503, "no worker is available", "overloaded_error", 1.0)
        raise HttpError(502, f"{len(self._tried)} workers failed; the last: {self._why}", "upstream_error", 1.0)

    async def _try(self, worker: Worker, candidate: Candidate) -> Outcome:
        gateway, features, record = self._gateway, self._features, self._record
        record.worker, record.reason = worker.url, candidate.reason.label
        record.predicted_cached_tokens = candidate.cached_tokens or 0
        now = time.monotonic()
        gateway.policy.record(features, worker.slot, now)
        flight = gateway.fleet.dispatch(worker.slot, features.num_tokens, candidate.cached_tokens or 0, now)
        attempt: Attempt | None = None
        try:
            connection = await self._connection(worker)
            if connection is None:
                self._why = "it cannot be connected to"
                return Outcome.RETRY
            attempt = self._attempt(worker, connection, flight)
            if record.attempts == 1:
                waited = time.monotonic() - self._request.received_at
                gateway.metrics.added_seconds.observe(waited - self.queued_seconds)
            outcome = await attempt.run(self._request_for(worker), bodiless=self._request.method == "HEAD")
            self._learn(worker, candidate, attempt, outcome)
            return outcome
        except asyncio.CancelledError:
            ending = None if attempt is None else attempt.ending()
            if attempt is not None and ending is not None:
                self._learn(worker, candidate, attempt, ending)
                record.error = self._why
            raise
        finally:
            gateway.fleet.land(flight, time.monotonic())

    def _attempt(self, worker: Worker, connection: UpstreamConnection, flight: Flight) -> Attempt:
        fleet, settings = self._gateway.fleet, self._gateway.settings
        return Attempt(
            worker,
            connection,
            self._client,
            settings,
            on_first_token=lambda: fleet.first_token(flight, time.monotonic()),
            reply_headers=[(b"x-request-id", self._record.request_id.encode())],
            may_retry=self._record.attempts < settings.max_attempts and self._has_other(),
            path=self._request.path,
        )

    def _has_other(self) -> bool:
        eligible = self._gateway.fleet.eligible(self._features.model).nonzero()[0].tolist()
        return any(slot not in self._tried for slot in eligible)

    async def _connection(self, worker: Worker) -> UpstreamConnection | None:
        workers = self._gateway.workers
        idle = worker.pool.take_idle(time.monotonic())
        if idle is not None:
            return idle
        try:
            return await worker.pool.connect()
        except ConnectionRefusedError:
            workers.refused(worker)
        except OSError:
            workers.failed(worker)
        return None

    def _learn(self, worker: Worker, candidate: Candidate, attempt: Attempt, outcome: Outcome) -> None:
        """Takes in how an attempt ended."""
        gateway, record = self._gateway, self._record
        self._why = attempt.why
        record.status = attempt.status
        if attempt.was_stale:
            self._stale_slot = worker.slot
        elif outcome is Outcome.DONE and attempt.status < 500:
            gateway.workers.succeeded(worker)
        else:
            gateway.workers.failed(worker)
        if outcome is Outcome.BROKEN:
            gateway.metrics.broken.labels(worker.url).inc()
        if attempt.first_byte_at is not None:
            seconds = attempt.first_byte_at - self._request.received_at
            record.first_byte_seconds = round(seconds, 6)
            gateway.metrics.first_byte_seconds.observe(seconds)
        if attempt.response_id is not None:
            gateway.response_homes.remember(record.tenant, attempt.response_id, worker.slot)
        if attempt.usage is not None and candidate.cached_tokens is not None:
            record.reported_cached_tokens = attempt.usage.cached_tokens
            gateway.decisions.compare(candidate, self._features.num_tokens, attempt.usage)

    def _request_for(self, worker: Worker) -> bytes:
        request, settings, endpoint = self._request, self._gateway.settings, worker.pool.endpoint
        hide_key = settings.worker_api_key is not None or not self._gateway.tenants.open
        dropped = _NOT_FORWARDED | _named_by_connection(request.headers)
        if hide_key:
            dropped |= {b"authorization"}
        headers: list[Header] = [header for header in request.headers if header[0] not in dropped]
        headers.append((b"host", endpoint.authority))
        if settings.worker_api_key is not None:
            headers.append((b"authorization", f"Bearer {settings.worker_api_key}".encode("latin-1")))
        headers.append((b"x-request-id", self._record.request_id.encode()))
        if request.body or request.method in ("POST", "PUT", "PATCH"):
            headers.append((b"content-length", b"%d" % len(request.body)))
        target = endpoint.base_path.encode() + request.target
        return head(b"%b %b HTTP/1.1\r\n" % (request.method.encode(), target), headers) + request.body


def _named_by_connection(headers: list[Header]) -> frozenset[bytes]:
    """Headers that the client says are for this connection only."""
    named = [
        value for name, value in headers if name == b"connection" and value.lower() not in (b"keep-alive", b"close")
    ]
    return frozenset(token.strip().lower() for value in named for token in value.split(b","))
