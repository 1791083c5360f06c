"""The workers: who is a member, who is up, and what follows when that changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np

from caudex.gateway.fetch import fetch
from caudex.gateway.settings import GatewaySettings
from caudex.gateway.upstream_pool import UpstreamPool, parse_endpoint
from caudex.gateway.worker import FAILURES_TO_REST, REST_SECONDS, Worker, WorkerState
from caudex.gateway.worker_metrics import parse_worker_metrics
from caudex.routing import Fleet

log = logging.getLogger("caudex.gateway")

_DOWN_PROBE_INTERVAL = 0.4
"""A worker that comes back is found within this, well under the two seconds until which it should have traffic."""

_MODELS_EVERY_PROBES = 15


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None
    """The base model, if this is an adapter."""


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class Workers:
    """Keeps `Fleet` and the world in step.

    A worker starts unavailable and is UP after its first good probe. It goes DOWN at once when it refuses connections,
    and after `probes_to_down` unanswered probes when nothing else was heard from it meanwhile (a server busy computing
    may be slow to answer /health, but then its streams move). Requests out at a silent worker are given up when it
    goes DOWN: those with nothing sent to their client yet are sent elsewhere. One that refuses connections may be
    shutting down in good order, finishing what it has; if it is dead, its connections say so themselves. Its cache is
    taken to be lost when its process is another one, or when it refused connections; a paused process keeps it.
    """

    def __init__(self, fleet: Fleet, settings: GatewaySettings, on_cache_lost: Callable[[Worker], None]) -> None:
        self.fleet = fleet
        self._settings = settings
        self._on_cache_lost = on_cache_lost
        self._by_url: dict[str, Worker] = {}
        self._by_slot: dict[int, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_start: Callable[[Worker], None] = lambda worker: None
        self.on_remove: Callable[[Worker], None] = lambda worker: None
        self.adapters: set[str] = set()

    def all(self) -> list[Worker]:
        return list(self._by_url.values())

    def at(self, slot: int) -> Worker:
        return self._by_slot[slot]

    def num_available(self) -> int:
        return int(np.count_nonzero(self.fleet.available))

    def add(self, url: str) -> Worker:
        """Adds a worker, or takes one back that is draining; ValueError if the address is none."""
        endpoint = parse_endpoint(url)
        worker = self._by_url.get(endpoint.url)
        if worker is None:
            slot = self.fleet.join(endpoint.url, available=False)
            worker = Worker(slot, UpstreamPool(endpoint, self._settings.connect_timeout))
            self._start(worker)
        elif worker.state is WorkerState.DRAINING:
            worker.state = WorkerState.STARTING
            self._wake[worker.url].set()
        return worker

    def adopt_slots(self, worker_ids: list[str | None], wanted: list[str], forget: Callable[[int], None]) -> None:
        """Gives workers the slots that a snapshot knows them by; what it knows of others is forgotten."""
        urls = {parse_endpoint(url).url for url in wanted}
        joined = [name or f"empty slot {slot}" for slot, name in enumerate(worker_ids)]
        for name in joined:
            self.fleet.join(name, available=False)
        for slot, name in enumerate(joined):
            if name in urls:
                self._start(Worker(slot, UpstreamPool(parse_endpoint(name), self._settings.connect_timeout)))
        for name in joined:
            if name not in urls:
                forget(self.fleet.leave(name))

    def drain(self, url: str) -> Worker:
        """No new requests; those out there finish. KeyError if there is no such worker."""
        worker = self._by_url[parse_endpoint(url).url]
        worker.state = WorkerState.DRAINING
        self._publish()
        log.info("worker %s draining, %d requests in flight", worker.url, worker.in_flight)
        return worker

    def remove(self, url: str) -> None:
        """Removes a worker and gives up what is out there. KeyError if there is no such worker."""
        worker = self._by_url.pop(parse_endpoint(url).url)
        self._tasks.pop(worker.url).cancel()
        del self._wake[worker.url]
        self._give_up(worker, "the worker was removed")
        worker.pool.close()
        del self._by_slot[worker.slot]
        self.fleet.leave(worker.url)
        self.on_remove(worker)
        self._on_cache_lost(worker)
        log.info("worker %s removed", worker.url)

    async def drain_and_remove(self, url: str) -> None:
        """Removes a worker once it has finished what it has, or after the drain timeout."""
        worker = self.drain(url)
        deadline = time.monotonic() + self._settings.drain_timeout
        while worker.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if worker.state is WorkerState.DRAINING and worker.url in self._by_url:
            self.remove(worker.url)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for worker in self._by_url.values():
            worker.pool.close()

    def _start(self, worker: Worker) -> None:
        self._by_url[worker.url] = self._by_slot[worker.slot] = worker
        self._wake[worker.url] = asyncio.Event()
        self._tasks[worker.url] = asyncio.create_task(self._watch(worker), name=f"watch {worker.url}")
        log.info("worker %s added", worker.url)
        self.on_start(worker)

    # What requests tell

    def succeeded(self, worker: Worker) -> None:
        worker.failures = 0

    def failed(self, worker: Worker) -> None:
        """A request failed there before its first byte: ask after the worker now, and let it rest if it goes on."""
        worker.failures += 1
        if worker.failures >= FAILURES_TO_REST:
            worker.resting_until = time.monotonic() + REST_SECONDS
            self._publish()
        self._wake_up(worker)

    def refused(self, worker: Worker) -> None:
        """It does not accept connections."""
        worker.failures += 1
        self._went_down(worker, "it refuses connections", cache_lost=True)
        self._wake_up(worker)

    # Probing

    async def _watch(self, worker: Worker) -> None:
        wake = self._wake[worker.url]
        num_probes = 0
        while True:
            await self._probe(worker, with_models=num_probes % _MODELS_EVERY_PROBES == 0)
            well = worker.state in (WorkerState.UP, WorkerState.DRAINING) and worker.failed_probes == 0
            num_probes = num_probes + 1 if well else 0
            worker.pool.close_stale(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_interval if well else _DOWN_PROBE_INTERVAL):
                    await wake.wait()
            wake.clear()

    async def _probe(self, worker: Worker, *, with_models: bool) -> None:
        began = time.monotonic()
        try:
            status, _ = await fetch(worker.pool, "/health", self._settings.probe_timeout)
        except ConnectionRefusedError:
            self._went_down(worker, "it refuses connections", cache_lost=True)
            return
        except OSError:
            self._unanswered(worker, began)
            return
        if status >= 500:
            self._went_down(worker, f"its health check says {status}", cache_lost=False)
            return
        worker.failed_probes = 0
        worker.last_heard = time.monotonic()
        await self._read_figures(worker)
        if with_models:
            await self._read_models(worker)
        self._came_up(worker)

    async def _read_figures(self, worker: Worker) -> None:
        try:
            status, page = await fetch(worker.pool, "/metrics", self._settings.probe_timeout)
        except OSError:
            return
        if status != 200:
            return
        figures = parse_worker_metrics(page.decode("utf-8", "replace"))
        self.fleet.report(worker.slot, figures.load)
        worker.kv_usage = figures.load.kv_usage
        if figures.started_at is not None:
            if worker.generation is not None and figures.started_at != worker.generation:
                log.warning("worker %s is a new process: its cache is empty", worker.url)
                if not worker.cache_lost:
                    self._on_cache_lost(worker)
            worker.generation = figures.started_at

    async def _read_models(self, worker: Worker) -> None:
        try:
            key = self._settings.worker_api_key
            status, body = await fetch(worker.pool, "/v1/models", self._settings.probe_timeout, key)
            if status == 200:
                models = msgspec.json.decode(body, type=_ModelList).data
                self.fleet.set_models(worker.slot, frozenset(model.id for model in models))
                self.adapters.update(model.id for model in models if model.parent is not None)
        except (OSError, msgspec.MsgspecError):
            return

    def _unanswered(self, worker: Worker, began: float) -> None:
        if worker.last_heard >= began:
            worker.failed_probes = 0
            return
        worker.failed_probes += 1
        if worker.failed_probes >= self._settings.probes_to_down or worker.state is WorkerState.STARTING:
            why = f"{worker.failed_probes} health checks were not answered"
            self._went_down(worker, why, cache_lost=False)
            self._give_up(worker, f"the worker is down: {why}")
        self._publish()

    def _came_up(self, worker: Worker) -> None:
        if worker.state in (WorkerState.DOWN, WorkerState.STARTING):
            worker.state = WorkerState.UP
            worker.cache_lost = False
            worker.failures = 0
            worker.resting_until = 0.0
            log.info("worker %s is up", worker.url)
        self._publish()

    def _went_down(self, worker: Worker, why: str, *, cache_lost: bool) -> None:
        if worker.state is WorkerState.UP:
            log.warning("worker %s is down: %s; %d requests in flight", worker.url, why, worker.in_flight)
        if worker.state is not WorkerState.DRAINING:
            worker.state = WorkerState.DOWN
        self._publish()
        worker.pool.close()
        if cache_lost and not worker.cache_lost:
            worker.cache_lost = True
            self._on_cache_lost(worker)

    def _give_up(self, worker: Worker, why: str) -> None:
        for request in list(worker.outstanding):
            request.abandon(why)

    def _publish(self) -> None:
        """Tells the fleet who may be sent requests: those that accept them, or, for want of any, whoever is UP."""
        now = time.monotonic()
        accepting = {worker.slot for worker in self._by_url.values() if worker.accepts(now)}
        if not accepting:
            accepting = {worker.slot for worker in self._by_url.values() if worker.state is WorkerState.UP}
        for slot in self._by_slot:
            self.fleet.set_available(slot, slot in accepting)
        self.on_change()

    def _wake_up(self, worker: Worker) -> None:
        wake = self._wake.get(worker.url)
        if wake is not None:
            wake.set()
