"""The gRPC health service (grpc.health.v1), under the names by which an endpoint picker is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.server import Stream

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
_WATCH_SECONDS = 0.25


class GrpcHealth(HealthBase):  # type: ignore[misc]
    """`liveness` is SERVING as long as anything answers; the server as a whole, `readiness` and the external processor
    are while `is_ready()`. Other names are unknown: NOT_FOUND to a Check, SERVICE_UNKNOWN to a Watch, as the protocol
    asks. A Watch tells a change within a quarter of a second."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def Check(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:  # noqa: N802
        request = await stream.recv_message()
        service = "" if request is None else request.service
        status = self._status(service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise GRPCError(Status.NOT_FOUND, f"there is no service {service!r}")
        await stream.send_message(HealthCheckResponse(status=status))

    async def Watch(self, stream: Stream[HealthCheckRequest, HealthCheckResponse]) -> None:  # noqa: N802
        request = await stream.recv_message()
        service, told = "" if request is None else request.service, None
        while True:
            status = self._status(service)
            if status != told:
                await stream.send_message(HealthCheckResponse(status=status))
                told = status
            await asyncio.sleep(_WATCH_SECONDS)

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus.ValueType:
        if service == LIVENESS or (service in READINESS and self._is_ready()):
            return HealthCheckResponse.SERVING
        return HealthCheckResponse.NOT_SERVING if service in READINESS else HealthCheckResponse.SERVICE_UNKNOWN
