"""The endpoint picker over gRPC, asked as Envoy asks: its health, subsets to choose from, lists to fall back on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from caudex.bench.local import free_port

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body

pytest.importorskip("envoy_data_plane", reason="needs the extra caudex[envoy]")

from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from envoy_data_plane.google.protobuf import ListValue, Struct, Value
from grpclib.client import Channel, StreamStreamMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

DESTINATION = "x-gateway-destination-endpoint"
Answer = TypeVar("Answer")


def ask(port: int, question: Callable[[Channel], Awaitable[Answer]]) -> Answer:
    async def asked() -> Answer:
        channel = Channel("127.0.0.1", port)
        try:
            async with asyncio.timeout(PATIENCE):
                return await question(channel)
        finally:
            channel.close()

    return asyncio.run(asked())


def pick(port: int, subset: list[str] | None = None, **fields: Any) -> ProcessingResponse:
    """The answer to a chat request, with the addresses to choose from if there are any."""
    headers = [("method", "POST"), ("path", "/v1/chat/completions"), ("authority", "a")]
    head = HeaderMap(headers=[HeaderValue(key=f":{name}", raw_value=value.encode()) for name, value in headers])
    context = None
    if subset is not None:
        addresses = Value(list_value=ListValue(values=[Value(string_value=address) for address in subset]))
        context = Metadata(
            filter_metadata={"envoy.lb.subset_hint": Struct(fields={f"{DESTINATION}-subset": addresses})}
        )
    body = json.dumps(chat_body("hello", **fields)).encode()
    messages = [
        ProcessingRequest(request_headers=HttpHeaders(headers=head), metadata_context=context),
        ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)),
    ]

    async def question(channel: Channel) -> ProcessingResponse:
        process = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
        return list(await StreamStreamMethod(channel, process, ProcessingRequest, ProcessingResponse)(messages))[-1]

    return ask(port, question)


def destinations(answer: ProcessingResponse) -> list[str]:
    """The addresses of an answer, which are the same in the header and in the metadata."""
    assert answer.request_body is not None
    assert answer.request_body.response is not None
    mutation = answer.request_body.response.header_mutation
    assert mutation is not None
    headers = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    assert answer.dynamic_metadata is not None
    chosen = answer.dynamic_metadata.fields["envoy.lb"].struct_value
    assert chosen.fields[DESTINATION].string_value == headers[DESTINATION]
    return headers[DESTINATION].split(",")


def health(port: int, service: str) -> int:
    async def question(channel: Channel) -> int:
        answer = await HealthStub(channel).Check(HealthCheckRequest(service=service))
        return int(answer.status)

    return ask(port, question)


def test_only_workers_of_the_subset_are_chosen(
    start_worker: Callable[[], SmallWorker], start_gateway: Callable[..., RunningGateway]
) -> None:
    workers, picker = [start_worker() for _ in range(3)], free_port()
    start_gateway(workers, "--ext-proc-port", str(picker), "--ext-proc-endpoints", "3")
    addresses = [f"127.0.0.1:{worker.port}" for worker in workers]
    assert sorted(destinations(pick(picker))) == sorted(addresses)
    for allowed in (addresses[:1], addresses[1:]):
        assert sorted(destinations(pick(picker, [*allowed, "10.9.9.9:1"]))) == sorted(allowed)
    for nobody in ([], ["10.9.9.9:1"]):
        refusal = pick(picker, nobody).immediate_response
        assert refusal is not None
        assert int(refusal.status.code) == 503
        assert b"no worker is available" in refusal.body


def test_one_address_unless_more_are_asked_for(
    two_workers: list[SmallWorker], start_gateway: Callable[..., RunningGateway]
) -> None:
    picker = free_port()
    start_gateway(two_workers, "--ext-proc-port", str(picker))
    assert len(destinations(pick(picker))) == 1


def test_health_by_name(two_workers: list[SmallWorker], start_gateway: Callable[..., RunningGateway]) -> None:
    picker, idle_picker = free_port(), free_port()
    start_gateway(two_workers, "--ext-proc-port", str(picker))
    start_gateway([], "--ext-proc-port", str(idle_picker), "--admin-key", "k")
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert health(picker, service) == HealthCheckResponse.SERVING
    assert health(idle_picker, "liveness") == HealthCheckResponse.SERVING
    assert health(idle_picker, "readiness") == HealthCheckResponse.NOT_SERVING
    with pytest.raises(GRPCError) as refused:
        health(picker, "nonesuch")
    assert refused.value.status is Status.NOT_FOUND


def test_a_watch_tells_when_there_are_workers(
    start_worker: Callable[[], SmallWorker], start_gateway: Callable[..., RunningGateway]
) -> None:
    worker, picker = start_worker(), free_port()
    gateway = start_gateway([], "--ext-proc-port", str(picker), "--admin-key", "k")

    async def watch(channel: Channel) -> list[int]:
        told: list[int] = []
        async with HealthStub(channel).Watch.open() as stream:
            await stream.send_message(HealthCheckRequest(service="readiness"), end=True)
            async for answer in stream:
                told.append(answer.status)
                if len(told) == 2:
                    await stream.cancel()
                    break
                headers = {"authorization": "Bearer k"}
                add = gateway.client.post("/admin/workers", json={"url": worker.url}, headers=headers)
                assert add.status_code == 200
        return told

    assert ask(picker, watch) == [HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING]
