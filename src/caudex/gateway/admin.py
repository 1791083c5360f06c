"""The admin API: list, add, drain and remove workers."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import msgspec

from caudex.gateway.http_messages import HttpError, HttpRequest
from caudex.gateway.worker import Worker
from caudex.gateway.workers import Workers


class _WorkerCommand(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class AdminApi:
    """`GET /admin/workers`; `POST /admin/workers[/drain|/remove]` with `{"url": ...}`. Off without an admin key.

    `drain` stops new requests and leaves the worker a member; `remove` drains it and then removes it.
    """

    def __init__(self, workers: Workers, key: str | None) -> None:
        self._workers = workers
        self._key = key
        self._removals: set[asyncio.Task[None]] = set()

    def answer(self, request: HttpRequest) -> bytes:
        """The answer's body, or HttpError."""
        self._authenticate(request.header(b"authorization"))
        if request.method == "GET" and request.path == b"/admin/workers":
            return msgspec.json.encode({"workers": [describe_worker(worker) for worker in self._workers.all()]})
        if request.method == "POST" and request.path in (
            b"/admin/workers",
            b"/admin/workers/drain",
            b"/admin/workers/remove",
        ):
            return msgspec.json.encode(self._command(request))
        raise HttpError(404, f"there is no {request.method} {request.path.decode('latin-1')}", "not_found_error")

    def _command(self, request: HttpRequest) -> dict[str, Any]:
        try:
            url = msgspec.json.decode(request.body, type=_WorkerCommand).url
            if request.path == b"/admin/workers":
                return describe_worker(self._workers.add(url))
            if request.path == b"/admin/workers/drain":
                return describe_worker(self._workers.drain(url))
            removal = asyncio.create_task(self._workers.drain_and_remove(url))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            return {"url": url, "state": "draining"}
        except KeyError as error:
            raise HttpError(404, f"there is no worker {error.args[0]}", "not_found_error") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise HttpError(400, str(error)) from error

    def _authenticate(self, authorization: bytes | None) -> None:
        if self._key is None:
            raise HttpError(404, "the admin API is off; start the gateway with an admin key", "not_found_error")
        if not hmac.compare_digest(authorization or b"", b"Bearer " + self._key.encode()):
            raise HttpError(401, "no valid admin key was given", "authentication_error")


def describe_worker(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "state": worker.state.value,
        "in_flight": worker.in_flight,
        "kv_usage": worker.kv_usage,
    }
