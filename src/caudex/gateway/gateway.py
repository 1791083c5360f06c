"""The gateway: what happens to a request between being read and being answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from caudex.gateway.access_log import AccessLog, AccessRecord
from caudex.gateway.admin import AdminApi
from caudex.gateway.admission import Admission
from caudex.gateway.client_connection import ClientConnection
from caudex.gateway.decisions import Decisions
from caudex.gateway.discovery import Source, follow
from caudex.gateway.http_messages import HttpError, HttpRequest, error_body
from caudex.gateway.kv_subscriber import KvSubscriber, publisher_address
from caudex.gateway.metrics import GatewayMetrics
from caudex.gateway.relay import Relay
from caudex.gateway.response_homes import ResponseHomes
from caudex.gateway.rules import PromptRules
from caudex.gateway.settings import GatewaySettings
from caudex.gateway.snapshot import Snapshot, read_snapshot, write_snapshot
from caudex.gateway.tenants import Tenants
from caudex.gateway.token_prompt import TokenPrompts
from caudex.gateway.worker import Worker
from caudex.gateway.workers import Workers
from caudex.routing import Fleet, HonestyCheck, Policy, make_policy
from caudex.routing.event_index import EventIndex

log = logging.getLogger("caudex.gateway")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}\Z")
_SWEEP_SECONDS = 1.0
_FIRST_REQUEST_SECONDS = 2.0
"""For which a gateway that stops keeps a connection that has not asked yet: its request may be on its way."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens a key, until a worker's KV events say what its blocks hold."""


class Gateway:
    """Answers clients' requests from workers. All state is here and in what it holds; there is no global.

    Every request that is admitted leaves again (`Admission`), every flight lands (`Fleet`), whatever happens: both are
    released in `finally`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        policy: Policy | None = None,
        tenants: Tenants | None = None,
        access_log: AccessLog | None = None,
        rules: PromptRules | None = None,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.events = EventIndex() if settings.kv_events is not None else None
        self.policy = self._make_policy() if policy is None else policy
        self.token_prompts = None if settings.tokenizer is None else TokenPrompts(settings.tokenizer, self._block_size)
        self._subscribers: dict[str, KvSubscriber] = {}
        self._followers: list[asyncio.Task[None]] = []
        self.tenants = Tenants([]) if tenants is None else tenants
        self.metrics = GatewayMetrics()
        self.fleet = Fleet()
        self.honesty = HonestyCheck()
        self.response_homes = ResponseHomes()
        self.workers = Workers(self.fleet, settings, self._cache_lost)
        self.admission = Admission(self._capacity, settings.max_queue, settings.queue_timeout)
        self.workers.on_change = self._availability_changed
        self.workers.on_start = self._subscribe
        self.workers.on_remove = self._unsubscribe
        self.connections: set[ClientConnection] = set()
        self.closing = False
        self.buffered_bytes = 0
        self._access_log = access_log
        self.decisions = Decisions(self)
        self.relay = Relay(self)
        self._admin = AdminApi(self.workers, settings.admin_key)
        self._housekeeping: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None

    async def start(self, worker_urls: list[str], sources: Sequence[Source] = ()) -> None:
        """Takes up what a snapshot kept, then the workers; to be called on the loop that serves."""
        await self._restore(worker_urls, sources)
        for url in worker_urls:
            self.workers.add(url)
        self._followers = [asyncio.create_task(follow(source, self.workers)) for source in sources]
        self._housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")

    async def shutdown(self) -> None:
        """Finishes what is under way, up to the drain timeout, and keeps a snapshot."""
        self.closing = True
        began = time.monotonic()
        while self.connections and (waited := time.monotonic() - began) < self.settings.drain_timeout:
            for connection in list(self.connections):
                connection.close_if_idle(even_if_new=waited > _FIRST_REQUEST_SECONDS)
            await asyncio.sleep(0.05)
        await self.stop()

    async def stop(self) -> None:
        """Ends at once."""
        self.closing = True
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        for task in self._followers:
            task.cancel()
        for subscriber in self._subscribers.values():
            subscriber.close()
        for connection in list(self.connections):
            connection.abort()
        self.workers.close()
        if self._saving is not None:
            await self._saving
        if self.settings.snapshot_path is not None:
            self._save(self.settings.snapshot_path, self._snapshot())
        if self._access_log is not None:
            self._access_log.flush()

    def connection(self) -> ClientConnection:
        """A protocol for one more client."""
        return ClientConnection(self, asyncio.get_running_loop())

    # RequestHandler

    async def handle(self, request: HttpRequest, client: ClientConnection) -> None:
        record = self.access_record(request, client.peer)
        sent_before = client.bytes_written
        try:
            await self._answer(request, client, record)
        except HttpError as error:
            record.status, record.error = error.status, str(error)
            self.metrics.rejected.labels(record.tenant, str(error.status)).inc()
            if client.connected and not client.response_started:
                client.respond(error.status, error_body(str(error), error.kind, error.status), extra=error.headers())
        except Exception:
            log.exception("request %s could not be answered", record.request_id)
            record.status, record.error = 500, "an internal error"
            if client.response_started:
                client.abort()
            elif client.connected:
                client.respond(500, error_body("an internal error of the gateway", "server_error", 500))
        except asyncio.CancelledError:
            if record.status == 0:
                record.status, record.error = 499, "the client left"
                self.metrics.client_gone.inc()
            raise
        finally:
            record.bytes_sent = client.bytes_written - sent_before
            self.write_down(record, request)

    def write_down(self, record: AccessRecord, request: HttpRequest) -> None:
        """Counts a request that is over, and puts it in the access log."""
        self.metrics.requests.labels(str(record.status)).inc()
        if self._access_log is not None:
            record.seconds = round(time.monotonic() - request.received_at, 6)
            self._access_log.write(record)

    def access_record(self, request: HttpRequest, peer: str) -> AccessRecord:
        """A record of a request that has just been read."""
        return AccessRecord(time.time(), _request_id(request), peer, request.method, request.path.decode("latin-1"))

    def refused(self, status: int) -> None:
        self.metrics.requests.labels(str(status)).inc()

    async def _answer(self, request: HttpRequest, client: ClientConnection, record: AccessRecord) -> None:
        path = request.path
        if path.startswith(b"/v1/"):
            await self.relay.serve(request, client, record)
            return
        record.status = 200
        if path == b"/health":
            record.status = 200 if self.workers.num_available() else 503
            counts = b'{"status":"%b","workers":%d,"available":%d}' % (
                b"ok" if record.status == 200 else b"no worker is available",
                len(self.fleet),
                self.workers.num_available(),
            )
            client.respond(record.status, counts)
        elif path == b"/metrics":
            self._gauge()
            client.respond(200, self.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")
        elif path.startswith(b"/admin/"):
            client.respond(200, self._admin.answer(request))
        else:
            raise HttpError(404, f"there is nothing at {record.path}", "not_found_error")

    def drop_index(self, worker: Worker, cause: str) -> None:
        """What this worker is believed to have cached is not, or no longer, so."""
        self.policy.forget(worker.slot)
        self.honesty.forget(worker.slot)
        self.metrics.index_drops.labels(worker.url, cause).inc()

    # Inside

    def _make_policy(self) -> Policy:
        if self.events is not None and self.settings.policy in ("cost", "prefix", "prefix_exact"):
            return make_policy(self.settings.policy, index=self.events)
        return make_policy(self.settings.policy)

    def _block_size(self) -> int:
        return (self.events.block_size if self.events is not None else None) or DEFAULT_BLOCK_SIZE

    def _subscribe(self, worker: Worker) -> None:
        settings = self.settings
        if self.events is None or settings.kv_events is None:
            return
        endpoint = worker.pool.endpoint
        replay = None if settings.kv_replay is None else publisher_address(settings.kv_replay, endpoint)
        address = publisher_address(settings.kv_events, endpoint)
        self._subscribers[worker.url] = KvSubscriber(worker, self.events, address, replay)

    def _unsubscribe(self, worker: Worker) -> None:
        subscriber = self._subscribers.pop(worker.url, None)
        if subscriber is not None:
            subscriber.close()

    def _capacity(self) -> int:
        return self.workers.num_available() * self.settings.max_concurrency_per_worker

    def _availability_changed(self) -> None:
        if self.workers.num_available():
            self.admission.pump()
        else:
            self.admission.release_all(no_worker())

    def _cache_lost(self, worker: Worker) -> None:
        self.drop_index(worker, "restart")
        self.response_homes.forget(worker.slot)

    async def _keep_house(self) -> None:
        next_save = time.monotonic() + self.settings.snapshot_interval
        now = time.monotonic()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            last, now = now, time.monotonic()
            # After a time in which this process stood still, what has arrived meanwhile is read first: nobody is late.
            if now - last < 2 * _SWEEP_SECONDS:
                self._end_what_is_late(now)
            if self._access_log is not None:
                self._access_log.flush()
            self._log_rules()
            path = self.settings.snapshot_path
            if path is not None and now >= next_save:
                next_save = now + self.settings.snapshot_interval
                self._saving = asyncio.create_task(asyncio.to_thread(self._save, path, self._snapshot()))

    def _end_what_is_late(self, now: float) -> None:
        for connection in list(self.connections):
            connection.check_deadline(now)
        for worker in self.workers.all():
            for request in list(worker.outstanding):
                request.check_deadline(now)

    def _log_rules(self) -> None:
        if self.rules is not None and self.rules.applied:
            log.info("prompt rules changed requests: %s", dict(self.rules.applied))
            self.rules.applied.clear()

    def _gauge(self) -> None:
        for worker in self.workers.all():
            self.metrics.up.labels(worker.url).set(float(self.fleet.available[worker.slot]))
            self.metrics.in_flight.labels(worker.url).set(worker.in_flight)
        self.metrics.waiting.set(self.admission.waiting)
        index = getattr(self.policy, "index", None)
        self.metrics.index_bytes.set(getattr(index, "num_bytes", 0))

    def _snapshot(self) -> Snapshot:
        homes = self.response_homes.dump()
        return Snapshot(self.settings.policy, list(self.fleet.ids), self.policy.dump(), homes)

    @staticmethod
    def _save(path: Path, snapshot: Snapshot) -> None:
        try:
            write_snapshot(path, snapshot)
        except OSError as error:
            log.warning("the snapshot could not be written: %s", error)

    async def _restore(self, worker_urls: list[str], sources: Sequence[Source]) -> None:
        path = self.settings.snapshot_path
        if path is None or not path.exists():
            return
        with contextlib.suppress(OSError):
            try:
                snapshot = read_snapshot(path, self.settings.policy)
                self.policy.load(snapshot.state)
            except ValueError as error:
                log.warning("the snapshot is not used: %s", error)
                return
            self.response_homes.load(snapshot.response_homes)
            wanted = list(worker_urls)
            for source in sources:
                with contextlib.suppress(OSError):
                    wanted += await source.addresses()
            self.workers.adopt_slots(snapshot.worker_ids, wanted, self._forget_slot)

    def _forget_slot(self, slot: int) -> None:
        self.policy.forget(slot)
        self.response_homes.forget(slot)


def no_worker() -> HttpError:
    return HttpError(503, "no worker is available", "overloaded_error", 1.0)


def _request_id(request: HttpRequest) -> str:
    given = request.header(b"x-request-id")
    return given.decode() if given is not None and _REQUEST_ID.match(given) else secrets.token_hex(8)
